"""The sync protocol and its neighbours, event by event."""

from __future__ import annotations

import pytest

from kvstrata.master import messages as m
from kvstrata.master.liveness import NodeState
from kvstrata.master.saved import Saved
from kvstrata.proto.errors import FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState
from tests.master.world import NS, SALT, World, hashes

# ---------------------------------------------------------------------- attach, snapshot, deltas


def test_nothing_is_routed_before_the_snapshot_is_whole() -> None:
    world = World()
    session = world.attach()
    assert world.node_state() is NodeState.JOINING
    world.snapshot(session, 0, 1, 2, last=False)
    assert world.found(1, 2, 3) == []
    assert world.place(9).states.tolist() == [PlaceState.NOWHERE]
    world.snapshot(session, 0, 3, first=False)
    assert world.found(1, 2, 3) == [1, 2, 3]
    assert world.node_state() is NodeState.ACTIVE


def test_deltas_between_snapshot_parts_apply_above_the_cut_only() -> None:
    world = World()
    session = world.attach()
    world.delta(session, 4, add=[40])  # the snapshot will already tell of it
    world.snapshot(session, 4, 1, 40, last=False)
    world.delta(session, 5, add=[50], remove=[1])
    assert not world.delta(session, 5, add=[50], remove=[1]), "a repeated one is no gap"
    assert world.found(1, 40, 50) == []
    commands = world.snapshot(session, 4, 2, first=False)
    assert world.found(1, 2, 40, 50) == [2, 40, 50]
    assert m.SendAck(session, 5) in commands


def test_duplicates_and_old_deltas_are_ignored_and_acknowledged() -> None:
    world = World()
    session = world.up(1)
    assert world.delta(session, 1, add=[2]) == [m.SendAck(session, 1)]
    assert world.delta(session, 1, remove=[2]) == [m.SendAck(session, 1)]
    assert world.found(1, 2) == [1, 2]


def test_a_gap_asks_for_a_snapshot_once_and_keeps_serving() -> None:
    world = World()
    session = world.up(1, 2)
    commands = world.delta(session, 3, add=[30])
    assert [type(command) for command in commands] == [m.SendResync, m.Report]
    assert not world.delta(session, 4, add=[40])
    assert world.found(1, 2, 30, 40) == [1, 2]
    world.snapshot(session, 3, 2, 30)
    assert world.found(1, 2, 30, 40) == [2, 30, 40]
    assert len(world.of(m.SendResync)) == 1


def test_a_gap_while_a_snapshot_loads_voids_that_snapshot() -> None:
    world = World()
    session = world.attach()
    world.snapshot(session, 1, 1, last=False)
    world.delta(session, 2, add=[2])
    assert any(isinstance(c, m.SendResync) for c in world.delta(session, 4, add=[4]))
    world.snapshot(session, 1, 9, first=False)  # the rest of the void one
    assert world.found(1, 9) == [] and world.node_state() is NodeState.JOINING
    world.snapshot(session, 4, 1, 2, 4)
    assert world.found(1, 2, 4, 9) == [1, 2, 4]


def test_gap_upon_gap_asks_once_and_the_last_run_of_deltas_counts() -> None:
    world = World()
    session = world.up(1)
    world.delta(session, 3, add=[3])
    assert not world.delta(session, 5, add=[5])
    assert not world.delta(session, 6, add=[6])
    world.snapshot(session, 4, 1, 3)
    assert world.found(1, 3, 5, 6) == [1, 3, 5, 6]
    assert len(world.of(m.SendResync)) == 1


def test_too_many_deltas_before_the_end_of_a_snapshot_void_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.master.attachment.KEPT_BYTES_MAX", 40)
    world = World()
    session = world.attach()
    world.snapshot(session, 0, 1, last=False)
    world.delta(session, 1, add=[10, 11])
    assert any(isinstance(c, m.SendResync) for c in world.delta(session, 2, add=[12]))
    world.snapshot(session, 0, 2, first=False)
    assert world.node_state() is NodeState.JOINING
    world.snapshot(session, 2, 1, 2, 10, 11, 12)
    assert world.found(1, 2, 10, 11, 12) == [1, 2, 10, 11, 12]


def test_a_snapshot_that_ends_before_the_first_kept_delta_is_a_gap() -> None:
    world = World()
    session = world.attach()
    world.delta(session, 7, add=[7])
    assert any(isinstance(c, m.SendResync) for c in world.snapshot(session, 5, 1))
    assert world.node_state() is NodeState.JOINING


def test_a_part_without_a_first_is_a_gap() -> None:
    world = World()
    session = world.attach()
    assert any(isinstance(c, m.SendResync) for c in world.snapshot(session, 0, 1, first=False))


def test_a_second_snapshot_replaces_the_first_at_its_end() -> None:
    world = World()
    session = world.up(1, 2)
    world.snapshot(session, 0, 3, last=False)
    assert world.found(1, 2, 3) == [1, 2]
    world.snapshot(session, 0, 4, first=False)
    assert world.found(1, 2, 3, 4) == [3, 4]


def test_events_of_an_ended_session_are_ignored() -> None:
    world = World()
    old = world.up(1)
    new = world.attach()
    assert m.CloseSession(old, "the node attached again") in world.commands
    world.delta(old, 1, add=[5])
    world.snapshot(old, 0)
    world.tell(m.Detach(old))
    world.tell(m.LinkLost(old))
    world.tell(m.StatusReport(old, m.NodeUsage(dram_bytes_free=0)))
    assert world.found(1, 5) == [1]
    world.snapshot(new, 1, 5)
    assert world.found(1, 5) == [5]


def test_the_same_incarnation_serves_its_old_inventory_until_the_swap() -> None:
    world = World()
    session = world.up(1, 2)
    world.tell(m.LinkLost(session))
    again = world.attach()
    assert world.found(1, 2) == [1, 2] and world.node_state() is NodeState.ACTIVE
    world.snapshot(again, 0, 2, 3)
    assert world.found(1, 2, 3) == [2, 3]


def test_an_address_that_changed_is_handed_out_after_the_next_attach() -> None:
    world = World()
    world.up(1)
    world.attach(unix_path="/new.sock")
    assert world.found(1) == [1]
    assert [facts.unix_path for facts in world.state.membership.slot_facts.values()] == ["/new.sock"]


def test_another_incarnation_forgets_the_old_inventory_at_once() -> None:
    world = World()
    world.up(1, 2)
    session = world.attach(incarnation=2)
    assert world.found(1, 2) == [] and world.node_state() is NodeState.JOINING
    world.snapshot(session, 0, 2)
    assert world.found(1, 2) == [2]
    assert world.state.membership.slot_facts.popitem()[1].incarnation == 2


def test_an_older_incarnation_cannot_displace_one_that_is_attached() -> None:
    world = World()
    session = world.up(1, incarnation=5)
    commands = world.tell(m.Attach(m.NodeFacts("n", 4, channel="h:1")))
    assert [type(command) for command in commands] == [m.CloseSession]
    assert world.found(1) == [1]
    world.tell(m.LinkLost(session))  # its data directory was made anew: the counter began again
    world.snapshot(world.attach(incarnation=4), 0, 2)
    assert world.found(1, 2) == [2]


def test_a_holding_of_another_layout_is_refused_and_the_rest_is_kept() -> None:
    world = World()
    session = world.up(1)
    other = Namespace("model", block_bytes=4096, block_tokens=16)
    change = m.Change(True, other, SALT, 0, hashes(2))
    good = m.Change(True, NS, SALT, 0, hashes(3))
    commands = world.tell(m.DeltaBatch(session, 1, (change, good)))
    assert world.found(1, 2, 3) == [1, 3]
    assert any(isinstance(c, m.Report) for c in commands)
    with pytest.raises(FingerprintMismatch, match=r"block_bytes 4096 \(known: 1048576\)"):
        world.state.open_namespace(other)


# ---------------------------------------------------------------------- life and death


def test_suspected_is_not_routed_and_not_forgotten_offline_is_forgotten() -> None:
    world = World()
    session = world.up(1)
    world.wait(2.75)
    assert world.found(1) == [1]
    world.wait(0.5)
    assert world.node_state() is NodeState.SUSPECTED and world.found(1) == []
    assert world.place(5).states.tolist() == [PlaceState.NOWHERE]
    assert world.state.directory.blocks == 1
    world.tell(m.Heartbeat("n", 1))
    world.tell(m.StatusReport(session, m.NodeUsage()))
    assert world.found(1) == [1]
    world.wait(10.25)
    assert world.node_state() is NodeState.OFFLINE and world.state.directory.blocks == 0
    assert any(isinstance(c, m.CloseSession) and c.session == session for c in world.commands)


def test_a_heartbeat_keeps_a_node_and_one_of_another_incarnation_does_not() -> None:
    world = World()
    session = world.up(1)
    for _ in range(20):
        world.wait(1.0, beating=[("n", 1)])
        world.tell(m.StatusReport(session, m.NodeUsage()))
    assert world.node_state() is NodeState.ACTIVE
    world.wait(11.0, beating=[("n", 2), ("stranger", 1)])
    assert world.node_state() is NodeState.OFFLINE
    assert not world.state.membership.knows("n", 1)


def test_a_dying_node_leaves_at_once_and_the_others_stay() -> None:
    world = World()
    world.up(1, 2, node_id="n")
    world.up(2, 3, node_id="other")
    world.tell(m.Heartbeat("n", 1, dying=True))
    assert world.found(1, 2, 3) == [2, 3]


def test_a_master_that_stood_still_forgets_no_one() -> None:
    world = World()
    world.up(1)
    world.now += 60.0
    world.tell(m.Tick())
    assert world.node_state() is NodeState.ACTIVE and world.found(1) == [1]
    world.wait(10.25)
    assert world.node_state() is NodeState.OFFLINE


def test_a_detached_node_is_gone_and_nobody_waits_for_it() -> None:
    world = World()
    session = world.up(1)
    world.tell(m.Detach(session, "stopping"))
    assert world.found(1) == [] and world.node_state() is NodeState.OFFLINE
    last = world.of(m.SaveNode)[-1]
    assert last == m.SaveNode("n", 1 << 30, 0, gone=True)
    assert not World(Saved(nodes=(last,))).lookup(1).not_yet  # type: ignore[arg-type]


# ---------------------------------------------------------------------- restart


def test_after_a_restart_misses_are_not_yet_until_the_roster_is_back() -> None:
    roster = (m.SaveNode("a", 1 << 30, 0, False), m.SaveNode("b", 1 << 30, 0, False))
    world = World(Saved(nodes=roster))
    assert world.lookup(1).not_yet
    world.up(1, 2, node_id="a")
    assert world.lookup(1, 2).not_yet is False, "all found: there is nothing to wait for"
    assert world.lookup(1, 3).not_yet
    world.up(3, node_id="b")
    assert not world.lookup(9).not_yet
    assert world.found(1, 2, 3) == [1, 2, 3]


def test_the_grace_ends() -> None:
    world = World(Saved(nodes=(m.SaveNode("a", 1 << 30, 0, False),)), grace_s=5.0)
    world.now += 4.9
    assert world.lookup(1).not_yet
    world.now += 0.2
    assert not world.lookup(1).not_yet


def test_a_fresh_master_answers_at_once() -> None:
    assert not World().lookup(1).not_yet


def test_the_roster_and_the_namespaces_are_made_durable() -> None:
    world = World()
    world.up(1)
    saved = Saved(
        nodes=tuple(world.of(m.SaveNode)),  # type: ignore[arg-type]
        groups=tuple(world.of(m.SaveGroup)),  # type: ignore[arg-type]
    )
    assert [node.node_id for node in saved.nodes] == ["n"] and [group.namespace for group in saved.groups] == [NS]
    with pytest.raises(FingerprintMismatch):
        World(saved).state.open_namespace(Namespace("model", block_bytes=7, block_tokens=16))


# ---------------------------------------------------------------------- a pool of one node


def test_a_node_is_the_only_one_while_no_other_may_come_back_with_blocks() -> None:
    world = World()
    assert world.place(1).sole is None
    world.up(1, node_id="a")
    first = world.place(2).sole
    assert first is not None and world.place(1).sole == world.place().sole == first, "whatever is asked"
    second = world.up(node_id="b")
    assert world.place(3).sole is None
    world.wait(11, beating=[("a", 1)])
    assert world.node_state("b") is NodeState.OFFLINE
    assert world.place(4).sole is None, "it is away, and not gone"
    second = world.up(node_id="b", incarnation=2)
    world.tell(m.Detach(second, "stopping"))
    assert world.place(5).sole == first


def test_neither_a_node_that_leaves_nor_a_master_that_does_not_lead_makes_an_answer_stand() -> None:
    world = World()
    world.up(node_id="a")
    world.state.standing.leading = False
    assert world.place(1).sole is None
    world.state.standing.leading = True
    node = world.state.nodes.get("a")
    assert world.place(2).sole is not None and node is not None
    node.draining = True
    world.state.membership.takers.moved()
    assert world.place(3).sole is None


# ---------------------------------------------------------------------- miss reports


def test_a_reported_miss_hides_until_the_deltas_caught_up() -> None:
    world = World()
    session = world.up(1, 2)
    world.miss(1, seq=2)
    assert world.found(1, 2) == [2]
    assert world.place(1).states.tolist() == [PlaceState.NEW]
    world.delta(session, 1, add=[9])
    assert world.found(1, 2) == [2]
    world.delta(session, 2, add=[10])  # the reader was wrong: the block is still there
    assert world.found(1, 2) == [1, 2]
    world.miss(1, seq=3)
    world.delta(session, 3, remove=[1])  # the reader was right
    assert world.found(1, 2) == [2]


def test_reports_that_say_nothing_new_or_of_someone_else_are_ignored() -> None:
    world = World()
    session = world.up(1)
    world.delta(session, 1, add=[2])
    world.miss(1, seq=1)
    world.miss(1, seq=9, incarnation=7)
    world.miss(1, seq=9, node_id="stranger")
    assert world.found(1) == [1]


def test_a_report_cannot_hide_a_block_for_ever() -> None:
    world = World()
    session = world.up(1)
    world.miss(1, seq=1 << 62)
    assert world.found(1) == []
    for seq in range(1, 4098):
        world.state.handle(m.DeltaBatch(session, seq, ()), world.now)
    assert world.found(1) == [1]


# ---------------------------------------------------------------------- removal


def test_removal_is_told_to_those_attached_and_kept_for_those_away() -> None:
    world = World(Saved(nodes=(m.SaveNode("away", 1 << 30, 1 << 30, False),)))
    session = world.up(1, 2)
    removal = world.remove(1, 7)
    assert removal.removed == 1 and removal.awaited == {"n"}
    assert world.found(1, 2) == [2]
    assert world.of(m.SaveTombstone)[-1].waiting == ("away", "n")  # type: ignore[attr-defined]
    order = next(c for c in world.commands if isinstance(c, m.SendRemove))
    assert (order.session, order.hashes) == (session, hashes(1, 7))
    world.tell(m.CommandDone(session, removal.command))
    assert world.state.tombstones.unconfirmed(removal.command) == ["away"]

    saved = world.of(m.SaveTombstone)[-1]
    assert isinstance(saved, m.SaveTombstone) and saved.waiting == ("away",)
    later = World(
        Saved(nodes=(m.SaveNode("away", 1 << 30, 1 << 30, False),), groups=(m.SaveGroup(NS, 0),), tombstones=(saved,))
    )
    session = later.attach("away")
    assert m.SendRemove in map(type, later.commands)
    later.snapshot(session, 0, 1, 2)
    assert later.found(1, 2) == [2], "what was removed is not served, even before the node has confirmed"
    later.tell(m.CommandDone(session, removal.command))
    assert len(later.state.tombstones) == 0
    assert later.of(m.SaveTombstone)[-1].waiting == ()  # type: ignore[attr-defined]


def test_a_node_that_could_not_remove_is_asked_again() -> None:
    world = World()
    session = world.up(1)
    removal = world.remove(1)
    world.tell(m.CommandDone(session, removal.command, error="disk on fire"))
    assert world.state.tombstones.unconfirmed(removal.command) == ["n"]
    again = world.attach()
    assert any(isinstance(c, m.SendRemove) and c.session == again for c in world.commands)


def test_nobody_waits_for_a_node_that_stopped_on_purpose_and_kept_nothing() -> None:
    world = World()
    world.tell(m.Detach(world.up(1)))
    assert world.state.tombstones.unconfirmed(world.remove(1).command) == []
    session = world.attach(ssd_bytes=1 << 30)
    world.tell(m.Detach(session))
    assert world.state.tombstones.unconfirmed(world.remove(1).command) == ["n"]


def test_command_numbers_are_not_reused() -> None:
    world = World(Saved(last_command=41))
    assert world.remove(1).command == 42
    assert world.remove(1).command == 43


# ---------------------------------------------------------------------- place and story


def test_place_spreads_over_nodes_by_what_it_sent_there() -> None:
    world = World()
    for number in range(4):
        world.up(node_id=f"n{number}")
    world.wait(31, beating=[(f"n{number}", 1) for number in range(4)])
    for node in world.state.nodes:  # their streams speak too
        assert node.pulse is not None
        node.pulse.spoke(world.now)
    world.tell(m.Tick())
    for start in range(0, 64 * 40, 64):
        world.place(*range(start, start + 64))
    sent = [node.placed_bytes for node in world.state.nodes]
    assert sum(sent) == 64 * 40 * NS.block_bytes
    assert min(sent) > 0.15 * sum(sent)


def test_story_tells_what_happened_to_a_block() -> None:
    world = World()
    session = world.up(1)
    world.delta(session, 1, add=[2])
    world.miss(1, seq=5)
    world.delta(session, 2, remove=[1])
    told = [line.what for line in world.state.story(NS, SALT, hashes(1))]
    assert [what for what in told if what not in ("attached", "joining", "active")] == [
        "in snapshot (dram)",
        "not loaded (delta 5)",
        "removed (dram)",
    ]
    assert "added (dram)" in [line.what for line in world.state.story(NS, SALT, hashes(2))]
    assert world.state.story(Namespace("unknown", 1, 1), SALT, hashes(1)) == []


def test_placement_goes_where_the_tenant_has_a_share_and_room_in_it() -> None:
    world = World()
    sessions = {node_id: world.up(node_id=node_id) for node_id in ("a", "b", "c")}
    world.commands += world.state.set_tenant(m.TenantPolicy(SALT, 64 << 20), world.now)
    for _ in range(12):
        world.now += 0.25
        for session in sessions.values():
            world.tell(m.StatusReport(session, m.NodeUsage(dram_bytes_free=1 << 30)))
        world.tell(m.Tick())
        world.commands += world.state.grants_saved(world.state.quotas.saved_serial, world.now)
    shares = {n: room.share for n, room in world.state.quotas.rooms(SALT).items() if room.share}
    assert list(shares.values()) == [64 << 20], "a small limit is one node's"
    placed = world.place(*range(48))
    [slot] = {(code - 1) >> 2 for code in placed.codes.tolist()}
    assert world.state.membership.active()[slot].node_id == next(iter(shares))
    room = world.state.quotas.rooms(SALT)[next(iter(shares))]
    assert room.free == 16 << 20, "what was just placed counts as used"
    assert {m.SaveGrants, m.SendShares, m.SavePolicy} <= {type(command) for command in world.commands}
