"""Small nodes with real memory, and payloads that show wrong, stale, torn and reused bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.records import Block
from kvstrata.storage.serving.published import Published
from kvstrata.storage.state import NodeState, Reserved, WriteAsk

SLAB_BYTES = 64 << 10


def payload(key: bytes, version: int, nbytes: int) -> bytes:
    """The bytes that ``version`` of a block must have: a stream of the key."""
    return hashlib.shake_128(key + version.to_bytes(8, "little")).digest(nbytes)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys(numbers: range | list[int]) -> bytes:
    return b"".join(key(number) for number in numbers)


class Node:
    """A :class:`NodeState` driven by hand: ``now`` is whatever the test says."""

    SESSION = b"s" * 16

    def __init__(self, slabs: int = 4, block_bytes: int = 4096) -> None:
        self.arena = dram_arena(slabs * SLAB_BYTES, SLAB_BYTES)
        self.state = NodeState(self.arena, published=Published(1, self.arena.bytes_total))
        self.namespace = Namespace("model", block_bytes, 16)
        self.handle = self.state.open_namespace(self.namespace)[0]
        self.now = 1000.0

    @property
    def capacity(self) -> int:
        """Blocks of the namespace that fit."""
        return len(self.arena.slabs) * self.arena.slots_in_a_slab(self.state.entry(self.handle).slot_bytes)

    def reserve(
        self,
        numbers: range | list[int],
        *,
        salt: str = "",
        parent: bytes = b"",
        first_index: int = 0,
        handle: int = 0,
        session: bytes = SESSION,
        deadline_ms: int = 1000,
        epoch: int = 0,
    ) -> Reserved:
        ask = WriteAsk(
            handle or self.handle, salt, keys(numbers), parent, first_index, deadline_ms=deadline_ms, epoch=epoch
        )
        return self.state.reserve(session, ask, self.now)

    def store(self, numbers: range | list[int], version: int = 0, **where: object) -> list[int]:
        """Reserve, write, commit; statuses as of the end."""
        got = self.reserve(numbers, **where)  # type: ignore[arg-type]
        status = list(got.status)
        if got.reservation is not None:
            for block in got.reservation.blocks:
                fill(block, version)
            session = where.get("session", self.SESSION)
            assert isinstance(session, bytes)
            done = list(
                self.state.commit(session, got.reservation.id, [version] * len(got.reservation.blocks), None, self.now)
            )
            status = [done.pop(0) if each == 10 else each for each in status]
        self.state.check()
        return status

    def chain(self, numbers: range, step: int, **where: object) -> None:
        """Store a chain in calls of ``step`` blocks, as an engine does while it decodes."""
        for start in range(numbers.start, numbers.stop, step):
            part = range(start, min(start + step, numbers.stop))
            parent = key(start - 1) if start > numbers.start else b""
            self.store(part, parent=parent, first_index=start - numbers.start, **where)

    def present(self, numbers: range | list[int], salt: str = "") -> list[int]:
        """Which of these can be read, without touching anything."""
        shelf = self.state.inventory.shelves.get((self.handle, salt))
        return [
            n for n in numbers if shelf is not None and (b := shelf.blocks.get(key(n))) is not None and b.state == 1
        ]

    def acquire(self, numbers: range | list[int], *, salt: str = "", seconds: float = 2.0, session: bytes = SESSION):  # type: ignore[no-untyped-def]
        return self.state.acquire(session, self.handle, salt, keys(numbers), seconds, self.now)


def fill(block: Block, version: int) -> None:
    """Write what the block must hold."""
    block.bytes()[:] = payload(block.hash, version, block.shelf.entry.block_bytes)


def holds(block: Block, version: int) -> bool:
    return bytes(block.bytes()) == payload(block.hash, version, block.shelf.entry.block_bytes)


@pytest.fixture
def node() -> Iterator[Node]:
    one = Node()
    yield one
    one.state.check()
    one.arena.close()


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(slabs: int = 4, block_bytes: int = 4096) -> Node:
        made.append(Node(slabs, block_bytes))
        return made[-1]

    yield make
    for one in made:
        one.state.check()
        one.arena.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[StorageNode]:
    """A node that serves on TCP, a unix socket and HTTP, in this process, without a master."""
    one = StorageNode(StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, slab_bytes=1 << 20))
    one.start()
    yield one
    one.stop()
