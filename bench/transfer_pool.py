"""kvstrata for bench/transfer.py: a master and a node as real processes, and a client for each way to reach it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

sys.path.insert(0, __file__.rsplit("/", 1)[0])
sys.path.insert(1, str(Path(__file__).parents[1]))
from cases import Round, measure
from transfer_shapes import BYTES_MAX, Shape, engine_memory, random_bytes

from kvstrata.client import Client, LoadResult, StoreResult
from kvstrata.transfer.memory import Memory
from tests.transfer.gpu.fake_device import fake_device

ANY: Final = "127.0.0.1:0"
HASH_BYTES: Final = 16
#: Until a client reaches the node by the transport it was told.
OPEN_S: Final = 20.0
END_S: Final = 15.0
_devices = itertools.count()


class Missed(Exception):
    """A call did not move all its blocks, as when a busy machine keeps a node silent for a quarter of a second."""


@dataclass(frozen=True, slots=True)
class Pool:
    """``rails``: how the node says it can be reached one-sided, "" not at all."""

    master: str
    node_pid: int
    rails: str
    master_pid: int

    @property
    def pids(self) -> dict[str, int]:
        """Whose CPU time counts beside the client's, by role."""
        return {"node": self.node_pid, "master": self.master_pid}


@contextlib.contextmanager
def pool(dram: str, rails: str) -> Iterator[Pool]:
    """A pool with one node; ``rails`` as ``kvstrata storage --rdma``, "" for its default."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder, contextlib.ExitStack() as stack:
        data = Path(folder)
        leader, master = stack.enter_context(
            _daemon("master", "--listen", ANY, "--grpc", ANY, "--http", ANY, "--state", str(data / "state.db"))
        )
        process, ready = stack.enter_context(
            _daemon(
                "storage", "--master", master["channel"], "--listen", ANY, "--http", ANY,
                "--data", str(data / "node"), "--dram", dram, *(("--rdma", rails) if rails not in ("", "off") else ()),
            )
        )  # fmt: skip
        yield Pool(str(master["channel"]), process.pid, str(ready.get("rails") or ""), leader.pid)


@contextlib.contextmanager
def _daemon(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [sys.executable, "-m", "kvstrata.cli.app", *arguments, "--log-format", "json", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"kvstrata {arguments[0]} did not start: its reason is above")
        yield process, json.loads(line)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Way:
    """One client, one transport, one kind of engine memory: "private"; "shared" (stores from ``client.allocate``); or
    "device": a stand-in on the CPU, so that every byte goes through the staging ring by gathers and scatters."""

    def __init__(
        self,
        system: str,
        master: str,
        transport: str,
        memory: str = "private",
        nbytes: int = BYTES_MAX,
        pids: Mapping[str, int] | None = None,
        loads_first: bool = True,
    ) -> None:
        """``nbytes``: the most that a call moves. ``pids``: whose CPU time counts beside this process', by role.
        ``loads_first``: it has loaded once when this returns; otherwise it has only stored."""
        self.system = system
        self._nbytes = nbytes
        self._pids = pids
        self._client = Client(master, transport=transport, transfer_deadline_ms=20_000)
        self._count = 0
        self._loads_first = loads_first
        self._bytes = random_bytes(nbytes)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._client.close)
        try:
            self._source, given = self._region(memory)
            self._target, self._got = self._region("private" if memory == "shared" else memory)
            given[:] = self._bytes
            self._got[:] = 0  # every page is there, as in an engine that has run for a while
            self.reached = self._reach()
        except BaseException:
            self._stack.close()
            raise

    def _region(self, memory: str) -> tuple[Any, npt.NDArray[np.uint8]]:
        """And the bytes in it."""
        if memory == "shared":
            region = self._client.allocate(self._nbytes)
            return region, region.bytes
        if memory == "device":
            device = self._stack.enter_context(fake_device(self._nbytes + (1 << 20), Memory("cuda", next(_devices))))
            array = device.empty((self._nbytes,))
            return self._client.register(array), array.shadow
        private = engine_memory(self._nbytes)
        return self._client.register(private), private

    def _reach(self) -> str:
        """Store, and load, until all is by the transport that was asked for; the one in use, as health names it."""
        shape, until = Shape("first", 4, 64 << 10), time.monotonic() + OPEN_S
        while True:
            try:
                if self._loads_first:
                    self.rounds(shape, calls=1)
                else:
                    self.stores(shape, 1, lambda: None)
            except Missed as error:
                if time.monotonic() > until:
                    problems = self._client.health()["problems"]
                    raise SystemExit(f"{self.system}: {error}; its health says: {problems}") from error
                time.sleep(0.1)
                continue
            nodes: Any = self._client.health()["nodes"]
            return str(nodes[0]["transport"]) if nodes else ""

    def rounds(self, shape: Shape, calls: int = 0) -> tuple[Round, Round]:
        """(store, load): every call stores or loads fresh blocks; bytes are compared after, blocks removed."""
        client, calls = self._client, calls or shape.calls
        namespace, source, target = self._views(shape)
        keys = [self._hashes(shape.blocks) for _ in range(calls + 1)]
        nbytes = calls * shape.nbytes
        try:
            _whole(client.store(namespace, "", keys[0], source))
            stored = measure([_call(client.store, namespace, key, source) for key in keys[1:]], nbytes, self._pids)
            self._got[: shape.nbytes] = 0
            _whole(client.load(namespace, "", keys[0], target))
            loaded = measure([_call(client.load, namespace, key, target) for key in keys[1:]], nbytes, self._pids)
            assert (self._got[: shape.nbytes] == self._bytes[: shape.nbytes]).all(), "wrong bytes"
        finally:
            for key in keys:
                client.remove(namespace, "", key)
        return stored, loaded

    def stores(self, shape: Shape, calls: int, begin: Callable[[], None]) -> Round:
        """Stores of fresh blocks alone, once ``begin`` has returned; removed after."""
        client, space, source, _ = self._client, *self._views(shape)
        keys = [self._hashes(shape.blocks) for _ in range(calls)]
        try:
            begin()
            return measure([_call(client.store, space, key, source) for key in keys], calls * shape.nbytes, self._pids)
        finally:
            for key in keys:
                client.remove(space, "", key)

    @contextlib.contextmanager
    def held(self, shape: Shape, calls: int) -> Iterator[list[Callable[[], None]]]:
        """Loads of blocks that are in the pool until the end of the block, a call each: for use again and again."""
        client, space, source, target = self._client, *self._views(shape)
        keys = [self._hashes(shape.blocks) for _ in range(calls)]
        try:
            for key in keys:
                _whole(client.store(space, "", key, source))
            yield [_call(client.load, space, key, target) for key in keys]
        finally:
            for key in keys:
                client.remove(space, "", key)

    def _views(self, shape: Shape) -> tuple[Any, Any, Any]:
        """Namespace, source and target of a shape's blocks."""
        namespace = self._client.namespace(
            f"bench/{shape.block_bytes}", block_bytes=shape.block_bytes, block_tokens=16, hash_bytes=HASH_BYTES
        )
        table = np.stack([shape.offsets(), np.full((shape.blocks, shape.pieces), shape.piece_bytes)], axis=2)
        return namespace, self._source.view(namespace, table), self._target.view(namespace, table)

    def _hashes(self, count: int) -> bytes:
        self._count += 1
        names = (f"{self.system}/{self._count}/{index}".encode() for index in range(count))
        return b"".join(hashlib.blake2b(name, digest_size=HASH_BYTES).digest() for name in names)

    def close(self) -> None:
        self._stack.close()


def _call(call: Callable[..., LoadResult | StoreResult], namespace: object, key: bytes, blocks: object) -> Any:
    return lambda: _whole(call(namespace, "", key, blocks))


def _whole(result: StoreResult | LoadResult) -> None:
    held = {"stored", "already_present", "loaded"}
    if set(result.reasons) - held:
        raise Missed(f"blocks were not moved: {result.reasons}")
