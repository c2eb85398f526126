"""Pulls that do not settle in time, in any order with everything else that can happen to their slots.

Late transfers write what nobody stored: if a slot were given away under one, a reader would see it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.proto.errors import Busy
from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.records import VISIBLE, Reservation
from kvstrata.storage.serving.rail_pulls import LEFT_SHARE, RailPulls, Taken
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.state import NodeState, WriteAsk
from kvstrata.transfer.rdma.engine import JobState

from .conftest import SLAB_BYTES, fill, holds, keys, payload
from .fake_engine import FakeEngine, FakeJob, failing, posted, waiting

BLOCK_BYTES = 4096
SLABS = 4
BLOCKS_MAX = 8
SESSIONS = (b"a" * 16, b"b" * 16, b"c" * 16)
SALTS = ("", "x")
OUTCOMES: dict[Taken, Callable[[FakeJob], None]] = {
    Taken.ARRIVED: FakeJob.finish,
    Taken.FAILED: failing,
    Taken.LATE: waiting,
    Taken.PENDING: posted,
}


class World:
    """A node's state, its late pulls, and one peer whose memory holds blocks of a version."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lock = threading.Lock()
        self.arena = dram_arena(SLABS * SLAB_BYTES, SLAB_BYTES)
        self.state = NodeState(self.arena)
        self.namespace = Namespace("model", BLOCK_BYTES, 16)
        self.handle = self.state.open_namespace(self.namespace)[0]
        # It looks a moment after: a sum of floats may come out above what it is held against for ever.
        self.pulls = RailPulls(self.state, self.lock, lambda: self.now + 1e-6)
        self.engine = FakeEngine(peers={"peer"})
        for slab in self.arena.slabs:
            self.engine.register(slab.address, slab.nbytes)
        self.memory = np.zeros(BLOCKS_MAX * BLOCK_BYTES, np.uint8)
        self.region = RailRegion(
            lambda local, remote: self.engine.read("peer", local, remote),
            self.memory.ctypes.data,
            self.memory.nbytes,
        )

    def write(self, numbers: range) -> None:
        """What the peer's memory holds from now on."""
        self.memory[: len(numbers) * BLOCK_BYTES] = np.frombuffer(
            b"".join(payload(keys([number]), 0, BLOCK_BYTES) for number in numbers), np.uint8
        )

    def pull(self, session: bytes, salt: str, numbers: range, ends: Taken) -> Taken | None:
        """As the handler does; what is granted is committed when it ARRIVED. None when nothing was granted."""
        self.pulls.admit(session)
        self.write(numbers)
        self.engine.behave = OUTCOMES[ends]
        with self.lock:
            got = self.state.reserve(session, WriteAsk(self.handle, salt, keys(numbers), deadline_ms=0), self.now)
            if got.reservation is None:
                return None
            self.state.start_moving(got.reservation)
        rows = [position for position, status in enumerate(got.status) if status == 10]
        table = np.array([[[row * BLOCK_BYTES, BLOCK_BYTES]] for row in rows], np.int64)
        taken, _ = self.pulls.take(self.region, got.reservation, table)
        if taken is Taken.ARRIVED:
            with self.lock:
                assert self.state.moved(got.reservation, self.now)
                self.state.commit(session, got.reservation.id, [0] * len(rows), None, self.now)
        return taken

    def unsettled(self) -> list[FakeJob]:
        return [job for job in self.engine.jobs if not job.settled()]

    def settle(self, job: FakeJob, state: JobState) -> None:
        """A late one ends: until then it may write, and its peer's memory has long held something else."""
        self.memory[:] = 0xEE
        job.finish(JobState.DONE)
        if state is not JobState.DONE:
            job.state = state

    def check(self) -> None:
        with self.lock:
            self.state.check()
            self.pulls.check()
            for block in self.state.inventory.blocks():
                assert block.state != VISIBLE or holds(block, 0), "a visible block was written to"
        assert self.pulls.held() == (
            len(self.unsettled()) + len(self.pulls._settled),
            sum(r_bytes for r_bytes in self.pulls._left.values()),
        )

    def close(self) -> None:
        for job in self.unsettled():
            self.settle(job, JobState.FAILED)
        self.pulls.reap()
        for session in SESSIONS:
            self.state.session_ended(session, self.now)
        self.check()
        assert len(self.state.reservations) == 0 and self.pulls.held() == (0, 0)
        self.arena.close()


sessions = st.sampled_from(SESSIONS)
salts = st.sampled_from(SALTS)


class PullMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def teardown(self) -> None:
        self.world.close()

    @rule(
        session=sessions, salt=salts, start=st.integers(0, 40), count=st.integers(1, BLOCKS_MAX),
        ends=st.sampled_from(Taken),
    )  # fmt: skip
    def pull(self, session: bytes, salt: str, start: int, count: int, ends: Taken) -> None:
        world = self.world
        refused = any(reservation.session == session for reservation in world.pulls._left)
        full = world.pulls.held()[1] * LEFT_SHARE >= world.arena.bytes_total
        try:
            taken = world.pull(session, salt, range(start, start + count), ends)
        except Busy:
            assert refused or full
            return
        assert not refused and not full
        assert taken in (None, ends)

    @rule(session=sessions, salt=salts, start=st.integers(0, 40), count=st.integers(1, 30))
    def store(self, session: bytes, salt: str, start: int, count: int) -> None:
        """By another path: it takes what room there is, and what is evicted for it."""
        state, now = self.world.state, self.world.now
        ask = WriteAsk(self.world.handle, salt, keys(range(start, start + count)), deadline_ms=1000)
        got = state.reserve(session, ask, now)
        if got.reservation is not None:
            for block in got.reservation.blocks:
                fill(block, 0)
            state.commit(session, got.reservation.id, [0] * len(got.reservation.blocks), None, now)

    @precondition(lambda self: self.world.unsettled())
    @rule(data=st.data(), state=st.sampled_from([JobState.DONE, JobState.FAILED]))
    def settle(self, data: st.DataObject, state: JobState) -> None:
        self.world.settle(data.draw(st.sampled_from(self.world.unsettled())), state)

    @rule()
    def reap(self) -> None:
        expected = len(self.world.pulls._settled)
        assert self.world.pulls.reap() == expected

    @rule(session=sessions)
    def end_session(self, session: bytes) -> None:
        self.world.state.session_ended(session, self.world.now)

    @rule(salt=salts)
    def drop_tenant(self, salt: str) -> None:
        self.world.state.drop("", salt, self.world.now)

    @rule(salt=salts, start=st.integers(0, 40))
    def remove(self, salt: str, start: int) -> None:
        self.world.state.remove(self.world.namespace, salt, keys(range(start, start + 5)), self.world.now)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.state.expire(self.world.now)

    @invariant()
    def sound(self) -> None:
        self.world.check()


PullMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPulls = PullMachine.TestCase


@pytest.fixture
def world():  # type: ignore[no-untyped-def]
    one = World()
    yield one
    one.close()


def late(world: World, session: bytes = SESSIONS[0], salt: str = "", numbers: range = range(4)) -> FakeJob:
    assert world.pull(session, salt, numbers, Taken.PENDING) is Taken.PENDING
    world.check()
    return world.engine.jobs[-1]


def test_slots_of_a_late_pull_stay_taken_and_charged_until_it_settles(world: World) -> None:
    job = late(world)
    charged = dict(world.state.inventory.policy.charges)
    assert world.pulls.held() == (1, 4 * BLOCK_BYTES) and charged == {"": 4 * BLOCK_BYTES}
    assert len(world.state.reservations) == 1 and world.state.inventory.visible == 0
    world.now += 3600
    world.state.expire(world.now)
    world.pulls.reap()
    assert world.state.arena.bytes_used == 4 * BLOCK_BYTES, "no time gives them back"
    world.settle(job, JobState.DONE)
    assert world.state.arena.bytes_used == 4 * BLOCK_BYTES, "the loop gives them back, not the agent's thread"
    assert world.pulls.reap() == 1
    assert world.state.arena.bytes_used == 0 and not world.state.inventory.policy.charges.get("")
    assert world.state.inventory.visible == 0, "what came late is not stored"


def test_the_keys_of_a_late_pull_are_free_for_others_at_once(world: World) -> None:
    job = late(world)
    assert world.pull(SESSIONS[1], "", range(4), Taken.ARRIVED) is Taken.ARRIVED
    assert world.state.inventory.visible == 4
    world.settle(job, JobState.DONE)
    world.pulls.reap()
    world.check()  # each block is still what was stored
    assert world.state.inventory.visible == 4


def test_a_late_pull_outlives_its_session_and_its_tenant(world: World) -> None:
    job = late(world, salt="x")
    world.state.session_ended(SESSIONS[0], world.now)
    world.check()
    world.state.drop("", "x", world.now)
    world.check()
    assert world.pulls.held() == (1, 4 * BLOCK_BYTES) and world.state.sessions == 0
    world.settle(job, JobState.FAILED)
    world.pulls.reap()
    world.check()
    assert world.state.arena.bytes_used == 0


def test_a_writer_with_a_late_pull_gets_no_other_and_all_together_have_a_bound(world: World) -> None:
    job = late(world, SESSIONS[0], numbers=range(4))
    with pytest.raises(Busy, match="this writer"):
        world.pull(SESSIONS[0], "", range(10, 11), Taken.ARRIVED)
    assert world.pull(SESSIONS[1], "", range(10, 11), Taken.ARRIVED) is Taken.ARRIVED
    other = late(world, SESSIONS[1], numbers=range(20, 24))
    with pytest.raises(Busy, match="do not settle"):
        world.pull(SESSIONS[2], "", range(30, 31), Taken.ARRIVED)
    world.settle(job, JobState.DONE)
    world.pulls.reap()
    assert world.pull(SESSIONS[0], "", range(30, 31), Taken.ARRIVED) is Taken.ARRIVED
    world.settle(other, JobState.DONE)
    assert world.pulls.counts["refused"] == 2 and world.pulls.counts["pending"] == 2


@pytest.mark.parametrize("ends", [Taken.FAILED, Taken.LATE])
def test_a_pull_that_ended_without_its_bytes_leaves_nothing(world: World, ends: Taken) -> None:
    assert world.pull(SESSIONS[0], "", range(4), ends) is ends
    assert world.state.arena.bytes_used == 0 and world.state.sessions == 0 and world.pulls.held() == (0, 0)


def test_a_reservation_that_ended_while_its_bytes_moved_is_not_waited_for(world: World) -> None:
    """Its writer's session ended, or it gave up: the handler's thread is free long before the deadline."""
    world.now = 0.0
    ask = WriteAsk(world.handle, "", keys(range(2)), deadline_ms=50_000)
    got = world.state.reserve(SESSIONS[0], ask, world.now)
    reservation = got.reservation
    assert isinstance(reservation, Reservation)
    world.state.start_moving(reservation)
    world.write(range(2))

    def gone(job: FakeJob) -> None:
        posted(job)
        world.state.session_ended(SESSIONS[0], world.now)

    world.engine.behave = gone
    table = np.array([[[0, BLOCK_BYTES]], [[BLOCK_BYTES, BLOCK_BYTES]]], np.int64)
    assert world.pulls.take(world.region, reservation, table)[0] is Taken.PENDING
    world.check()


def test_a_region_that_is_being_unregistered_frees_what_was_reserved(world: World) -> None:
    world.region.flights.close()
    with pytest.raises(Exception, match="unregistered"):
        world.pull(SESSIONS[0], "", range(2), Taken.ARRIVED)
    assert world.state.arena.bytes_used == 0 and len(world.state.reservations) == 0
