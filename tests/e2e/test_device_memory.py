"""Device memory through a whole pool, over each transport: stored from, and loaded into, from memory and from SSD."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.client import Client, PoolNamespace, Tier
from kvstrata.proto.errors import Closed, InvalidArgument
from kvstrata.transfer.regions import BlockView
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.transfer.gpu.fake_device import FakeArray, FakeDevice, fake_device
from tests.waiting import until

SIZE = 256 << 10
LAYERS, PARTS = 8, 2
PIECE = SIZE // (LAYERS * PARTS)
DRAM_BLOCKS = 64  # 16 MiB


class SsdPool(RealPool):
    """One node with 16 MiB of memory and 64 MiB of SSD, which every store is written through to."""

    def start_node(self, index: int) -> None:
        name = f"node{index}"
        (self._base / "ssd").mkdir(exist_ok=True)
        self.daemons[name] = Daemon(
            "storage", "--master", self.address, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
            "--data", str(self._base / name), "--dram", "16MiB", "--rdma", "cma",
            "--ssd", f"{self._base / 'ssd'}=64MiB", "--ssd-policy", "write-through",
            log=self._base / f"{name}.log",
        )  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SsdPool]:
    base: Path = tmp_path_factory.mktemp("device")
    pool = SsdPool(base)
    yield pool
    pool.end()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(128 << 20) as device:
        yield device


@pytest.fixture(params=["shm", "tcp", "rdma-cma"])
def client(pool: SsdPool, device: FakeDevice, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(pool.address, transport=request.param, transfer_deadline_ms=20_000) as client:
        yield client


class Paged:
    """KV memory of an engine on the device: a tensor a layer, in it K of all blocks and V of all blocks."""

    def __init__(self, client: Client, device: FakeDevice, ns: PoolNamespace, count: int) -> None:
        self.layers = [device.empty((PARTS, count, PIECE)) for _ in range(LAYERS)]
        self.region = client.register(list(self.layers))
        table = np.empty((count, LAYERS, PARTS, 2), np.int64)
        for layer, array in enumerate(self.layers):
            pages = array.address - self.region.address + np.arange(PARTS * count, dtype=np.int64) * PIECE
            table[:, layer, :, 0] = pages.reshape(PARTS, count).T
        table[..., 1] = PIECE
        self.blocks: BlockView = self.region.view(ns, table.reshape(count, LAYERS * PARTS, 2))

    def fill(self, rows: npt.NDArray[np.uint8]) -> None:
        cut = rows.reshape(len(rows), LAYERS, PARTS, PIECE)
        for layer, array in enumerate(self.layers):
            array.shadow[:, : len(rows)] = cut[:, layer].transpose(1, 0, 2)

    def rows(self, count: int) -> npt.NDArray[np.uint8]:
        stacked = np.stack([array.shadow[:, :count] for array in self.layers])  # layer, part, block, bytes
        return np.ascontiguousarray(stacked.transpose(2, 0, 1, 3)).reshape(count, SIZE)


def opened(client: Client, name: str) -> PoolNamespace:
    return client.namespace(f"{name}-{client._choice.spec}", block_bytes=SIZE, block_tokens=16)


def test_pages_on_the_device_are_stored_and_come_back(client: Client, device: FakeDevice) -> None:
    ns, hashes = opened(client, "pages"), keys(48, "pages")
    data = payload(hashes, "", SIZE)
    source, target = Paged(client, device, ns, 48), Paged(client, device, ns, 50)
    source.fill(data)
    stored = client.store(ns, "", hashes, source.blocks)
    assert stored.stored.all(), stored.reasons
    loaded = client.load(ns, "", hashes, target.blocks[2:])
    assert loaded.loaded.all(), loaded.reasons
    assert (target.rows(50)[2:] == data).all() and not target.rows(2).any()
    report = client.health()
    assert report["healthy"], report["problems"]
    staging = report["staging"]["cuda:0"]  # type: ignore[index]
    assert (staging["in_use"], staging["held"], staging["failures"]) == (0, 0, 0)
    assert staging["idle_bytes"] <= 4 * staging["chunk_bytes"]


def test_what_one_writes_from_a_device_another_reads_into_host_memory(client: Client, device: FakeDevice) -> None:
    ns, hashes = opened(client, "mixed"), keys(16, "mixed")
    data = payload(hashes, "", SIZE)
    rows = client.register(device.array(data)).rows(ns)
    assert client.store(ns, "", hashes, rows).stored.all()
    into = np.zeros((16, SIZE), np.uint8)
    assert client.load(ns, "", hashes, client.register(into).rows(ns)).loaded.all()
    assert (into == data).all()


def test_a_hole_is_a_miss_and_its_pages_are_untouched(client: Client, device: FakeDevice) -> None:
    ns, hashes = opened(client, "hole"), keys(6, "hole")
    data = payload(hashes, "", SIZE)
    rows = client.register(device.array(data)).rows(ns)
    assert client.store(ns, "", hashes[:32], rows[:2]).stored.all()
    assert client.store(ns, "", hashes[48:], rows[3:], parent=hashes[32:48], first_index=3).stored.all()
    target = Paged(client, device, ns, 6)
    assert client.load(ns, "", hashes, target.blocks).loaded.tolist() == [True, True, False, True, True, True]
    assert not target.rows(6)[2].any() and (np.delete(target.rows(6), 2, 0) == np.delete(data, 2, 0)).all()


def test_layers_are_told_of_when_they_are_on_the_device(client: Client, device: FakeDevice) -> None:
    ns, hashes = opened(client, "layers"), keys(96, "layers")  # more than one chunk
    data = payload(hashes, "", SIZE)
    assert client.store(ns, "", hashes, client.register(device.array(data)).rows(ns)).stored.all()
    until(lambda: client.lookup(ns, "", hashes).hit_blocks == 96)  # most of it is on SSD by now
    target = Paged(client, device, ns, 96)
    ends = [(layer + 1) * PARTS * PIECE for layer in range(LAYERS)]
    told = []

    def landed(layer: int, mask: npt.NDArray[np.bool_]) -> None:
        pages = target.layers[layer].shadow.transpose(1, 0, 2).reshape(96, -1)
        expected = data[:, layer * PARTS * PIECE : ends[layer]]
        told.append((layer, bool(mask.all()), bool((pages == expected)[mask].all())))

    result = client.load(ns, "", hashes, target.blocks, parts=ends, landed=landed)
    assert result.loaded.all(), (result.reasons, result.by_tier(), told)
    assert told == [(layer, True, True) for layer in range(LAYERS)]


def test_blocks_on_ssd_only_come_to_the_pages_of_a_device(client: Client, device: FakeDevice) -> None:
    ns, count = opened(client, "ssd"), 160
    hashes = keys(count, "ssd")
    data = payload(hashes, "", SIZE)
    rows = client.register(device.array(data)).rows(ns)
    for low in range(0, count, 20):
        part = hashes[16 * low : 16 * (low + 20)]
        stored = client.store(ns, "", part, rows[low : low + 20], hashes[16 * low - 16 : 16 * low] or None, low)
        assert stored.stored.all() and stored.durable.all(), (low, stored.reasons)
    until(lambda: client.lookup(ns, "", hashes).hit_blocks == count)
    on_ssd = client.lookup(ns, "", hashes).tiers == Tier.SSD
    assert on_ssd.sum() >= count - DRAM_BLOCKS
    target = Paged(client, device, ns, count)
    result = client.load(ns, "", hashes, target.blocks)
    assert result.loaded.all(), result.reasons
    assert (target.rows(count) == data).all()
    assert (result.tiers[on_ssd] == Tier.SSD).sum() >= count - DRAM_BLOCKS, result.by_tier()


def test_a_node_on_this_host_maps_what_stores_are_gathered_into(pool: SsdPool, device: FakeDevice) -> None:
    with Client(pool.address, transport="shm") as client:
        ns, hashes = opened(client, "map"), keys(4, "map")
        rows = client.register(device.array(payload(hashes, "", SIZE))).rows(ns)
        assert client.store(ns, "", hashes, rows).stored.all()
        (known,) = client._peers.all()
        assert set(known.peer.inner._methods.values()) == {"map"}  # type: ignore[union-attr]


def test_what_is_registered_is_counted_and_forgotten(client: Client, device: FakeDevice) -> None:
    ns = opened(client, "regions")
    array = device.empty((4, SIZE))
    region = client.register(array)
    assert (region.address, region.nbytes, region.memory.spelled()) == (array.address, 4 * SIZE, "cuda:0")
    client.register(np.zeros(100, np.uint8))
    assert client.health()["regions"] == {"count": 2, "bytes": 4 * SIZE + 100, "device_bytes": {"cuda:0": 4 * SIZE}}
    with pytest.raises(InvalidArgument, match="no bytes that the host can read"):
        _ = region.bytes
    client.unregister(region)
    assert client.health()["regions"]["device_bytes"] == {}  # type: ignore[index]
    with pytest.raises(Closed):
        client.load(ns, "", keys(4), region.rows(ns))


def test_several_allocations_are_one_region_of_which_only_they_can_be_named(client: Client, device: FakeDevice) -> None:
    ns = opened(client, "span")
    first, second = device.empty(SIZE), device.empty(SIZE)
    region = client.register([second, first])
    assert region.extents == ((first.address, SIZE), (second.address, SIZE))
    gap = second.address - first.address
    assert client.health()["regions"]["bytes"] == 2 * SIZE  # type: ignore[index]
    region.view(ns, [[[gap, SIZE]], [[0, SIZE]]])
    with pytest.raises(InvalidArgument, match="none of the region's 2 allocations"):
        region.view(ns, [[[gap - 4096, SIZE]]])
    with pytest.raises(InvalidArgument, match=r"region\.view"):
        region.rows(ns)
    with pytest.raises(InvalidArgument, match="same device"):
        client.register([first, np.zeros(16, np.uint8)])


def test_memory_that_a_device_only_reads_is_not_loaded_into(client: Client, device: FakeDevice) -> None:
    ns, array = opened(client, "constant"), device.empty((1, SIZE))
    array.writable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        client.load(ns, "", keys(1), client.register(array).rows(ns))


def test_what_its_producer_has_queued_comes_before_what_is_stored(pool: SsdPool, device: FakeDevice) -> None:
    with Client(pool.address, transfer_deadline_ms=20_000) as client:
        ns, hashes = opened(client, "stream"), keys(2, "stream")
        data = payload(hashes, "", SIZE)
        stream, array = device.stream(), device.empty((2, SIZE))
        stream.queue(lambda: np.copyto(array.shadow, data))
        array.stream = stream
        rows = client.register(array).rows(ns)
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(client.store, ns, "", hashes, rows)
            stream.run()
            assert future.result(30).stored.all()
        into = np.zeros((2, SIZE), np.uint8)
        assert client.load(ns, "", hashes, client.register(into).rows(ns)).loaded.all()
        assert (into == data).all()


def test_a_node_killed_under_a_load_costs_misses_and_leaves_no_chunk_behind(device: FakeDevice, tmp_path: Path) -> None:
    pool, count = RealPool(tmp_path), 200  # 50 MiB: four chunks, of which two are in flight
    try:
        with Client(pool.address, transport="tcp", transfer_deadline_ms=5_000) as client:
            ns, hashes = opened(client, "killed"), keys(count, "killed")
            data = payload(hashes, "", SIZE)
            assert client.store(ns, "", hashes, client.register(data).rows(ns)).stored.all()
            target: FakeArray = device.empty((count, SIZE))
            into = client.register(target).rows(ns)
            with ThreadPoolExecutor(1) as threads:
                with device.runtime.hold("scatter"):
                    future = threads.submit(client.load, ns, "", hashes, into)
                    device.runtime.wait_held("scatter")
                    pool.node().signal(signal.SIGKILL)
                result = future.result(30)
            assert not result.loaded.all() and set(result.reasons) <= {"loaded", "node_lost", "missing", "late"}
            assert (target.shadow[result.loaded] == data[result.loaded]).all()
            staging = client.health()["staging"]["cuda:0"]  # type: ignore[index]
            assert (staging["in_use"], staging["held"], staging["lost"]) == (0, 0, 0)
    finally:
        pool.end()
