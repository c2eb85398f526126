"""A client whose pool is a dict, and whose calls block, fail or miss as a test says: no sockets, real memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.prefetching import Begun, Prefetch
from kvstrata.client.results import LoadResult, Lookup, StoreResult, prefix
from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind, JobOutcome
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.worker_side import PoolWorkerSide
from kvstrata.proto.errors import FingerprintMismatch, KVError
from kvstrata.proto.keys import split_hashes
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing
from kvstrata.transfer.gpu.memory import Buffer
from kvstrata.transfer.regions import BlockView, Region

WIDTH = 16
WAIT_S = 10.0


class Gate:
    """Calls stop at it while it is shut; ``entered`` counts those that came."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def came(self) -> None:
        """Wait until one more call has come."""
        assert self.entered.acquire(timeout=WAIT_S), "nobody came"

    def through(self) -> None:
        self.entered.release()
        assert self._open.wait(WAIT_S), "the gate was never opened"


@dataclass
class StoreCall:
    hashes: bytes
    parent: bytes | None
    first_index: int
    epoch: int
    parts: tuple[int, ...] = ()


@dataclass
class ScriptedClient:
    """``answers``: hash -> status instead of the truth; ``of_shard``: the same of one shard's blocks.
    ``everything``: status of every block of every call.

    ``fails``: raised by every call that names blocks; ``refuses``: by ``namespace``. ``reached`` False: no master.
    ``epoch``: the weight epoch that namespaces are pinned to; one of another epoch finds nothing and may not store.
    """

    blocks: dict[tuple[str, int, str, bytes], bytes] = field(default_factory=dict)
    answers: dict[bytes, BlockStatus] = field(default_factory=dict)
    of_shard: dict[tuple[int, bytes], BlockStatus] = field(default_factory=dict)
    everything: BlockStatus | None = None
    fails: Exception | None = None
    refuses: KVError | None = None
    reached: bool = True
    epoch: int = 0
    opening: Gate = field(default_factory=Gate)
    not_yet: bool = False
    loading: Gate = field(default_factory=Gate)
    storing: Gate = field(default_factory=Gate)
    landing: Gate = field(default_factory=Gate)
    pending: tuple[Landing, ...] = ()  #: what answers of PENDING wait for
    takes_back: bool = False  #: blocks that do not come are in place at first
    loads: list[bytes] = field(default_factory=list)
    stores: list[StoreCall] = field(default_factory=list)
    lookups: int = 0
    requests: list[str] = field(default_factory=list)
    prefetched: list[bytes] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    staged: list[bool] = field(default_factory=list)  #: of each region
    unregistered: list[Region] = field(default_factory=list)
    closed: bool = False

    def namespace(
        self, group: str, *, block_bytes: int, block_tokens: int, hash_bytes: int, shard: int, shard_count: int
    ) -> PoolNamespace:
        if self.refuses is not None:
            raise self.refuses
        opened = PoolNamespace(group, block_bytes, block_tokens, hash_bytes, shard, shard_count)
        if self.reached:
            opened.pin.learn(self.epoch)
        self.opening.through()
        return opened

    def allocate(self, nbytes: int) -> Region:
        return self.register(np.zeros(nbytes, np.uint8))

    def register(self, buffer: npt.NDArray[np.uint8] | tuple[Buffer, ...], *, staged: bool = False) -> Region:
        self.staged.append(staged)
        if isinstance(buffer, tuple):
            extents = [(each.address, each.nbytes) for each in buffer]
            self.regions.append(Region.spanning(buffer[0].memory, extents, buffer))
            return self.regions[-1]
        self.regions.append(Region(buffer, buffer))
        return self.regions[-1]

    def unregister(self, region: Region) -> None:
        self.unregistered.append(region)

    def lookup(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes, *, request: str = "") -> Lookup:
        self.lookups += 1
        self.requests.append(request)
        if self.fails is not None:
            raise self.fails
        rows = list(split_hashes(hashes, namespace.hash_bytes))
        present = np.array([(namespace.group, namespace.shard, cache_salt, row) in self.blocks for row in rows], bool)
        tiers = np.zeros(len(rows), np.uint8)
        if not self.reached:
            return Lookup(0, present & False, tiers, {"node_lost": len(rows)}, answered=False)
        return Lookup(None if self.not_yet else prefix(present), present, tiers, {"present": int(present.sum())})

    def prefetch(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes) -> Prefetch:
        self.prefetched.append(hashes)
        never: Future[Begun] = Future()
        return Prefetch(never, 0.0, lambda _: None)

    def load(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: bytes,
        blocks: BlockView,
        *,
        parts: Sequence[int] = (),
        landed: Callable[[int, npt.NDArray[np.bool_]], None] | None = None,
    ) -> LoadResult:
        self.loads.append(hashes)
        self.loading.through()
        result = self._load(namespace, cache_salt, hashes, blocks)
        for part in range(len(parts)):
            self.landing.through()
            assert landed is not None
            landed(part, result.loaded | self.takes_back)
        return result

    def _load(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes, blocks: BlockView) -> LoadResult:
        if self.fails is not None:
            raise self.fails
        status = []
        for row, name in enumerate(split_hashes(hashes, namespace.hash_bytes)):
            data = self.blocks.get((namespace.group, namespace.shard, cache_salt, name))
            absent = data is None or namespace.epoch != self.epoch
            truth = BlockStatus.MISSING if absent else BlockStatus.LOADED
            code = self.of_shard.get((namespace.shard, name), self._answer(name, truth))
            if code is BlockStatus.LOADED and data is not None:
                _put(blocks, row, data)
            status.append(code)
        return LoadResult.of(np.array(status, np.uint8), np.zeros(len(status), np.uint8), 0.0, 0, self.pending)

    def store(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: bytes,
        blocks: BlockView,
        parent: bytes | None,
        first_index: int,
        *,
        parts: Sequence[int] = (),
        written: Callable[[int, float], bool] | None = None,
    ) -> StoreResult:
        self.stores.append(StoreCall(hashes, parent, first_index, namespace.epoch, tuple(parts)))
        self.storing.through()
        if written is not None and not all(written(k, time.monotonic() + WAIT_S) for k in range(len(parts))):
            aborted = np.full(len(hashes) // namespace.hash_bytes, BlockStatus.ABORTED, np.uint8)
            return StoreResult.of(aborted, 0.0, 0)
        if self.fails is not None:
            raise self.fails
        if namespace.epoch != self.epoch:
            raise FingerprintMismatch(f"the group is at weight epoch {self.epoch}, and this handle is of another")
        status = []
        for row, name in enumerate(split_hashes(hashes, namespace.hash_bytes)):
            code = self.of_shard.get((namespace.shard, name), self._answer(name, BlockStatus.STORED))
            if code is BlockStatus.STORED:
                self.blocks[(namespace.group, namespace.shard, cache_salt, name)] = _get(blocks, row)
            status.append(code)
        return StoreResult.of(np.array(status, np.uint8), 0.0, 0, pending=self.pending)

    def _answer(self, name: bytes, truth: BlockStatus) -> BlockStatus:
        if not self.reached:
            return BlockStatus.NODE_LOST
        return self.answers.get(name, truth) if self.everything is None else self.everything

    def health(self) -> dict[str, object]:
        return {"healthy": self.reached}

    def close(self) -> None:
        self.closed = True


def _put(blocks: BlockView, row: int, data: bytes) -> None:
    at = 0
    for start, length in blocks.table[row].tolist():
        blocks.region.bytes[start : start + length] = np.frombuffer(data[at : at + length], np.uint8)
        at += length


def _get(blocks: BlockView, row: int) -> bytes:
    return b"".join(blocks.region.bytes[start : start + length].tobytes() for start, length in blocks.table[row])


# -------------------------------------------------------------------- an engine's part

FULL = GroupLayout(fingerprint="model/full", block_tokens=4, layers=2)
WINDOW = GroupLayout(fingerprint="model/window", block_tokens=8, layers=1, window_tokens=16)
STATE = GroupLayout(fingerprint="model/state", block_tokens=4, layers=1, poolable=False)


def layout(
    *groups: GroupLayout, num_blocks: int = 64, shard_count: int = 1, shards_per_rank: int = 1, page_bytes: int = 64
) -> PoolLayout:
    groups = groups or (FULL,)
    return PoolLayout(
        groups=groups,
        num_blocks=num_blocks,
        num_tensors=max(group.layers for group in groups),
        page_bytes=page_bytes,
        parts=2,
        hash_block_tokens=4,
        hash_bytes=WIDTH,
        aligned_tokens=8,
        shard_count=shard_count,
        shards_per_rank=shards_per_rank,
    )


def names(count: int, first: int = 0) -> bytes:
    return b"".join((first + i + 1).to_bytes(WIDTH, "little") for i in range(count))


def job(
    job_id: int,
    kind: JobKind,
    hashes: bytes,
    block_ids: list[int],
    *,
    group: int = 0,
    first_index: int = 0,
    parent: bytes = b"",
    request_id: str = "r",
    deadline_s: float = 10.0,
) -> Job:
    blocks = GroupBlocks(group=group, hashes=hashes, block_ids=block_ids, first_index=first_index, parent=parent)
    return Job(
        job_id=job_id, kind=kind, request_id=request_id, cache_salt="", groups=[blocks], deadline_s=deadline_s
    )  # fmt: skip


def load(job_id: int, hashes: bytes, block_ids: list[int], **more: object) -> ConnectorMeta:
    return ConnectorMeta(loads=[job(job_id, JobKind.LOAD, hashes, block_ids, **more)])  # type: ignore[arg-type]


def store(job_id: int, hashes: bytes, block_ids: list[int], **more: object) -> ConnectorMeta:
    return ConnectorMeta(stores=[job(job_id, JobKind.STORE, hashes, block_ids, **more)])  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A worker side on a scripted client, and what came out of it so far."""

    def __init__(
        self,
        client: ScriptedClient,
        *groups: GroupLayout,
        connect: Callable[[], ScriptedClient] | None = None,
        chunk_blocks: int = 1000,
        plan: PoolLayout | None = None,
        rank: int = 0,
        **config: object,
    ) -> None:
        self.client, self.clock = client, Clock()
        self.layout = plan or layout(*groups)
        self.side = PoolWorkerSide(
            self.layout,
            PoolConfig(masters="unused:1", **{"load_deadline_ms": 10_000, **config}),  # type: ignore[arg-type]
            rank=rank,
            connect=connect or (lambda: client),
            clock=self.clock,
            chunk_bytes=chunk_blocks * self.layout.block_bytes(0),
        )
        self.outcomes: list[JobOutcome] = []
        self._woken = threading.Event()
        self.side.set_waker(self._woken.set)
        self.table = [self.layout.descriptors(group) for group in range(len(self.layout.groups))]

    def take(self) -> list[JobOutcome]:
        self._woken.clear()
        self.outcomes += self.side.take_output().outcomes
        return self.outcomes

    def outcome(self, job_id: int) -> JobOutcome:
        """The one outcome of a job, waited for."""
        while True:
            self._woken.clear()
            found = [outcome for outcome in self.take() if outcome.job_id == job_id]
            if found:
                assert len(found) == 1, "more than one outcome"
                return found[0]
            assert self._woken.wait(WAIT_S), f"no outcome of job {job_id}"

    def store(self, meta: ConnectorMeta) -> None:
        self.side.start(meta)
        self.side.forward_ended()

    def fill(self, block_id: int, data: bytes, group: int = 0) -> None:
        at = 0
        for start, length in self.table[group][block_id].tolist():
            self.side.memory[start : start + length] = np.frombuffer(data[at : at + length], np.uint8)
            at += length

    def read(self, block_id: int, group: int = 0) -> bytes:
        return b"".join(
            self.side.memory[start : start + length].tobytes() for start, length in self.table[group][block_id]
        )

    def close(self) -> None:
        self.client.loading.open()
        self.client.landing.open()
        self.client.storing.open()
        self.side.close()
        self.take()
        self.side.check()
