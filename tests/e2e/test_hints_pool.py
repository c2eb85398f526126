"""Hints on real processes: an agent's prefix through its think time, and what a hint cannot do to others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.client import Client, Tier
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from tests.e2e.tiered_pool import BLOCK_BYTES, DRAM_SLOT, SSD_SLOT, Tenant, TieredPool
from tests.waiting import until

#: Blocks of the tenant's share of memory, and of the agent's prefix.
SHARE, PREFIX = 64, 24


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    pool = TieredPool(tmp_path_factory.mktemp("pool"), dram="8MiB", ssd="16MiB")
    yield pool
    pool.end()


@pytest.fixture
def client(pool: TieredPool) -> Iterator[Client]:
    with Client(pool.address, transfer_deadline_ms=10_000) as client:
        yield client


def limited(pool: TieredPool, salt: str, blocks: int, floor: int = 0) -> None:
    policy = control.TenantPolicy(
        salt=salt, dram_limit=blocks * DRAM_SLOT, ssd_limit=blocks * SSD_SLOT, dram_floor=floor * DRAM_SLOT
    )
    with AdminClient(pool.address) as admin:
        admin.set_tenant(policy)
    until(lambda: pool.tenants(0, salt)[0]["dram_limit"] == blocks * DRAM_SLOT)


def pressure(client: Client, agent: Tenant, blocks: int) -> None:
    """Other prefixes of the same tenant."""
    rng = np.random.default_rng(7)
    rows = client.register(np.zeros((16, BLOCK_BYTES), np.uint8)).rows(agent.ns)
    for _ in range(blocks // 16):
        assert client.store(agent.ns, agent.salt, rng.bytes(16 * 16), rows).stored.all()


@pytest.mark.parametrize("kept", [True, False])
def test_a_prefix_survives_its_think_time_under_its_own_tenants_pressure(
    pool: TieredPool, client: Client, kept: bool
) -> None:
    salt = f"agent-{kept}"
    limited(pool, salt, SHARE)
    agent = Tenant(client, salt, PREFIX).stored()
    if kept:
        assert client.keep(agent.ns, salt, agent.hashes, 600) >= PREFIX
    pressure(client, agent, 10 * SHARE)
    got = agent.load()
    row = pool.tenants(0, salt)[0]
    assert row["dram_bytes"] <= SHARE * DRAM_SLOT and row["ssd_bytes"] <= SHARE * SSD_SLOT
    if not kept:
        assert not got.loaded.any(), "there was no pressure: this shows nothing"
        return
    assert got.loaded.all() and (got.tiers == Tier.DRAM).all(), got.reasons
    assert client.forget(agent.ns, salt, agent.hashes) >= PREFIX
    pressure(client, agent, 10 * SHARE)
    assert not agent.load().loaded.any(), "nothing is kept for ever"


def test_a_keep_takes_nothing_from_another_tenant(pool: TieredPool, client: Client) -> None:
    """One that keeps all it stores has what it would have without: its own share, and others theirs."""
    limited(pool, "modest", SHARE, floor=SHARE)
    limited(pool, "greedy", SHARE)
    modest = Tenant(client, "modest", SHARE).stored()
    greedy = [Tenant(client, "greedy", 32, chain=f"{number}") for number in range(12)]
    for chain in greedy:
        assert chain.store().stored.all(), "what it keeps is its own trouble, and no reason to refuse it"
        client.keep(chain.ns, "greedy", chain.hashes, 600)
        assert pool.tenants(0, "greedy")[0]["dram_bytes"] <= SHARE * DRAM_SLOT
    got = modest.load()
    assert got.loaded.all() and (got.tiers == Tier.DRAM).all()
    other = Tenant(client, "unlimited", 200)
    assert other.store().stored.all(), "a keep is no claim on a node's room"


def test_dropped_ones_leave_first_and_can_be_read_until_then(pool: TieredPool, client: Client) -> None:
    limited(pool, "dropper", SHARE)
    old = Tenant(client, "dropper", 16, chain="old").stored()
    done = Tenant(client, "dropper", 32, chain="done").stored()
    assert client.drop(done.ns, "dropper", done.hashes) >= 32
    assert done.load().loaded.all()
    client.drop(done.ns, "dropper", done.hashes)
    pressure(client, old, 32)
    assert old.load().loaded.all(), "older, and still wanted"
    assert done.load().loaded.sum() <= 16
