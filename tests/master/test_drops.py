"""Drops of tenants and namespaces, listings of blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstrata.master import messages as m
from kvstrata.master.client_calls import ClientCalls
from kvstrata.master.content import listing as listing_module
from kvstrata.master.content.calls import Content
from kvstrata.master.content.listing import Listing
from kvstrata.master.content.misses import MissReason
from kvstrata.master.daemon import Master
from kvstrata.master.saved import Saved
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState
from tests.master.world import NS, SALT, World, hashes

Make = Callable[..., Any]
OTHER = "other"
AWAY = Saved(nodes=(m.SaveNode("away", 1 << 30, 1 << 30, False),))


def up(world: World) -> int:
    """A node with blocks 1 and 2 of the tenant, 1 and 3 of another one."""
    session = world.up(1, 2)
    world.delta(session, 1, add=[1, 3], salt=OTHER)
    return session


@pytest.mark.parametrize(
    "group, salt, left, blocks",
    [
        ("", SALT, ([], [1, 3]), 2),
        ("", None, ([], []), 4),
        (NS.group, OTHER, ([1, 2], []), 2),
        (NS.group, None, ([], []), 4),
        ("", "nobody", ([1, 2], [1, 3]), 0),
    ],
)
def test_a_scope_goes_at_once_and_the_rest_stays(
    group: str, salt: str | None, left: tuple[list[int], list[int]], blocks: int
) -> None:
    world = World()
    session = up(world)
    assert world.state.clearing.counted(group, salt) == blocks
    cleared = world.drop(group, salt, erase=True)
    assert (cleared.blocks, cleared.awaited) == (blocks, {"n"})
    assert (world.found(1, 2, 3), world.found(1, 2, 3, salt=OTHER)) == left
    assert world.of(m.SendDrop) == [m.SendDrop(session, cleared.command, group, salt, True)]
    assert world.of(m.SaveScope) == [m.SaveScope(cleared.command, group, salt, True, None, ("n",))]
    assert world.of(m.Cleared) == [m.Cleared(world.group() if group else None, salt)], "for the predictions"
    world.tell(m.CommandDone(session, cleared.command))
    assert world.state.unconfirmed(cleared.command) == [] and not world.saved().scopes


def test_misses_of_what_was_dropped_say_so_until_it_is_stored_again() -> None:
    world = World()
    session = up(world)
    cleared = world.drop("", SALT)
    assert world.reasons(1, 2, 9) == [MissReason.DROPPED, MissReason.DROPPED, MissReason.NEVER_STORED]
    assert world.reasons(9, salt=OTHER) == [MissReason.NEVER_STORED]
    world.tell(m.CommandDone(session, cleared.command))
    world.delta(session, 2, add=[1])
    assert world.found(1, 2) == [1] and world.reasons(1, 2) == [MissReason.DROPPED]


def test_what_was_under_way_when_a_tenant_was_dropped_stays_out() -> None:
    world = World()
    session = up(world)
    cleared = world.drop("", SALT)
    world.delta(session, 2, add=[4])  # stored before the node heard of the drop, or after: who knows
    world.delta(session, 3, add=[5], salt=OTHER)
    assert world.found(1, 4) == [] and world.found(5, salt=OTHER) == [5]
    commands = world.tell(m.CommandDone(session, cleared.command))
    assert [type(c) for c in commands if isinstance(c, m.Send)] == [m.SendResync]
    world.delta(session, 4, add=[6])
    world.snapshot(session, 4, 4, 6)  # the node says what it really has now
    assert world.found(1, 4, 6) == [4, 6]


def test_no_snapshot_is_asked_for_when_nothing_was_held_back() -> None:
    world = World()
    session = up(world)
    cleared = world.drop("", SALT)
    world.delta(session, 2, remove=[1])
    world.delta(session, 3, add=[9], salt=OTHER)
    assert not any(isinstance(c, m.SendResync) for c in world.tell(m.CommandDone(session, cleared.command)))
    assert world.found(9, salt=OTHER) == [9]


def test_a_node_that_was_away_is_told_before_what_it_holds_counts() -> None:
    world = World(AWAY)
    session = up(world)
    cleared = world.drop(NS.group, SALT)
    world.tell(m.CommandDone(session, cleared.command))
    later = World(world.saved())
    late = later.attach("away")
    assert m.SendDrop(late, cleared.command, NS.group, SALT) in later.commands
    later.snapshot(late, 0, 1, 7)
    assert later.found(1, 7) == []
    commands = later.tell(m.CommandDone(late, cleared.command))
    assert any(isinstance(c, m.SendResync) for c in commands)
    later.snapshot(late, 0, 8)
    assert later.found(1, 7, 8) == [8] and not later.saved().scopes


def test_a_node_that_could_not_is_asked_again_and_its_new_blocks_count_meanwhile() -> None:
    world = World()
    session = up(world)
    cleared = world.drop("", SALT)
    world.tell(m.CommandDone(session, cleared.command, error="device gone"))
    world.delta(session, 2, add=[4])
    assert world.found(4) == [4]
    assert world.state.unconfirmed(cleared.command) == ["n"]
    again = world.attach()
    assert m.SendDrop(again, cleared.command, "", SALT) in world.commands
    world.snapshot(again, 2, 1)
    assert world.found(1) == []


def test_intents_of_a_dropped_tenant_are_void() -> None:
    world = World()
    up(world)
    world.place(7)
    assert world.place(7).states.tolist() == [PlaceState.IN_FLIGHT]
    assert world.reasons(7) == [MissReason.IN_FLIGHT]
    world.drop("", SALT)
    assert world.place(7).states.tolist() == [PlaceState.NEW]


def test_a_dropped_group_keeps_its_handle_its_layout_and_its_epoch() -> None:
    world = World()
    up(world)
    opened, _ = world.state.open_namespace(NS)
    world.bump()
    world.drop(NS.group, None)
    again, commands = world.state.open_namespace(NS)
    assert (again.handle, again.group.epoch, commands) == (opened.handle, 1, [])


def test_a_later_drop_covers_earlier_ones_for_nodes_that_are_away() -> None:
    world = World(AWAY)
    up(world)
    narrow, erasing, wide = world.drop("", SALT), world.drop(NS.group, OTHER, erase=True), world.drop("", None)
    waiting = [world.state.unconfirmed(each.command) for each in (narrow, erasing, wide)]
    assert waiting == [["away", "n"]] * 3, "who waits for the first is not told that all nodes have done it"
    assert [scope.waiting for scope in world.state.clearing.scopes if scope.command == narrow.command] == [{"n"}]
    late = world.attach("away")
    told = [c.command for c in world.commands if isinstance(c, m.SendDrop) and c.session == late]
    assert told == [erasing.command, wide.command]
    world.tell(m.CommandDone(late, wide.command, ""))
    assert world.state.unconfirmed(narrow.command) == ["n"]


def test_a_drop_that_is_covered_again_and_again_stays_unconfirmed_by_who_is_away() -> None:
    world = World(AWAY)
    world.state.open_namespace(NS)
    first = world.drop(NS.group, SALT)
    for _ in range(200):  # each covers the one before
        last = world.drop(NS.group, SALT)
    assert world.state.unconfirmed(first.command) == ["away"]
    assert len(world.state.clearing.scopes) == 1
    late = world.attach("away")
    world.tell(m.CommandDone(late, last.command, ""))
    assert world.state.unconfirmed(first.command) == []


def test_numbers_of_drops_are_not_reused() -> None:
    world = World()
    up(world)
    numbers = [world.drop("", SALT).command, world.remove(1).command, world.bump().command]
    assert len(set(numbers)) == 3
    later = World(world.saved())
    later.up()
    assert later.drop("", SALT).command > max(numbers)


# ---------------------------------------------------------------------- listings


def listed(world: World, group: str = "", salt: str | None = None, prefix: bytes = b"", limit: int = 0) -> Listing:
    listing = Listing(group, salt, prefix, limit)
    for _ in range(10_000):
        if listing.step(world.state, world.now):
            return listing
    raise AssertionError("it does not end")


def test_blocks_are_listed_by_tenant_namespace_and_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "STEP_SLOTS", 7)
    world = World()
    session = up(world)
    world.delta(session, 2, add=[1], tier=1)
    world.delta(session, 3, remove=[2])
    everything = listed(world)
    assert everything.total == 3
    assert {(row.salt, row.key, row.where) for row in everything.rows} == {
        (SALT, hashes(1), ("n/dram", "n/ssd")),
        (OTHER, hashes(1), ("n/dram",)),
        (OTHER, hashes(3), ("n/dram",)),
    }
    assert [(row.salt, row.group, row.shard) for row in listed(world, salt=SALT).rows] == [(SALT, NS.group, 0)]
    assert listed(world, group=NS.group, salt="nobody").total == 0
    assert [row.key for row in listed(world, prefix=hashes(3)).rows] == [hashes(3)]
    assert listed(world, prefix=bytes(15)).total == 3 and listed(world, prefix=b"\1").total == 0
    limited = listed(world, limit=1)
    assert len(limited.rows) == 1 and limited.total == 3
    limited = listed(world, prefix=bytes(4), limit=2)
    assert len(limited.rows) == 2 and limited.total == 3
    with pytest.raises(InvalidArgument):
        listed(world, group="unknown")
    with pytest.raises(InvalidArgument):
        Listing("", None, bytes(33), 0)


def test_long_hashes_are_found_whole_and_as_they_are_shown() -> None:
    world = World()
    session = world.up()
    long = Namespace("long", 4096, 16, hash_bytes=32)
    block = os.urandom(32)
    world.tell(m.DeltaBatch(session, 1, (m.Change(True, long, "", 0, block),)))
    (row,) = listed(world).rows
    for prefix in (block, row.key, row.key[:5]):
        assert [found.key for found in listed(world, prefix=prefix).rows] == [row.key]


def test_a_hidden_replica_is_shown_as_such() -> None:
    world = World()
    up(world)
    world.miss(1, seq=9)
    assert {row.where for row in listed(world, salt=SALT, prefix=hashes(1)).rows} == {("n/hidden",)}


# ---------------------------------------------------------------------- over sockets


@pytest.fixture
def stub(master: Master, closing: Make) -> Any:
    return control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))


def test_drops_and_listings_over_grpc(stub: Any, node: Make, client: Any, master: Master) -> None:
    holder = node("a")
    holder.blocks = os.urandom(48)
    holder.attach()
    holder.change(add=os.urandom(16), salt="tenant")
    everything = stub.ListBlocks(control.BlockQuery(any_salt=True, limit=2))
    assert (everything.total, len(everything.blocks)) == (4, 2)
    (row,) = stub.ListBlocks(control.BlockQuery(salt="tenant")).blocks
    assert (row.group, row.shard, list(row.where)) == ("model", 0, ["a/dram"])
    dry = stub.DropBlocks(control.Scope(any_salt=True, dry_run=True))
    assert (dry.blocks, list(dry.unreached)) == (4, [])
    assert client.lookup(holder.blocks).hit_blocks == 3, "a dry run changes nothing"
    answers: list[control.Dropped] = []
    order = control.Scope(salt="", erase=True, deadline_ms=20_000)
    asked = threading.Thread(target=lambda: answers.append(stub.DropBlocks(order)))
    asked.start()
    drop = holder.hear("drop").drop
    assert (drop.group, drop.salt, drop.any_salt, drop.erase) == ("", "", False, True)
    assert client.lookup(holder.blocks).hit_blocks == 0
    holder.say(done=control.CommandDone(command=drop.command))
    asked.join(10)
    assert [(each.blocks, list(each.unreached)) for each in answers] == [(3, [])]
    assert stub.ListBlocks(control.BlockQuery(any_salt=True)).total == 1
    late = Content(master.hub).clear("", None, deadline_ms=1)
    assert (late.blocks, list(late.unreached)) == (1, ["a"])


def test_a_drop_outlives_the_master(tmp_path: Path, wires: Any, closing: Make) -> None:
    state = tmp_path / "state.db"
    first = closing(wires.process(state))
    holder = closing(wires.node(first.ready["grpc"], "a"))
    holder.blocks = os.urandom(32)
    holder.attach()
    stub = control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(first.ready["grpc"])))
    assert list(stub.DropBlocks(control.Scope(group="model", any_salt=True, deadline_ms=1)).unreached) == ["a"]
    assert stub.BumpEpoch(control.GroupName(group="model", deadline_ms=1)).epoch == 1
    first.kill()
    second = closing(wires.process(state))
    again = closing(wires.node(second.ready["grpc"], "a", 2))
    again.begin()
    attached = again.hear("attached").attached
    assert [(epoch.group, epoch.epoch) for epoch in attached.epochs] == [("model", 1)]
    assert again.hear("drop").drop.group == "model" and again.hear("epoch").epoch.epoch == 1


def test_what_was_known_of_the_uses_of_a_dropped_tenant_is_forgotten(
    master: Master, stub: control_pb2_grpc.MasterStub, eventually: Make
) -> None:
    calls, log = ClientCalls(master.hub), master.hub.lookup_log
    opened = calls.open_namespace(NS)

    def asked() -> list[int]:
        return log.read(lambda what_if: [what_if.asked_by(salt).blocks_asked for salt in (SALT, OTHER)])

    for salt in (SALT, OTHER):
        calls.lookup(opened, salt, os.urandom(16), "")
    eventually(lambda: asked() == [1, 1])
    stub.RemoveTenant(control.TenantRemove(salt=SALT, drop_blocks=True))
    eventually(lambda: asked() == [0, 1])
