"""Worker sides of engines whose KV memory is on a device: the pool's transfers and the engine's stream, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind, JobOutcome, PoolState
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.worker_side import make_worker_side
from kvstrata.engine_adapter.vllm.geometry import engine_memory
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.memory import Memory
from tests.e2e.real_pool import RealPool, keys, payload
from tests.engine_adapter.vllm.device_tensors import DeviceTensor, allocate
from tests.transfer.gpu.fake_device import FakeDevice, FakeStream, fake_device
from tests.waiting import until

WIDTH = 32
LAYERS, BLOCKS, TOKENS, HEADS, CHANNELS = 4, 300, 16, 2, 32
PAGE = 2 * TOKENS * HEADS * CHANNELS * 2
BLOCK_BYTES = LAYERS * PAGE  # 16 KiB
LAYOUT = PoolLayout(
    groups=(GroupLayout(fingerprint="model/device", block_tokens=TOKENS, layers=LAYERS, block_bytes=BLOCK_BYTES),),
    num_blocks=BLOCKS,
    num_tensors=1,
    page_bytes=1,
    parts=1,
    hash_block_tokens=TOKENS,
    hash_bytes=WIDTH,
    aligned_tokens=TOKENS,
)


class DeviceRank:
    """A worker side whose KV memory is a tensor a layer on the device, of shape (2, blocks, ...), in physical order
    ``order``; the thread that drives it has ``stream``."""

    def __init__(
        self, device: FakeDevice, masters: str, order: tuple[int, ...] = (0, 1, 2, 3, 4), **config: object
    ) -> None:
        shape = (2, BLOCKS, TOKENS, HEADS, CHANNELS)
        self.tensors: list[DeviceTensor] = [allocate(device, shape, order) for _ in range(LAYERS)]
        self.stream: FakeStream = device.stream()
        layers = {f"layer{i}": tensor for i, tensor in enumerate(self.tensors)}
        options = {"masters": masters, "load_deadline_ms": 20_000, **config}
        self.side = make_worker_side(
            LAYOUT,
            msgspec.convert(options, PoolConfig),
            name="device",
            engine_memory=engine_memory([list(layers)], [True], layers, BLOCKS),
        )
        self._ids = 0
        until(lambda: self.side.take_output().pool is PoolState.READY)

    def write(self, block_ids: list[int], rows: npt.NDArray[np.uint8]) -> None:
        """What a forward pass computes, when the device comes to it."""
        pages = rows.view(np.float16).reshape(len(block_ids), LAYERS, 2, TOKENS, HEADS, CHANNELS)
        for layer, tensor in enumerate(self.tensors):
            tensor.shadow[:, block_ids] = pages[:, layer].swapaxes(0, 1)

    def read(self, block_ids: list[int]) -> npt.NDArray[np.uint8]:
        pages = np.stack([tensor.shadow[:, block_ids].swapaxes(0, 1) for tensor in self.tensors], axis=1)
        return np.ascontiguousarray(pages).view(np.uint8).reshape(len(block_ids), BLOCK_BYTES)

    def start(self, kind: JobKind, blocks: GroupBlocks) -> int:
        self._ids += 1
        job = Job(job_id=self._ids, kind=kind, request_id="r", cache_salt="", groups=[blocks], deadline_s=20.0)
        self.side.start(ConnectorMeta(loads=[job]) if kind is JobKind.LOAD else ConnectorMeta(stores=[job]))
        return self._ids

    def outcome(self, job_id: int) -> JobOutcome:
        found: list[JobOutcome] = []

        def there() -> bool:
            found.extend(self.side.take_output().outcomes)
            return bool(found)

        until(there, 20)
        assert [one.job_id for one in found] == [job_id]
        return found[0]

    def store(self, blocks: GroupBlocks, rows: npt.NDArray[np.uint8]) -> JobOutcome:
        self.write(blocks.block_ids, rows)
        job = self.start(JobKind.STORE, blocks)
        self.side.forward_ended()
        return self.outcome(job)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("device-pool"))
    yield pool
    pool.end()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(64 << 20) as device:
        yield device


@pytest.fixture
def rank(pool: RealPool, device: FakeDevice) -> Iterator[DeviceRank]:
    rank = DeviceRank(device, pool.address)
    yield rank
    rank.side.close()


def named(chain: str, block_ids: list[int]) -> tuple[GroupBlocks, npt.NDArray[np.uint8]]:
    hashes = keys(len(block_ids), chain, WIDTH)
    return GroupBlocks(group=0, hashes=hashes, block_ids=block_ids), payload(hashes, "", BLOCK_BYTES, WIDTH)


def scattered(count: int, seed: int) -> list[int]:
    return [int(i) for i in 1 + np.random.default_rng(seed).permutation(BLOCKS - 1)[:count]]


def test_blocks_go_to_the_pool_and_come_back_to_others(rank: DeviceRank) -> None:
    blocks, rows = named("round", scattered(40, 1))
    assert rank.store(blocks, rows).done == b"\1" * 40
    elsewhere = [block_id for block_id in range(1, BLOCKS) if block_id not in blocks.block_ids][:40]
    into = msgspec.structs.replace(blocks, block_ids=elsewhere)
    assert rank.outcome(rank.start(JobKind.LOAD, into)).done == b"\1" * 40
    assert (rank.read(elsewhere) == rows).all() and (rank.read(blocks.block_ids) == rows).all()
    assert rank.side.memory.size == 0
    health = rank.side.health()
    assert health["healthy"], health["problems"]


def test_a_store_waits_for_the_forward_pass_on_the_engines_stream(rank: DeviceRank, device: FakeDevice) -> None:
    blocks, rows = named("pass", [7, 3, 9])
    with rank.stream:
        rank.stream.queue(lambda: rank.write(blocks.block_ids, rows))
        job = rank.start(JobKind.STORE, blocks)
        rank.side.forward_ended()  # the host is done; the device has not begun
    time.sleep(0.2)  # were it to go on without the device, it would by now
    assert not rank.side.take_output().outcomes and device.runtime.launches["gather"] == 0
    rank.stream.run()
    assert rank.outcome(job).done == b"\1\1\1"
    other = msgspec.structs.replace(blocks, block_ids=[20, 21, 22])
    assert rank.outcome(rank.start(JobKind.LOAD, other)).done == b"\1\1\1"
    assert (rank.read([20, 21, 22]) == rows).all(), "what the pass has written, not what was there before"


def test_a_store_does_not_wait_for_the_next_step(rank: DeviceRank) -> None:
    blocks, rows = named("next", [5, 6])
    with rank.stream:
        rank.stream.queue(lambda: rank.write(blocks.block_ids, rows))
        job = rank.start(JobKind.STORE, blocks)
        rank.side.forward_ended()
        rank.stream.queue(lambda: None)  # the next step, which the device has not begun when the store ends
    rank.stream.run(2)
    assert rank.outcome(job).done == b"\1\1"


def test_a_load_waits_for_the_last_use_of_its_blocks(rank: DeviceRank) -> None:
    blocks, rows = named("reuse", [30, 31])
    assert rank.store(blocks, rows).done == b"\1\1"
    into = msgspec.structs.replace(blocks, block_ids=[40, 41])
    with rank.stream:
        rank.stream.queue(lambda: rank.write([40, 41], np.zeros((2, BLOCK_BYTES), np.uint8)))  # a pass not run yet
        job = rank.start(JobKind.LOAD, into)
        rank.stream.queue(lambda: None)  # this step's own, beside which the load runs
    time.sleep(0.2)  # were it to go on without the device, it would by now
    assert not rank.side.take_output().outcomes
    rank.stream.run(2)
    assert rank.outcome(job).done == b"\1\1"
    assert (rank.read([40, 41]) == rows).all()


def test_engines_with_blocks_laid_out_otherwise_share_them(
    pool: RealPool, device: FakeDevice, rank: DeviceRank
) -> None:
    """Blocks outermost, and K/V apart: the pages are the same."""
    other = DeviceRank(device, pool.address, order=(1, 0, 2, 3, 4))
    try:
        blocks, rows = named("shared", scattered(12, 2))
        assert rank.store(blocks, rows).done == b"\1" * 12
        into = msgspec.structs.replace(blocks, block_ids=list(range(100, 112)))
        until(lambda: other.outcome(other.start(JobKind.LOAD, into)).done == b"\1" * 12)
        assert (other.read(list(range(100, 112))) == rows).all()
    finally:
        other.side.close()


def test_a_device_that_fails_costs_hits_and_nothing_else(rank: DeviceRank, device: FakeDevice) -> None:
    blocks, rows = named("failing", [50, 51])
    assert rank.store(blocks, rows).done == b"\1\1"
    into = msgspec.structs.replace(blocks, block_ids=[60, 61])
    device.runtime.fail_next()
    outcome = rank.outcome(rank.start(JobKind.LOAD, into))
    assert outcome.done == b"\0\0" and set(outcome.reasons) == {"refused"}
    assert rank.side.take_output().pool is PoolState.READY, "no node is to blame"
    assert rank.outcome(rank.start(JobKind.LOAD, into)).done == b"\1\1"
    assert (rank.read([60, 61]) == rows).all()


def test_blocks_that_a_late_device_may_still_write_are_not_given_back_to_the_engine(
    pool: RealPool, device: FakeDevice
) -> None:
    rank = DeviceRank(device, pool.address, load_deadline_ms=1_000)
    try:
        blocks, rows = named("late", [80, 81])
        assert rank.store(blocks, rows).done == b"\1\1"
        into = msgspec.structs.replace(blocks, block_ids=[90, 91])
        with device.runtime.hold("scatter"):
            job = rank.start(JobKind.LOAD, into)
            until(lambda: rank.side.health()["jobs_parked"] == 1)  # its call has ended
            assert not rank.side.take_output().outcomes
        assert rank.outcome(job).done == b"\0\0", "what came after the deadline is not believed"
        assert (rank.read([90, 91]) == rows).all(), "and came all the same"
    finally:
        rank.side.close()


def test_a_stream_that_cannot_be_marked_ends_the_jobs(
    rank: DeviceRank, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise Unavailable("cuda:0: an illegal memory access was encountered")

    monkeypatch.setattr(device.runtime, "mark", fails)
    blocks, _ = named("unmarked", [70])
    assert rank.outcome(rank.start(JobKind.LOAD, blocks)).reasons == {"error": 1}
    job = rank.start(JobKind.STORE, blocks)
    rank.side.forward_ended()
    assert rank.outcome(job).reasons == {"error": 1}


def test_without_a_way_to_the_device_the_engine_is_told_at_the_start(pool: RealPool, device: FakeDevice) -> None:
    tensors = {"layer0": allocate(device, (2, BLOCKS, TOKENS, HEADS, CHANNELS), (0, 1, 2, 3, 4))}
    memory = engine_memory([["layer0"]], [True], tensors, BLOCKS)
    lost = replace(memory, device=tuple(replace(each, memory=Memory("cuda", 7)) for each in memory.device))
    with pytest.raises(Unavailable, match="cupy"):
        make_worker_side(LAYOUT, msgspec.convert({"masters": pool.address}, PoolConfig), engine_memory=lost)
