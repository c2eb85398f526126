"""An agent that does to a transfer what a test says, and notes when it is asked for what must never happen."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma.agent import AgentError, BadMetadata, PeerGone
from kvstrata.transfer.rdma.engine import Pieces

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False)
class FakeTransfer:
    peer: str
    local: Pieces
    handles: set[int]  #: memory that a piece lies in: an agent may have taken any of it
    state: str = "created"  #: created, running, done, failed
    released: bool = False


def alone(call: Callable[Concatenate[FakeAgent, P], R]) -> Callable[Concatenate[FakeAgent, P], R]:
    """One call at a time, from whatever thread, and none after the end."""

    @functools.wraps(call)
    def guarded(agent: FakeAgent, *args: P.args, **kwargs: P.kwargs) -> R:
        if agent.closed:
            agent.wrong.append("called after its end")
        if not agent.used.acquire(blocking=False):
            agent.wrong.append("used by two threads at once")
            return call(agent, *args, **kwargs)
        try:
            return call(agent, *args, **kwargs)
        finally:
            agent.used.release()

    return guarded


@dataclass
class FakeAgent:
    """``plan``: by peer, what happens to what is posted to it: "at once", "later" (when :meth:`finish` says so), "gone"
    (posting fails), "dies" (it fails when looked at), "refused" (it cannot be created). "at once" without a plan."""

    version: str = "1.5.1"
    plan: dict[str, str] = field(default_factory=dict)
    memory: dict[int, tuple[int, int, Memory]] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)
    transfers: list[FakeTransfer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    progressed: int = 0
    closed: bool = False
    fails: str = ""  #: progress raises this
    handles: int = 0
    used: threading.Lock = field(default_factory=threading.Lock)

    @alone
    def metadata(self) -> bytes:
        return b"agent me with all"

    @alone
    def connection(self) -> bytes:
        return b"agent me"

    @alone
    def register(self, address: int, nbytes: int, memory: Memory) -> object:
        if memory.device == 99:
            raise AgentError("no such device")
        self.handles += 1
        self.memory[self.handles] = (address, nbytes, memory)
        return self.handles

    @alone
    def describe(self, handle: object) -> bytes:
        return repr(self.memory[handle]).encode()  # type: ignore[index]

    @alone
    def deregister(self, handle: object) -> None:
        del self.memory[handle]  # type: ignore[arg-type]
        for transfer in self.running():
            if handle in transfer.handles:
                self.wrong.append(f"memory {handle} is gone under a transfer with {transfer.peer}")

    @alone
    def load(self, metadata: bytes) -> str:
        if not metadata.startswith(b"agent "):
            raise BadMetadata("garbage")
        if metadata == b"agent dead":
            raise AgentError("connection refused")
        name = metadata.split()[1].decode()
        self.peers.add(name)
        return name

    @alone
    def forget(self, peer: str) -> None:
        if any(transfer.peer == peer for transfer in self.running()):
            self.wrong.append(f"{peer} is forgotten under a transfer")
        self.peers.discard(peer)

    @alone
    def create(self, peer: str, local: Pieces, remote: Pieces) -> object:
        if peer not in self.peers or self.plan.get(peer) == "refused":
            raise AgentError(f"{peer} is not known, or not that memory of it")
        assert np.array_equal(local.length, remote.length)
        begin, end = local.address, local.address + local.length
        handles = {
            handle
            for handle, (address, nbytes, memory) in self.memory.items()
            if memory == local.memory and ((begin >= address) & (end <= address + nbytes)).any()
        }
        if not handles:
            self.wrong.append(f"a transfer with {peer} into memory that is not registered")
        self.transfers.append(FakeTransfer(peer, local, handles))
        return self.transfers[-1]

    @alone
    def post(self, transfer: object) -> bool:
        assert isinstance(transfer, FakeTransfer) and transfer.state == "created"
        plan = self.plan.get(transfer.peer, "at once")
        transfer.state = {"at once": "done", "gone": "failed"}.get(plan, "running")
        if plan == "gone":
            raise PeerGone("disconnected")
        return plan == "at once"

    @alone
    def poll(self, transfer: object) -> bool:
        assert isinstance(transfer, FakeTransfer) and transfer.state in ("running", "done")
        if transfer.state == "running" and self.plan.get(transfer.peer) == "dies":
            transfer.state = "failed"
            raise PeerGone("disconnected")
        return transfer.state == "done"

    @alone
    def release(self, transfer: object) -> None:
        assert isinstance(transfer, FakeTransfer)
        if transfer.released or transfer.state == "running":
            self.wrong.append(f"a transfer with {transfer.peer} is released too early or twice")
        transfer.released = True

    @alone
    def progress(self) -> None:
        self.progressed += 1
        if self.fails:
            raise AgentError(self.fails)

    @alone
    def close(self) -> None:
        if self.running():
            self.wrong.append("closed under transfers")
        self.closed = True

    def running(self) -> list[FakeTransfer]:
        return [transfer for transfer in self.transfers if transfer.state == "running"]

    def finish(self, peer: str, count: int = 1 << 30) -> None:
        """The oldest ``count`` that run with ``peer`` end. From any thread."""
        for transfer in [transfer for transfer in self.running() if transfer.peer == peer][:count]:
            transfer.state = "done"
