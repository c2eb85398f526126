"""Nodes as placement weighs them: arrays that follow what happens, and choose what lists of nodes would."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.master import messages as m
from kvstrata.master.candidates import RAMP_MIN, Candidate, Candidates
from kvstrata.master.converters import events_of
from kvstrata.master.placement import RUN_BLOCKS, Placement
from kvstrata.master.takers import limited
from kvstrata.master.tenants import rooms as rooms_module
from kvstrata.master.tenants.rooms import KnownRooms
from kvstrata.master.tenants.tenancy import Room
from kvstrata.proto import control_pb2 as control
from tests.master import plain_choice
from tests.master.world import SALT, World

MIB = 1 << 20
SCOPE = np.array([[1, 2]], dtype=np.uint64)
ROW = st.tuples(
    st.integers(0, 2),  # the host
    st.sampled_from([0, 1, 40, 1000, 1 << 40]),  # capacity
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),  # of it free
    st.sampled_from([RAMP_MIN, 0.5, 1.0, 1.0]),
)


@settings(max_examples=300)
@given(
    rows=st.lists(ROW, min_size=1, max_size=14),
    avoid=st.sets(st.integers(0, 14)),
    host=st.integers(0, 3),
    runs=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_the_nodes_chosen_are_those_of_the_plain_way(
    rows: list[tuple[int, int, float, float]], avoid: set[int], host: int, runs: int, seed: int
) -> None:
    slots = random.Random(seed).sample(range(40), len(rows))
    plain = [
        Candidate(slot, f"host{at}", int(share * capacity), capacity, ramp)
        for slot, (at, capacity, share, ramp) in zip(slots, rows, strict=True)
    ]
    quick = Candidates.of(plain)
    quick.with_room()
    quick.avoiding(avoid)
    left = plain_choice.fewer(plain, avoid)
    assert len(quick) == len(left)
    assert np.flatnonzero(quick.mask).tolist() == sorted(one.slot for one in left)
    boot_id = f"host{host}" if host < 3 else ""
    rng, placement = random.Random(seed), Placement(random.Random(seed))
    expected = plain_choice.chosen(left, boot_id, runs, rng)
    keys = np.random.default_rng(seed).integers(0, 2**64, size=(runs * RUN_BLOCKS - 1, 2), dtype=np.uint64)
    placed = placement.place(keys, SCOPE, np.zeros(len(keys), dtype=np.uint16), quick, boot_id, 100.0)
    assert ((placed.codes[::RUN_BLOCKS] - 1) >> 2).tolist() == expected
    again = Placement(rng).place(keys[:9] + np.uint64(1), SCOPE, np.zeros(9, dtype=np.uint16), quick, boot_id, 100.0)
    further = placement.place(keys[:9] + np.uint64(1), SCOPE, np.zeros(9, dtype=np.uint16), quick, boot_id, 100.0)
    assert again.codes.tolist() == further.codes.tolist(), "as many numbers were drawn"


def test_a_node_weighs_what_it_has_free_and_a_little_of_its_size_while_it_joins_less() -> None:
    rows = [Candidate(0, "a", 10, 100), Candidate(1, "a", 0, 100, 0.5), Candidate(2, "b", 7, 0)]
    quick = Candidates.of(rows)
    assert quick.weights().tolist() == [plain_choice.weight(row) for row in rows] == [13.0, 1.5, 8.0]
    assert [quick.free_share(position) for position in range(3)] == [0.1, 0.0, 0.0]


NAMES = ("a", "b", "c", "d")
SALTS = (SALT, "guest")


class Following(RuleBasedStateMachine):
    """Nodes come, go, report and are drained, tenants get limits and store: what is kept is what lists would be."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.sessions: dict[str, int] = {}
        self.incarnation = 0

    @initialize(limit=st.none() | st.integers(300, 2000))
    def begin(self, limit: int | None) -> None:
        """Two nodes that are here, and a tenant whose shares, if it has a limit, are in force."""
        for name in NAMES[:2]:
            self.attach(name, 0, True)
        self.limit(SALT, limit)
        for _ in range(3):
            self.report("a", 1 << 30, 0)
            self.report("b", 1 << 29, 0)
            self.wait(0.5, set())

    @rule(name=st.sampled_from(NAMES), host=st.integers(0, 1), up=st.booleans())
    def attach(self, name: str, host: int, up: bool) -> None:
        self.incarnation += 1
        self.sessions[name] = self.world.attach(name, self.incarnation, boot_id=f"host{host}")
        if up:
            self.world.snapshot(self.sessions[name], 0)

    @rule(name=st.sampled_from(NAMES), free=st.integers(0, 1 << 30), used=st.integers(0, 200))
    def report(self, name: str, free: int, used: int) -> None:
        if name in self.sessions:
            tenants = (m.TenantUsage(SALT, used * MIB),) if used % 2 else ()
            usage = m.NodeUsage(dram_bytes_free=free, tenants=tenants)
            self.world.tell(m.StatusReport(self.sessions[name], usage))

    @rule(name=st.sampled_from(NAMES))
    def detach(self, name: str) -> None:
        if name in self.sessions:
            self.world.tell(m.Detach(self.sessions.pop(name)))

    @rule(name=st.sampled_from(NAMES), keep=st.booleans())
    def drain(self, name: str, keep: bool) -> None:
        state = self.world.state
        if state.nodes.get(name) is not None:
            leavers = state.replication.leavers
            state.replication.leavers.undrain(name) if keep else leavers.drain(name, 0.0, self.world.now)
            state.taken()

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        if name in self.sessions:
            self.world.tell(m.Leaving(self.sessions[name], 5.0))

    @rule(seconds=st.sampled_from([0.25, 2.0, 5.0]), silent=st.sets(st.sampled_from(NAMES)))
    def wait(self, seconds: float, silent: set[str]) -> None:
        beating = [
            (node.node_id, node.attachment.facts.incarnation)
            for node in self.world.state.nodes
            if node.attachment is not None and node.node_id not in silent
        ]
        self.world.wait(seconds, beating)
        state = self.world.state
        self.world.commands += state.grants_saved(state.quotas.saved_serial, self.world.now)

    @rule(salt=st.sampled_from(SALTS), limit=st.none() | st.integers(0, 2000))
    def limit(self, salt: str, limit: int | None) -> None:
        policy = m.TenantPolicy(salt, None if limit is None else limit * MIB)
        self.world.commands += self.world.state.set_tenant(policy, self.world.now)

    @rule(limit=st.none() | st.integers(0, 2000), deny=st.booleans())
    def default(self, limit: int | None, deny: bool) -> None:
        policy = m.TenantPolicy("", None if limit is None else limit * MIB)
        self.world.commands += self.world.state.set_default(policy, deny, self.world.now)

    @rule(salt=st.sampled_from(SALTS), first=st.integers(0, 1 << 30), count=st.sampled_from([1, 40, 200]))
    def place(self, salt: str, first: int, count: int) -> None:
        self.world.place(*range(first, first + count), salt=salt)
        self.world.state.taken()

    @precondition(lambda self: self.sessions)
    @rule(name=st.sampled_from(NAMES))
    def remove_node(self, name: str) -> None:
        if self.world.state.nodes.get(name) is not None:
            self.world.commands += self.world.state.remove_node(name, True, self.world.now)
            self.sessions.pop(name, None)

    @invariant()
    def the_candidates_are_those_of_the_plain_way(self) -> None:
        state, now = self.world.state, self.world.now
        membership = state.membership
        state.taken()
        membership.check()
        for salt in SALTS:
            for avoid in (set[int](), {0, 1}):
                everybody = membership.takers.candidates(now)
                rooms = membership.quotas.rooms_along(salt, membership.takers.node_ids)
                quick = limited(everybody, rooms, avoid)
                plain = plain_choice.rows(state.nodes, membership.quotas, salt, avoid, now)
                at = quick.positions()
                assert quick.lineup.slots[at].tolist() == [row.slot for row in plain]
                assert quick.free[at].tolist() == [row.free for row in plain]
                assert quick.capacity[at].tolist() == [row.capacity for row in plain]
                assert [quick.ramp_of(position) for position in at.tolist()] == [row.ramp for row in plain]
        state.quotas.check()


TestFollowing = Following.TestCase
TestFollowing.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_who_joins_weighs_more_from_second_to_second_until_it_has_joined() -> None:
    world = World()
    world.up(node_id="old")
    world.wait(20, beating=[("old", 1)])
    world.up(node_id="new")
    for seconds, ramps in ((2, [22 / 30, 2 / 30]), (10, [1.0, 12 / 30]), (15, [1.0, 27 / 30]), (4, [1.0, 1.0])):
        for node in world.state.nodes:  # their streams speak too
            assert node.pulse is not None
            node.pulse.spoke(world.now)
        for _ in range(seconds):
            world.wait(1, beating=[("old", 1), ("new", 1)])
            for node in world.state.nodes:
                assert node.pulse is not None
                node.pulse.spoke(world.now)
        candidates = world.state.membership.takers.candidates(world.now)
        assert [candidates.ramp_of(position) for position in range(2)] == pytest.approx(ramps)


def test_a_call_costs_no_work_a_node_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(30):
        world.up(node_id=f"n{number}")
    world.commands += world.state.set_tenant(m.TenantPolicy(SALT, 1 << 40), world.now)
    world.place(1)
    seen: list[str] = []
    known = world.state.quotas._known_rooms
    room = known._room
    monkeypatch.setattr(known, "_room", lambda salt, node_id: seen.append(node_id) or room(salt, node_id))
    monkeypatch.setattr("kvstrata.master.takers._takes", lambda node: seen.append(node.node_id) or True)
    world.place(2)
    assert 1 <= len(seen) <= 3, "only those that blocks were sent to"


def test_rooms_of_a_bounded_number_of_tenants_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms_module, "TENANTS_MAX", 3)
    known, nodes = KnownRooms(lambda salt, node_id: Room(len(salt), 1) if node_id == "a" else None), ("a", "b")
    for number in range(1, 9):
        assert known.along("s" * number, nodes).share.tolist() == [number, 1 << 62]
        known.check()
    assert known.along("s", ()).share.tolist() == []


def test_a_report_of_more_than_there_can_be_stops_no_placement() -> None:
    world = World()
    for name in "ab":
        world.up(node_id=name)
    node = next(iter(world.state.nodes))
    assert node.attachment is not None
    most = (1 << 64) - 1
    row = control.TenantUsage(salt=SALT, dram_bytes=most, ssd_bytes=most, dram_wanted=most, ssd_wanted=most)
    said = control.NodeMessage(status=control.NodeStatus(dram_bytes_free=most, ssd_bytes_free=most, tenants=[row]))
    for event in events_of(said, node.attachment.session):
        world.tell(event)
    world.tell(m.LinkLost(node.attachment.session))
    world.state.set_tenant(m.TenantPolicy(SALT, 1 << 30), world.now)
    assert len(world.place(1).codes) == 1
