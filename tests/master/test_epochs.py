"""Weight epochs: a bump is in effect here at once, and on every node before it serves again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvstrata.master import messages as m
from kvstrata.master.content import scopes as scopes_module
from kvstrata.master.content.misses import MissReason
from kvstrata.master.daemon import Master
from kvstrata.master.directory.probing import Keys
from kvstrata.master.saved import Saved
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.errors import Busy, FingerprintMismatch, InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.status import PlaceState
from kvstrata.proto.wire import Kind
from tests.master.world import NS, SALT, World, hashes

Make = Callable[..., Any]


def epochs_sent(world: World) -> list[m.SendEpoch]:
    return [command for command in world.commands if isinstance(command, m.SendEpoch)]


def test_from_the_bump_on_nothing_older_is_found_by_any_handle() -> None:
    world = World()
    session = world.up(1, 2)
    opened, _ = world.state.open_namespace(NS)
    cleared = world.bump()
    assert world.of(m.Cleared) == [m.Cleared(opened.group.number, None)], "the older number, for the predictions"
    assert (cleared.epoch, cleared.blocks, cleared.awaited) == (1, 2, {"n"})
    assert world.found(1, 2) == world.found(1, 2, epoch=0) == world.found(1, 2, epoch=1) == []
    again, _ = world.state.open_namespace(NS)
    assert again.handle == opened.handle and again.group.epoch == 1
    assert world.state.namespaces.by_handle(opened.handle) == again
    (sent,) = epochs_sent(world)
    assert sent == m.SendEpoch(session, cleared.command, NS.group, 1)
    assert world.of(m.SaveGroup)[-1] == m.SaveGroup(NS, 1)


def test_what_is_stored_after_it_is_found_by_handles_of_the_new_epoch_alone() -> None:
    world = World()
    session = world.up(1)
    world.bump()
    world.delta(session, 1, add=[2], epoch=1)
    assert world.found(1, 2) == world.found(1, 2, epoch=1) == [2]
    assert world.found(1, 2, epoch=0) == world.found(1, 2, epoch=2) == []
    assert set(world.lookup(1, 2, epoch=0).reasons.tolist()) == {MissReason.EPOCH}


def test_a_lookup_that_began_before_it_finds_nothing_after_it() -> None:
    world = World()
    world.up(1)
    opened, _ = world.state.open_namespace(NS)
    world.bump()
    found = world.state.questions.lookup(NS, opened.group.number, SALT, _keys(1), "", world.now, 0)
    assert not found.found.present.any() and found.reasons.tolist() == [MissReason.EPOCH]
    with pytest.raises(FingerprintMismatch, match="weight epoch 1"):
        world.state.questions.place(NS, opened.group.number, SALT, _keys(1), "", world.now)


def _keys(*numbers: int) -> Keys:
    return fold(hashes(*numbers), 16)


def test_placements_and_reports_of_an_older_handle_are_refused_and_ignored() -> None:
    world = World()
    session = world.up()
    assert world.place(7).states.tolist() == [PlaceState.NEW]
    world.bump()
    with pytest.raises(FingerprintMismatch, match="open the namespace again"):
        world.place(7, epoch=0)
    assert world.place(7, epoch=1).states.tolist() == [PlaceState.NEW], "an intent of the past holds up nobody"
    world.delta(session, 1, add=[1], epoch=1)
    world.miss(1, seq=9, epoch=0)
    assert world.found(1) == [1] and world.state.counts["miss_reports_of_other_epochs"] == 1
    world.miss(1, seq=9, epoch=1)
    assert world.found(1) == []


def test_what_a_node_says_of_older_epochs_is_ignored_and_counted() -> None:
    world = World()
    session = world.up(1)
    world.bump()
    world.delta(session, 1, add=[2], epoch=0)  # was under way when the epoch began
    world.delta(session, 2, add=[4], epoch=1)
    world.delta(session, 3, remove=[4], epoch=0)
    assert world.found(1, 2, 4) == [4]
    assert world.state.counts["holdings_of_other_epochs"] == 2
    again = world.attach()
    world.snapshot(again, 3, 1, 2, epoch=0, last=False)
    world.bump()
    world.snapshot(again, 3, 5, epoch=1, first=False)
    assert world.found(1, 2, 4, 5) == [], "what a snapshot loaded before a bump is of before it"


def test_blocks_of_a_later_epoch_tell_a_master_that_leads_of_it() -> None:
    """Another has led since, and this one has not heard of that yet: what it passed over now it would never know."""
    world = World()
    other, session = world.up(1, node_id="other"), world.up(1)
    began = len(world.commands)
    world.delta(session, 1, add=[2, 3], epoch=2)
    assert world.found(1, 2, 3) == [2, 3] and world.state.namespaces.named(NS.group).epoch == 2
    assert m.SaveGroup(NS, 2) in world.commands[began:] and m.SendEpoch(other, 0, NS.group, 2) in world.commands[began:]
    assert world.state.counts["holdings_of_other_epochs"] == 0
    world.delta(other, 1, add=[4], epoch=0)
    assert world.found(1, 2, 3, 4) == [2, 3], "the other has not switched yet"


def test_misses_after_it_are_counted_as_such() -> None:
    world = World()
    session = world.up(1, 2)
    world.bump()
    world.delta(session, 1, add=[1], epoch=1)
    assert world.reasons(1, 2, 9) == [MissReason.EPOCH, MissReason.NEVER_STORED]
    world.delta(session, 2, remove=[1], epoch=1, reason=2)
    assert world.reasons(1) == [MissReason.EVICTED_QUOTA]


def test_a_node_that_attaches_learns_epochs_before_anything_and_confirms_what_it_missed() -> None:
    world = World(Saved(nodes=(m.SaveNode("away", 1 << 30, 1 << 30, False),)))
    session = world.up(1)
    cleared = world.bump()
    assert world.state.unconfirmed(cleared.command) == ["away", "n"]
    world.tell(m.CommandDone(session, cleared.command))
    assert world.state.unconfirmed(cleared.command) == ["away"]
    later = World(world.saved())
    began = len(later.commands)
    late = later.attach("away")
    said = [command for command in later.commands[began:] if isinstance(command, m.Send)]
    assert isinstance(said[0], m.SendAttached) and said[0].epochs == ((NS.group, 1),)
    assert said[1] == m.SendEpoch(late, cleared.command, NS.group, 1)
    later.snapshot(late, 0, 1)
    assert later.found(1) == [], "it has not switched yet"
    later.tell(m.CommandDone(late, cleared.command))
    assert later.state.unconfirmed(cleared.command) == [] and not later.saved().scopes


def test_the_epoch_and_what_waits_outlive_the_master() -> None:
    world = World()
    world.up(1)
    first = world.bump()
    later = World(world.saved())
    assert later.state.namespaces.named(NS.group).epoch == 1
    assert later.state.unconfirmed(first.command) == ["n"]
    session = later.attach()
    later.snapshot(session, 0, 1)
    assert later.found(1) == []
    second = later.bump()
    assert second.epoch == 2 and second.command > first.command
    assert epochs_sent(later)[-1] == m.SendEpoch(session, second.command, NS.group, 2)


def test_an_older_bump_is_no_longer_kept_for_nodes_that_are_away() -> None:
    world = World(Saved(nodes=(m.SaveNode("away", 1 << 30, 1 << 30, False),)))
    session = world.up(1)
    first = world.bump()
    second = world.bump()
    assert world.state.unconfirmed(first.command) == ["away", "n"], "away has to confirm what covers it"
    assert world.state.unconfirmed(second.command) == ["away", "n"]
    world.tell(m.CommandDone(session, first.command))
    assert world.state.unconfirmed(first.command) == ["away"]
    world.tell(m.CommandDone(session, second.command))
    assert [scope.command for scope in world.saved().scopes] == [second.command]
    world.attach("away")
    assert epochs_sent(world)[-1].epoch == 2


def test_a_node_knows_an_epoch_that_an_emptied_master_does_not() -> None:
    world = World()
    other = world.up(1, node_id="other")
    facts, number = m.NodeFacts("n", 1, channel="h:1", dram_bytes=1 << 30), world.group()
    commands = world.tell(m.Attach(facts, epochs=((NS.group, 3), ("unheard", 2), ("bad", (1 << 64) - 1))))
    assert world.found(1) == [] and world.state.namespaces.named(NS.group).epoch == 3
    assert m.Cleared(number, None) in commands
    assert m.SendEpoch(other, 0, NS.group, 3) in commands and m.SaveGroup(NS, 3) in commands
    assert m.SendEpoch(other, 0, "unheard", 2) in commands, "others have to know, whoever opens it"
    (attached,) = [command for command in commands if isinstance(command, m.SendAttached)]
    assert dict(attached.epochs) == {NS.group: 3, "unheard": 2}
    unheard = type(NS)("unheard", 4096, 16)
    opened, saves = world.state.open_namespace(unheard)
    assert opened.group.epoch == 2 and saves == [m.SaveGroup(unheard, 2)]


def test_a_bump_is_bounded_and_names_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    with pytest.raises(InvalidArgument, match="no namespace group 'other'"):
        world.state.bump("other", world.now)
    world.up(1)
    monkeypatch.setattr(scopes_module, "SCOPES_MAX", 1)
    world.bump()
    with pytest.raises(Busy, match="wait for nodes that are away"):
        world.state.bump(NS.group, world.now)
    world.state.check()
    assert world.state.namespaces.named(NS.group).epoch == 1, "refused means nothing happened"


def test_a_bump_looks_into_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.up(*range(1000))

    def forbidden(*_: object) -> None:
        raise AssertionError("a bump is O(1) in blocks")

    for name in ("remap", "update", "find", "histogram", "entries"):
        monkeypatch.setattr(f"kvstrata.master.directory.table.Table.{name}", forbidden)
    cleared, _ = world.state.bump(NS.group, world.now)
    assert cleared.blocks == 1000


# ---------------------------------------------------------------------- over sockets


@pytest.fixture
def stub(master: Master, closing: Make) -> Any:
    return control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))


def test_a_bump_waits_for_confirmations_and_says_who_is_missing(stub: Any, node: Make, client: Any, wires: Any) -> None:
    holder = node("a")
    holder.blocks = os.urandom(48)
    holder.attach()
    silent = node("b").attach()
    client.open()
    answers: list[control.Dropped] = []
    asked = threading.Thread(
        target=lambda: answers.append(stub.BumpEpoch(control.GroupName(group=NS.group, deadline_ms=20_000)))
    )
    asked.start()
    for each in (holder, silent):
        sent = each.hear("epoch").epoch
        assert (sent.group, sent.epoch) == (NS.group, 1)
        assert client.lookup(holder.blocks).hit_blocks == 0
        assert not answers
        each.say(done=control.CommandDone(command=sent.command))
    asked.join(10)
    (answer,) = answers
    assert (answer.epoch, answer.blocks, list(answer.unreached)) == (1, 3, [])
    began = time.monotonic()
    late = stub.BumpEpoch(control.GroupName(group=NS.group, deadline_ms=100))
    assert (late.epoch, list(late.unreached)) == (2, ["a", "b"]) and time.monotonic() - began < 5
    epoch = client.ask(
        Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=wires.ns.to_spec()), pb.NamespaceHandle, Kind.NAMESPACE_HANDLE
    )
    assert (epoch.handle, epoch.epoch) == (client.handle, 2)


def test_a_node_that_leaves_is_not_waited_for(stub: Any, node: Make, client: Any) -> None:
    holder = node("a").attach()
    client.open()
    answers: list[control.Dropped] = []
    asked = threading.Thread(
        target=lambda: answers.append(stub.BumpEpoch(control.GroupName(group=NS.group, deadline_ms=30_000)))
    )
    asked.start()
    holder.hear("epoch")
    holder.say(detach=control.Detach(reason="stopping"))
    asked.join(10)
    assert [list(answer.unreached) for answer in answers] == [["a"]]


def test_the_channel_carries_the_epoch(stub: Any, node: Make, client: Any) -> None:
    holder = node("a").attach()
    client.open()
    stub.BumpEpoch(control.GroupName(group=NS.group, deadline_ms=1))
    block = os.urandom(16)
    holder.seq += 1
    change = control.Change(added=True, spec=NS.to_spec(), salt="", hashes=block, epoch=1)
    holder.say(delta=control.Delta(seq=holder.seq, changes=[change]))
    holder.hear("ack")

    def hits(epoch: int) -> int:
        request = pb.Lookup(ns=client.handle, hashes=block, epoch=epoch)
        return int(client.ask(Kind.LOOKUP, request, pb.LookupOk, Kind.LOOKUP_OK).hit_blocks)

    assert (hits(0), hits(1), hits(2)) == (0, 1, 0)
    with pytest.raises(FingerprintMismatch, match="weight epoch 1"):
        client.ask(Kind.PLACE, pb.Place(ns=client.handle, hashes=block), pb.PlaceOk, Kind.PLACE_OK)


def test_an_unknown_group_is_a_bad_argument(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.BumpEpoch(control.GroupName(group="nothing"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "namespace list" in refused.value.details()
