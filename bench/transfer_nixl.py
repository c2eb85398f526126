"""Raw NIXL as a roofline: an agent that reads another process' memory, the same descriptors, nothing of ours between;
and kvstrata's transfer engine alone, in the same place.

``cma`` is UCX over cross-memory attach between processes of one host, ``rdma`` UCX over whatever RDMA device is there.
Progress threads are off: the target makes progress in a loop of its own, the reader while it waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing as mp
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round, measure
from transfer_shapes import END_S, ROUND_S, Memory, Shape, random_bytes, serve

from kvstrata.transfer.rdma.engine import Pieces
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.rails import RailMode, RailOptions

#: UCX cannot make its backend without a transport that two agents can find each other by.
UCX_TLS: Final = {"cma": "cma,posix,sysv,self,tcp", "rdma": "^tcp"}
PROGRESS_S: Final = 0.005
CALL_S: Final = 20.0


def nixl_bindings() -> str:
    """The module to import, "" when NIXL is not installed."""
    return next((name for name in ("nixl_cu12", "nixl_cu13", "nixl") if importlib.util.find_spec(name)), "")


class Agent:
    """An agent with registered memory of both kinds."""

    def __init__(self, name: str, kind: str, memory: Memory) -> None:
        os.environ.setdefault("UCX_TLS", UCX_TLS[kind])
        os.environ.setdefault("UCX_MODULES", "^efa")
        self.nixl: Any = importlib.import_module(f"{nixl_bindings()}._bindings")
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = config.useListenThread = False
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_STRICT
        self.agent = self.nixl.nixlAgent(name, config)
        parameters, _ = self.agent.getPluginParams("UCX")
        self.backend = self.agent.createBackend("UCX", dict(parameters))
        self.memory = memory
        spans = [(buffer.ctypes.data, buffer.nbytes, 0, "") for buffer in (memory.slab, memory.engine)]
        self.agent.registerMem(self.nixl.nixlRegDList(self.nixl.DRAM_SEG, spans), [self.backend])

    def metadata(self) -> bytes:
        return bytes(self.agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        name = self.agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def progress(self) -> None:
        self.agent.getNotifs({}, [self.backend])

    def read(self, peer: str, local: Any, remote: Any) -> None:
        """Copy piece by piece; u64[n, 3] of (address, length, device) each. Returns when the bytes are there."""
        nixl, kind = self.nixl, self.nixl.DRAM_SEG
        handle = self.agent.createXferReq(
            nixl.NIXL_READ, nixl.nixlXferDList(kind, local), nixl.nixlXferDList(kind, remote), peer, b"", [self.backend]
        )
        state = self.agent.postXferReq(handle, b"")
        until = time.monotonic() + CALL_S
        while state == nixl.NIXL_IN_PROG:
            self.progress()
            state = self.agent.getXferStatus(handle)
            if time.monotonic() > until:
                raise TimeoutError(f"a transfer of {len(local)} pieces did not end within {CALL_S:g} s")
        self.agent.releaseXferReq(handle)
        if state != nixl.NIXL_SUCCESS:
            raise OSError(f"a transfer ended as {state}")


class EngineAgent:
    """kvstrata's own engine over an agent, without a pool around it."""

    def __init__(self, name: str, kind: str, memory: Memory) -> None:
        options = RailOptions(mode=RailMode.CMA if kind == "cma" else RailMode.ON)
        self.engine = open_engine(name, find_rails(options), options)
        self.memory = memory
        self.registered = [self.engine.register(each.ctypes.data, each.nbytes) for each in (memory.slab, memory.engine)]

    def metadata(self) -> bytes:
        return self.engine.metadata()

    def meet(self, metadata: bytes) -> str:
        return self.engine.add_peer(metadata)

    def progress(self) -> None:
        """It has a thread of its own."""

    def read(self, peer: str, local: Any, remote: Any) -> None:
        mine, theirs = (Pieces(rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)) for rows in (local, remote))
        job = self.engine.read(peer, mine, theirs)
        if not job.wait(time.monotonic() + CALL_S) or job.problem:
            raise OSError(f"a transfer ended as {job.state.value}: {job.problem}")


def raw_nixl(pipe: Connection, kind: str) -> None:
    """The main of a :class:`transfer_shapes.Worker`: the reader, and the target as its child."""
    _reads(pipe, kind, "nixl", Agent)


def engine_reads(pipe: Connection, kind: str) -> None:
    """The same, by kvstrata's engine."""
    _reads(pipe, kind, "kvstrata-engine", EngineAgent)


def _reads(pipe: Connection, kind: str, system: str, make: type[Agent] | type[EngineAgent]) -> None:
    if not nixl_bindings():
        pipe.send(("no", "NIXL is not installed: pip install 'kvstrata[rdma]'"))
        return
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    target = context.Process(target=_target, args=(theirs, kind, make))
    target.start()
    theirs.close()
    try:
        if not ours.poll(ROUND_S):
            raise TimeoutError("the target did not start")
        metadata, addresses = ours.recv()
        reader = Reader(make("reader", kind, Memory(filled=False)), metadata, addresses)
        serve(pipe, {system: reader.round})
    except Exception as error:  # noqa: BLE001 - said by the process that asked
        pipe.send(("no", f"{system} does not run over {kind}: {type(error).__name__}: {error}"))
    finally:
        ours.close()
        target.join(END_S)
        if target.is_alive():
            target.kill()
    os._exit(0)  # an agent whose peer is gone may take seconds to end


class Reader:
    def __init__(self, agent: Agent | EngineAgent, metadata: bytes, addresses: dict[str, int]) -> None:
        self._agent = agent
        self._peer = agent.meet(metadata)
        self._addresses = addresses
        self._expected = random_bytes()

    def round(self, op: str, shape: Shape) -> Round:
        """A load scatters to where the pieces lie; a store, which the other side reads, gathers from there."""
        paged = shape.offsets().ravel()
        packed = np.arange(len(paged), dtype=np.int64) * shape.piece_bytes
        ours, theirs = (paged, packed) if op == "load" else (packed, paged)
        buffer = self._agent.memory.local(op)
        local = self._pieces(buffer.ctypes.data + ours, shape)
        remote = self._pieces(self._addresses[op] + theirs, shape)
        self._agent.read(self._peer, local, remote)
        buffer[: shape.nbytes] = 0
        calls = [lambda: self._agent.read(self._peer, local, remote)] * shape.calls
        taken = measure(calls, shape.calls * shape.nbytes)
        pieces = buffer[: shape.nbytes].reshape(-1, shape.piece_bytes)
        expected = self._expected[: shape.nbytes].reshape(-1, shape.piece_bytes)
        if not (pieces[ours // shape.piece_bytes] == expected[theirs // shape.piece_bytes]).all():
            raise OSError("wrong bytes")
        return taken

    @staticmethod
    def _pieces(address: np.ndarray, shape: Shape) -> np.ndarray:  # type: ignore[type-arg]
        rows = np.zeros((len(address), 3), np.uint64)
        rows[:, 0], rows[:, 1] = address, shape.piece_bytes
        return rows


def _target(pipe: Connection, kind: str, make: type[Agent] | type[EngineAgent]) -> None:
    memory = Memory(filled=True)
    agent = make("target", kind, memory)
    pipe.send((agent.metadata(), {op: memory.remote(op).ctypes.data for op in ("load", "store")}))
    try:
        while not pipe.poll(PROGRESS_S):
            agent.progress()
    except (BrokenPipeError, EOFError):
        pass
    os._exit(0)
