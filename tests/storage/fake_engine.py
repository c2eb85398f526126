"""A :class:`RailEngine` within one process: peers are names, their memory is this process's, and jobs do as told."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.engine import Job, JobState, Pieces, Registration
from kvstrata.transfer.rdma.rails import Rails

CMA = Rails("cma")


class FakeJob:
    """Ends by :meth:`finish`, or at once, as its engine is told."""

    def __init__(self, peer: str, local: Pieces, remote: Pieces) -> None:
        self.peer, self.local, self.remote = peer, local, remote
        self.state = JobState.WAITING
        self.problem = ""
        self._change = threading.Condition()
        self._calls: list[Callable[[], None]] = []

    def settled(self) -> bool:
        return self.state in (JobState.DONE, JobState.FAILED, JobState.DROPPED)

    def wait(self, deadline: float) -> bool:
        with self._change:
            return self._change.wait_for(self.settled, max(0.0, deadline - time.monotonic()))

    def give_up(self) -> bool:
        if self.state is JobState.WAITING:
            self.finish(JobState.DROPPED)
        return self.settled()

    def then(self, call: Callable[[], None]) -> None:
        with self._change:
            if not self.settled():
                self._calls.append(call)
                return
        call()

    def finish(self, state: JobState = JobState.DONE, problem: str = "") -> None:
        """The bytes land when it is DONE."""
        if state is JobState.DONE:
            for to, origin, count in zip(self.local.address, self.remote.address, self.remote.length, strict=True):
                ctypes.memmove(int(to), int(origin), int(count))
        with self._change:
            self.state, self.problem = state, problem
            calls, self._calls = self._calls, []
            self._change.notify_all()
        for call in calls:
            call()


@dataclass(eq=False)
class FakeRegistration:
    address: int
    nbytes: int
    memory: Memory
    metadata: bytes = b"memory"

    def close(self) -> None: ...


@dataclass(eq=False)
class FakeEngine:
    """``behave`` is called with each new job; by default it is DONE at once. Metadata is the agent's name."""

    name: str = "node"
    backend: str = "UCX"
    kind: str = "cma"
    behave: Callable[[FakeJob], None] = FakeJob.finish
    peers: set[str] = field(default_factory=set)
    registered: list[FakeRegistration] = field(default_factory=list)
    jobs: list[FakeJob] = field(default_factory=list)
    stirred: int = 0
    closed: bool = False
    wrong: str = ""
    memory_limit: int = 1 << 40

    def metadata(self) -> bytes:
        return self.name.encode()

    def connection(self) -> bytes:
        return self.name.encode()

    def register(
        self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None
    ) -> Registration:
        if sum(each.nbytes for each in self.registered) + nbytes > self.memory_limit:
            raise Unavailable("memlock is too low: raise it")
        self.registered.append(FakeRegistration(address, nbytes, memory))
        return self.registered[-1]

    def add_peer(self, metadata: bytes) -> str:
        if metadata.startswith(b"\xff"):
            raise InvalidArgument("that is no agent's metadata")
        self.peers.add(metadata.decode(errors="replace"))
        return metadata.decode(errors="replace")

    def remove_peer(self, name: str) -> None:
        self.peers.discard(name)

    def read(self, peer: str, local: Pieces, remote: Pieces) -> Job:
        assert local.length.tolist() == remote.length.tolist()
        for address, length in zip(local.address.tolist(), local.length.tolist(), strict=True):
            assert any(r.address <= address and address + length <= r.address + r.nbytes for r in self.registered)
        job = FakeJob(peer, local, remote)
        self.jobs.append(job)
        if peer not in self.peers:
            job.finish(JobState.FAILED, f"agent {peer} is not known here")
        else:
            self.behave(job)
        return job

    def stir(self) -> None:
        self.stirred += 1

    def health(self) -> dict[str, object]:
        return {"kind": self.kind, "age_seconds": 0.0, "peers": len(self.peers)}

    def problem(self) -> str:
        return self.wrong

    def close(self, timeout_s: float = 2.0) -> None:
        self.closed = True
        for job in self.jobs:
            if job.state is JobState.WAITING:
                job.finish(JobState.DROPPED)


def posted(job: FakeJob) -> None:
    """It stays on its way until the test ends it."""
    job.state = JobState.POSTED


def waiting(job: FakeJob) -> None:
    """It is never posted."""


def failing(job: FakeJob) -> None:
    job.finish(JobState.FAILED, "the peer is gone")
