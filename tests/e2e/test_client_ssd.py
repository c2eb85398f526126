"""What a client sees of a node with an SSD tier: where blocks came from, what is durable, prefetch, hints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace, Tier
from kvstrata.client.admin import AdminClient
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.waiting import until

SIZE = 256 << 10
DRAM_BLOCKS = 64  # 16 MiB
COUNT = 160


class SsdPool(RealPool):
    """One node with 16 MiB of memory and 64 MiB of SSD; every store is written through."""

    def start_node(self, index: int) -> None:
        name = f"node{index}"
        self.daemons[name] = Daemon(
            "storage", "--master", self.address, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
            "--data", str(self._base / name), "--dram", "16MiB",
            "--ssd", f"{self._base / 'ssd'}=64MiB", "--ssd-policy", "write-through",
            log=self._base / f"{name}.log",
        )  # fmt: skip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SsdPool]:
    base: Path = tmp_path_factory.mktemp("ssd")
    (base / "ssd").mkdir()
    pool = SsdPool(base)
    yield pool
    pool.end()


@pytest.fixture(params=["shm", "tcp"])
def client(pool: SsdPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(pool.address, transport=request.param, transfer_deadline_ms=20_000, verify="always") as client:
        yield client


class Chains:
    """More blocks than fit memory, stored as chains of 20; the oldest are on SSD only."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.ns: PoolNamespace = client.namespace(name, block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(COUNT, name)
        self.data = payload(self.hashes, "", SIZE)
        rows = client.register(self.data).rows(self.ns)
        self.durable = []
        for low in range(0, COUNT, 20):
            part = slice(low, low + 20)
            packed = self.hashes[16 * low : 16 * (low + 20)]
            stored = client.store(self.ns, "", packed, rows[part])
            assert stored.stored.all(), (low, stored.reasons)
            self.durable += stored.durable.tolist()
        until(lambda: client.lookup(self.ns, "", self.hashes).hit_blocks == COUNT)

    def load(self, count: int) -> np.ndarray:
        """The tiers that the first ``count`` came from; every byte is compared."""
        into = np.zeros((count, SIZE), np.uint8)
        result = self.client.load(self.ns, "", self.hashes[: 16 * count], self.client.register(into).rows(self.ns))
        assert result.loaded.all(), result.reasons
        assert (into == self.data[:count]).all()
        return result.tiers


def test_what_left_memory_is_durable_and_comes_back_from_ssd(client: Client) -> None:
    at = Chains(client, f"back-{client._choice.spec}")
    assert all(at.durable), "written through: the store has waited for the flush"
    tiers = client.lookup(at.ns, "", at.hashes).tiers
    assert (tiers == Tier.SSD).sum() >= COUNT - DRAM_BLOCKS
    came_from = at.load(COUNT)
    assert (came_from == Tier.SSD).sum() >= COUNT - DRAM_BLOCKS, came_from.tolist()


def test_prefetched_blocks_are_in_memory_when_it_has_ended(client: Client) -> None:
    at = Chains(client, f"ahead-{client._choice.spec}")
    wanted = at.hashes[: 16 * 8]
    assert (client.lookup(at.ns, "", wanted).tiers == Tier.SSD).all()
    found = client.prefetch(at.ns, "", wanted).wait()
    assert found is not None and found.hit_blocks == 8
    until(lambda: bool((client.lookup(at.ns, "", wanted).tiers == Tier.DRAM).all()))
    assert (at.load(8) == Tier.DRAM).all()


def test_a_kept_prefix_outlives_what_comes_after_it(client: Client) -> None:
    at = Chains(client, f"keep-{client._choice.spec}")
    mine = at.hashes[-16 * 4 :]
    assert client.keep(at.ns, "", mine, 600) >= 4
    more = keys(COUNT, "flood")
    rows = client.register(payload(more, "", SIZE)).rows(at.ns)
    for low in range(0, COUNT, 40):
        client.store(at.ns, "", more[16 * low : 16 * (low + 40)], rows[low : low + 40])

    def settled() -> bool:
        return bool((client.lookup(at.ns, "", mine).tiers == Tier.DRAM).all())

    until(settled)
    client.forget(at.ns, "", mine)


def test_the_admin_client_sees_both_tiers(pool: SsdPool) -> None:
    with AdminClient(pool.address) as admin:
        until(lambda: admin.nodes()[0].status.ssd_bytes_used > 0)
        row = admin.nodes()[0]
        assert row.ssd_bytes and [device.state for device in row.status.devices] == ["serving"]
