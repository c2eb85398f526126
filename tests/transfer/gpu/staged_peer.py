"""A node that is a dict, behind a staged peer, and device memory that its blocks go to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstrata.proto.keys import Namespace, split_hashes
from kvstrata.proto.status import BlockStatus, HintKind
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Landing, Lease, Named, Push, Pushed, StatusArray
from kvstrata.transfer.gpu.ring import Ring
from kvstrata.transfer.gpu.staging import StagedPeer, Staging, StagingOptions
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import BlockView, Region
from tests.transfer.gpu.fake_device import FakeArray, FakeDevice, fake_device

LOADED, MISSING = int(BlockStatus.LOADED), int(BlockStatus.MISSING)
CUDA = Memory("cuda", 0)
DEADLINE_S = 20.0


class DictPeer:
    """Blocks by hash. ``statuses``: what others end in, by hash. ``entered``: called before each fetch or push."""

    transport = "dict"

    def __init__(self) -> None:
        self.endpoint = Endpoint("n1", 1, "127.0.0.1:1")
        self.blocks: dict[bytes, bytes] = {}
        self.statuses: dict[bytes, BlockStatus] = {}
        self.durable: set[bytes] = set()
        self.untold: set[bytes] = set()  #: blocks that come with the answer only, and in no range before it
        self.pending: tuple[Landing, ...] = ()
        self.fetches: list[Fetch] = []
        self.pushes: list[Push] = []
        self.entered: Callable[[int], None] = lambda _: None
        self.between: Callable[[int], None] = lambda _: None  #: called before each range of a fetch with ``parts``

    def fetch(self, request: Fetch) -> Fetched:
        self.fetches.append(request)
        self.entered(len(self.fetches))
        keys = list(split_hashes(request.hashes, request.namespace.hash_bytes))
        missing = BlockStatus.MISSING
        status = np.array([LOADED if k in self.blocks else self.statuses.get(k, missing) for k in keys], np.uint8)
        ends = request.parts or (request.namespace.block_bytes,)
        low = 0
        for part, high in enumerate(ends):
            self.between(part)
            for i in np.flatnonzero(status == LOADED).tolist():
                _put(request.blocks, i, self.blocks[keys[i]], low, high)
            if request.landed is not None:
                request.landed(part, (status == LOADED) & [key not in self.untold for key in keys])
            low = high
        for i, key in enumerate(keys):  # a verdict that comes after the bytes
            if key in self.statuses:
                status[i] = self.statuses[key]
        moved = int(np.count_nonzero(status == LOADED)) * request.namespace.block_bytes
        return Fetched(status, np.ones(len(keys), np.uint8), 7 + len(self.fetches), moved, self.pending)

    def push(self, request: Push) -> Pushed:
        self.pushes.append(request)
        self.entered(len(self.pushes))
        keys = list(split_hashes(request.hashes, request.namespace.hash_bytes))
        status = np.array([self.statuses.get(key, BlockStatus.STORED) for key in keys], np.uint8)
        for i in np.flatnonzero(status == BlockStatus.STORED).tolist():
            self.blocks[keys[i]] = _got(request.blocks, i)
        durable = np.array([key in self.durable for key in keys], np.bool_)
        moved = int(np.count_nonzero(status == BlockStatus.STORED)) * request.namespace.block_bytes
        return Pushed(status, moved, durable, self.pending)

    def view(self, namespace: Namespace, salt: str, hashes: bytes, deadline: float, epoch: int = 0) -> Lease:
        raise AssertionError("nobody asks for a view")

    def prefetch(self, blocks: Named) -> StatusArray:
        return np.full(len(blocks.hashes) // blocks.namespace.hash_bytes, LOADED, np.uint8)

    def hint(self, blocks: Named, kind: HintKind, ttl_s: float) -> int:
        return 3

    def reachable(self) -> bool:
        return True

    def upkeep(self) -> None: ...
    def close(self) -> None: ...


def _put(blocks: BlockView, index: int, data: bytes, low: int, high: int) -> None:
    at = 0
    for start, length in blocks.table[index].tolist():
        first, last = max(low, at), min(high, at + length)
        if first < last:
            blocks.region.bytes[start + first - at : start + last - at] = np.frombuffer(data, np.uint8)[first:last]
        at += length


def _got(blocks: BlockView, index: int) -> bytes:
    return b"".join(blocks.region.bytes[a : a + n].tobytes() for a, n in blocks.table[index].tolist())


@dataclass
class World:
    """``peer`` is staged over ``node``; ``registered``: chunks its transports know."""

    device: FakeDevice
    node: DictPeer
    peer: StagedPeer
    staging: Staging
    registered: list[Region]

    @property
    def ring(self) -> Ring:
        return self.staging.ring(CUDA)

    def region(self, array: FakeArray) -> Region:
        return Region.on_device(CUDA, array.address, array.nbytes, array)

    def fetch(self, namespace: Namespace, hashes: bytes, blocks: BlockView, **more: object) -> Fetched:
        deadline = time.monotonic() + DEADLINE_S
        return self.peer.fetch(Fetch(namespace, "", hashes, blocks, **{"deadline": deadline, **more}))  # type: ignore[arg-type]

    def push(self, namespace: Namespace, hashes: bytes, blocks: BlockView, **more: object) -> Pushed:
        deadline = time.monotonic() + DEADLINE_S
        return self.peer.push(Push(namespace, "", hashes, blocks, **{"deadline": deadline, **more}))  # type: ignore[arg-type]

    def check_quiet(self) -> None:
        """Nothing is under way, and no chunk is missing."""
        health = self.ring.health()
        assert (health["in_use"], health["held"]) == (0, 0), health
        assert health["free"] == len(self.registered) - int(str(health["lost"])), health


@contextmanager
def staged(chunk_bytes: int = 4096, chunks: int = 4, held_max: int = 2, nbytes: int = 4 << 20) -> Iterator[World]:
    registered: list[Region] = []
    with fake_device(nbytes) as device:
        options = StagingOptions(chunk_bytes=chunk_bytes, chunks=chunks, held_max=held_max)
        staging = Staging(registered.append, registered.remove, options)
        node = DictPeer()
        yield World(device, node, StagedPeer(node, staging), staging, registered)
        staging.close()


def names(count: int, chain: str = "c") -> list[bytes]:
    return [hashlib.blake2b(f"{chain}/{i}".encode(), digest_size=16).digest() for i in range(count)]


def content(keys: Sequence[bytes], block_bytes: int) -> npt.NDArray[np.uint8]:
    """u8[n, block_bytes], from 1 on, so that untouched memory shows."""
    rows = [np.random.default_rng(int.from_bytes(key[:8], "little")).integers(1, 256, block_bytes) for key in keys]
    return np.array(rows, np.uint8).reshape(len(keys), block_bytes)


def space(block_bytes: int) -> Namespace:
    return Namespace("model/t", block_bytes, 16)
