"""Ledger and driver against a model, over an agent that ends transfers, fails them, or leaves them for ever."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.driver import Driver
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.envelope import seal
from kvstrata.transfer.rdma.jobs import RailJob
from kvstrata.transfer.rdma.ledger import POSTED_PER_PEER, SETTLED, Freed, Held, Ledger
from kvstrata.transfer.rdma.pace import Pace
from tests.transfer.rdma.fake_agent import FakeAgent

PEERS = ("a", "b", "c")
LINGER_S = 1.0


class Machine(RuleBasedStateMachine):
    memory = Bundle("memory")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.agent, self.ledger = FakeAgent(), Ledger()
        self.driver = Driver("me", self.agent, self.ledger, threading.Lock(), Pace(self.now), LINGER_S)
        self.open: list[Held] = []
        self.later: list[Freed] = []
        self.ends: dict[RailJob, int] = {}
        self.failed_at: dict[RailJob, float] = {}

    @initialize()
    def begin(self) -> None:
        """Peers of every kind, and memory to read into."""
        for peer, plan in zip(PEERS, ("at once", "later", "dies"), strict=True):
            self.meet(peer)
            self.becomes(peer, plan)
        for at in (0, 4):
            self.register(at, 3, False)

    # ------------------------------------------------------------ what callers do

    @rule(target=memory, at=st.integers(0, 7), size=st.integers(1, 4), device=st.booleans())
    def register(self, at: int, size: int, device: bool) -> Held:
        """Registrations may overlap."""
        held, _ = self.driver.register(4096 + at * 64, size * 64, Memory("cuda", 1) if device else HOST)
        self.open.append(held)
        return held

    @rule(which=st.integers(0, 7))
    def close_any(self, which: int) -> None:
        if self.open:
            self.close_memory(self.open[which % len(self.open)])

    @rule(held=memory)
    def close_memory(self, held: Held) -> None:
        self._free(self.ledger.close(held))
        if held in self.open:
            self.open.remove(held)

    @rule(held=memory)
    def close_later(self, held: Held) -> None:
        """The owner comes to it after the next turn."""
        if held in self.open:
            self.open.remove(held)
            self.later.append(self.ledger.close(held))

    @rule(peer=st.sampled_from(PEERS))
    def meet(self, peer: str) -> None:
        assert self.driver.add_peer(seal("1.5.9", f"agent {peer}".encode())) == peer
        assert not self.ledger.peers[peer].leaving

    @rule(peer=st.sampled_from(PEERS))
    def leave(self, peer: str) -> None:
        self._free(self.ledger.leave(peer))
        known = self.ledger.peers.get(peer)
        assert known is None or (known.posted and not known.waiting)

    @rule(peer=st.sampled_from(PEERS), plan=st.sampled_from(["at once", "later", "gone", "dies", "refused"]))
    def becomes(self, peer: str, plan: str) -> None:
        self.agent.plan[peer] = plan

    @rule(
        target=jobs,
        peer=st.sampled_from(PEERS),
        pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 64)), min_size=1, max_size=3),
        which=st.integers(0, 7),
        wild=st.integers(0, 9),
        count=st.integers(1, POSTED_PER_PEER + 4),
        posted=st.booleans(),
    )
    def read(self, peer: str, pieces: list[tuple[int, int]], which: int, wild: int, count: int, posted: bool) -> Any:
        """Mostly into memory that is registered; ``posted``: with a turn of the owner right after."""
        base, memory, rows = 4096, HOST, 11
        known = list(self.ledger.memory)  # what is closing as well
        if wild and known:
            held = known[which % len(known)]
            base, memory, rows = held.address, held.memory, held.nbytes // 64
        table = np.array(pieces, np.int64)
        local = Pieces(base + table[:, 0] % rows * 64, table[:, 1], memory)
        jobs = [self._read(peer, local) for _ in range(count)]
        if posted:
            self.driver.post(self.now)
        return multiple(*jobs)

    def _read(self, peer: str, local: Pieces) -> RailJob:
        job = RailJob(
            peer, local, Pieces(local.address, local.length), lambda job: self._free(self.ledger.give_up(job))
        )
        self.ends[job] = 0

        def ended() -> None:
            self.ends[job] += 1

        job.then(ended)
        known = self.ledger.peers.get(peer)
        problem = self.ledger.submit(job)
        inside = all(
            any(
                held.memory == local.memory and held.address <= begin and begin + length <= held.address + held.nbytes
                for held in self.open
            )
            for begin, length in zip(local.address.tolist(), local.length.tolist(), strict=True)
        )
        assert (problem == "") == (known is not None and not known.leaving and inside), problem
        if problem:
            job.refuse(problem)
        return job

    @rule(job=jobs)
    def give_up(self, job: RailJob) -> None:
        waiting = job.state is JobState.WAITING
        settled = job.give_up()
        assert settled == (waiting or job.state in SETTLED)
        assert not waiting or job.state is JobState.DROPPED

    # ------------------------------------------------------------ what the owner and the peers do

    @rule(seconds=st.floats(0.0, 2 * LINGER_S))
    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.driver.post(self.now)
        while self.later:
            self.driver.free(self.later.pop())
        self.driver.poll(self.now)

    @rule(peer=st.sampled_from(PEERS), count=st.integers(1, 20))
    def finish(self, peer: str, count: int) -> None:
        self.agent.finish(peer, count)

    @rule()
    def drop_waiting(self) -> None:
        self._free(self.ledger.drop_waiting())
        assert not self.ledger.waiting

    def _free(self, freed: Freed) -> None:
        for job in freed.settled:
            assert isinstance(job, RailJob)
            job.ended()
        self.driver.free(freed)

    # ------------------------------------------------------------ what holds

    @invariant()
    def nothing_is_freed_in_use(self) -> None:
        self.ledger.check()
        assert self.agent.wrong == []
        assert self.agent.peers == set(self.ledger.peers)
        assert set(self.agent.memory) == {held.handle for held in self.ledger.memory}

    @invariant()
    def each_job_ends_once(self) -> None:
        for job, ends in self.ends.items():
            assert ends == (job.state in SETTLED) == job.settled()
            assert bool(job.problem) == (job.state in (JobState.FAILED, JobState.DROPPED))

    @invariant()
    def what_failed_lingers(self) -> None:
        """Posted and failed: in use until the linger has passed."""
        gone = {id(transfer) for transfer in self.agent.transfers if transfer.state == "failed"}
        for job in self.ends:
            if id(job.handle) in gone and job not in self.failed_at:
                self.failed_at[job] = self.now
            if job in self.failed_at and self.now < self.failed_at[job] + LINGER_S:
                assert job.state is JobState.POSTED

    def teardown(self) -> None:
        """Whatever happened, all is free once peers go on."""
        for peer in PEERS:
            self.agent.plan[peer] = "at once"
        for held in list(self.ledger.memory):
            self._free(self.ledger.close(held))
        self.turn(0.0)
        while self.ledger.unsettled:
            before = self.ledger.unsettled
            for peer in PEERS:
                self.agent.finish(peer)
            self.turn(2 * LINGER_S)
            self.nothing_is_freed_in_use()
            assert self.ledger.unsettled < before
        for peer in PEERS:
            self.leave(peer)
        assert not self.ledger.memory and not self.agent.memory and not self.ledger.peers and not self.agent.peers
        assert all(transfer.released for transfer in self.agent.transfers)
        self.each_job_ends_once()


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestDriver = Machine.TestCase
