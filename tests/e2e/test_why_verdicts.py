"""Each verdict of ``why``, from a pool of real processes, and the sums of its counters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.client import Client, Tier
from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
from tests.e2e.real_pool import keys
from tests.e2e.tiered_pool import BLOCK_BYTES, DRAM_SLOT, SSD_SLOT, Tenant, TieredPool
from tests.waiting import until


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredPool]:
    pool = TieredPool(tmp_path_factory.mktemp("pool"), nodes=2, ssd="16MiB")
    yield pool
    pool.end()


@pytest.fixture
def client(pool: TieredPool) -> Iterator[Client]:
    with Client(pool.address, transfer_deadline_ms=10_000) as client:
        yield client


@pytest.fixture
def admin(pool: TieredPool) -> Iterator[AdminClient]:
    with AdminClient(pool.address) as admin:
        yield admin


def first(tenant: Tenant) -> bytes:
    return tenant.hashes[:16]


def verdict_of(admin: AdminClient, tenant: Tenant, group: str = "model/t") -> control.Explanation:
    return admin.explain(block_hash=first(tenant), group=group, salt=tenant.salt)


def test_what_was_never_stored_and_what_is_past_the_last_whole_block(client: Client, admin: AdminClient) -> None:
    never = Tenant(client, "never", 4)
    never.lookup("never-1")
    assert admin.explain(request="never-1").verdict == verdict_of(admin, never).verdict == "never_stored"
    whole = Tenant(client, "whole", 4).stored()
    whole.lookup("whole-1")
    told = admin.explain(request="whole-1")
    assert (told.verdict, told.asked, told.hit) == ("partial_block", 4, 4)


def test_another_tenant_or_another_fingerprint_has_it(client: Client, admin: AdminClient) -> None:
    Tenant(client, "has-it", 2, chain="shared").stored()
    stranger = Tenant(client, "has-not", 2)
    stranger.hashes = keys(2, "has-it/shared")
    stranger.lookup("salt-1")
    told = admin.explain(request="salt-1")
    assert told.verdict == "other_salt" and "has-it" in told.elsewhere[0]
    other = Tenant(client, "has-it", 2, group="model/other-layout")
    other.hashes = stranger.hashes
    other.lookup("print-1")
    told = admin.explain(request="print-1")
    assert told.verdict == "other_fingerprint" and "model/t" in told.elsewhere[0]


def test_an_eviction_names_its_rule_its_time_and_whose_quota_it_was(client: Client, admin: AdminClient) -> None:
    admin.set_tenant(control.TenantPolicy(salt="small", dram_limit=16 * DRAM_SLOT, ssd_limit=16 * SSD_SLOT))
    before = Tenant(client, "small", 12, chain="before").stored()
    Tenant(client, "small", 16, chain="after").store()
    until(lambda: before.lookup("small-1").hit_blocks == 0)
    told = admin.explain(request="small-1")
    assert told.verdict == "evicted_quota"
    assert " s ago at node node-" in told.text and "for tenant 'small'" in told.text, told.text
    admin.set_tenant(control.TenantPolicy(salt="lower", dram_limit=16 * DRAM_SLOT, ssd_limit=16 * SSD_SLOT))
    lower = Tenant(client, "lower", 12).stored()
    admin.set_tenant(control.TenantPolicy(salt="lower", dram_limit=0, ssd_limit=0))
    until(lambda: lower.lookup("lower-1").hit_blocks == 0)
    assert admin.explain(request="lower-1").verdict == "lowered"


def test_a_block_that_had_to_make_room_says_for_whom(client: Client, admin: AdminClient) -> None:
    guest = Tenant(client, "guest", 16).stored()
    rows = client.register(np.zeros((128, BLOCK_BYTES), np.uint8)).rows(guest.ns)
    rng = np.random.default_rng(3)

    def gone() -> bool:
        client.store(guest.ns, "guest", rng.bytes(16 * 128), rows)  # its own: others could not take so little
        return guest.lookup("guest-1").hit_blocks == 0

    until(gone, 60)
    told = admin.explain(request="guest-1")
    assert told.verdict == "evicted_room" and "for tenant 'guest'" in told.text, told.text


def test_removed_dropped_and_of_past_weights(client: Client, admin: AdminClient) -> None:
    removed = Tenant(client, "removed", 2).stored()
    client.remove(removed.ns, removed.salt, removed.hashes)
    dropped = Tenant(client, "dropped", 2).stored()
    admin.drop(salt="dropped")
    old = Tenant(client, "old", 2, group="model/old").stored()
    admin.bump_epoch("model/old")
    for tenant, group, verdict in (
        (removed, "model/t", "removed"),
        (dropped, "model/t", "dropped"),
        (old, "model/old", "epoch"),
    ):
        tenant.lookup(f"{verdict}-1")
        assert admin.explain(request=f"{verdict}-1").verdict == verdict_of(admin, tenant, group).verdict == verdict


def test_refused_at_the_store(client: Client, admin: AdminClient) -> None:
    admin.set_tenant(control.TenantPolicy(salt="none", dram_limit=0, ssd_limit=0))
    refused = Tenant(client, "none", 2)
    until(lambda: set(refused.store().reasons) == {"quota"})
    refused.lookup("none-1")
    assert verdict_of(admin, refused).verdict == "refused_at_store"


def test_in_flight(client: Client, admin: AdminClient, pool: TieredPool) -> None:
    coming = Tenant(client, "coming", 2)
    wire = Connection.open(pool.address, Identity.new(), silence_s=5.0)
    spec = Namespace("model/t", BLOCK_BYTES, 16).to_spec()
    opened = wire.call(Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=spec).SerializeToString())
    handle = expect(pb.NamespaceHandle, opened, Kind.NAMESPACE_HANDLE)
    place = pb.Place(ns=handle.handle, salt="coming", hashes=coming.hashes, epoch=handle.epoch)
    wire.call(Kind.PLACE, place.SerializeToString())
    coming.lookup("coming-1")
    assert admin.explain(request="coming-1").verdict == verdict_of(admin, coming).verdict == "in_flight"
    wire.close()


def test_a_load_that_failed(client: Client, admin: AdminClient) -> None:
    failed = Tenant(client, "failed", 4).stored()
    failed.lookup("failed-1")
    with Client(admin.address, transport="tcp+faults:evict=1") as unlucky:
        reader = Tenant(unlucky, "failed", 4)
        assert reader.lookup("failed-2").hit_blocks == 4
        assert not reader.load().loaded.any()
    until(lambda: admin.explain(request="failed-2").verdict == "load_failed")


def test_blocks_asked_are_hits_and_misses_on_the_master_and_on_the_nodes(
    client: Client, admin: AdminClient, pool: TieredPool
) -> None:
    """Every block once, whatever became of it; the client's count is what the node's must add up to."""
    here = Tenant(client, "sum", 24, chain="here").stored()
    rows = [lambda node=node: pool.tenants(node, "sum")[0] for node in range(2)]
    until(lambda: sum(int(row()["ssd_bytes"]) for row in rows) == here.count * SSD_SLOT)
    home = next(row for row in rows if row()["ssd_bytes"])
    admin.set_tenant(control.TenantPolicy(salt="sum", dram_limit=8 * DRAM_SLOT))  # the others are on SSD only
    # What is this little lives on one node: it may take a report for that to be known to be the one with the blocks.
    until(lambda: here.load().loaded.any() and home()["dram_limit"] == 8 * DRAM_SLOT)
    until(lambda: sum(int(pool.tenants(node, "sum")[0]["dram_bytes"]) for node in range(2)) <= 8 * DRAM_SLOT)
    asked_before, node_before, promoted_before = _master(pool), _nodes(pool), _promoted(pool)
    absent = Tenant(client, "sum", 9, chain="absent")
    one = Tenant(client, "sum", 1, chain="here")
    one.hashes, one.data = here.hashes[-16:], here.data[-1:]
    looked = loaded = tiers = 0
    for tenant in (here, absent, here):
        tenant.lookup()
        looked += tenant.count
    for part in (one, here, one):
        got = part.load()
        loaded += int(got.loaded.sum())
        tiers += int((got.tiers == Tier.SSD).sum())
    assert tiers, "the deepest block was on SSD only"
    after = _master(pool)
    polled = after["asked"] - asked_before["asked"]
    assert polled >= looked
    assert polled == (after["hits"] - asked_before["hits"]) + (after["misses"] - asked_before["misses"])
    assert after["misses"] - asked_before["misses"] >= absent.count
    node_after = _nodes(pool)
    read = {name: node_after.get(name, 0) - node_before.get(name, 0) for name in node_after}
    assert read["hit_dram"] + read["hit_ssd"] == loaded, read
    # A block that the load itself has had read ahead may be in memory when it is acquired: SSD to the client, whose
    # load it was, memory to the node. Whatever the client calls SSD was read from there.
    assert read["hit_ssd"] <= tiers <= _promoted(pool) - promoted_before, read
    asked = sum(pool.health(index)["counts"]["blocks_asked"] for index in range(2))
    assert sum(node_after.values()) == asked, node_after


def _master(pool: TieredPool) -> dict[str, float]:
    rows = pool.metrics("master")
    return {
        "asked": rows["kvstrata_master_blocks_asked_total", ""],
        "hits": sum(v for (name, _), v in rows.items() if name == "kvstrata_master_block_hits_total"),
        "misses": sum(v for (name, _), v in rows.items() if name == "kvstrata_master_block_misses_total"),
    }


def _promoted(pool: TieredPool) -> float:
    return sum(pool.metrics(f"node{index}")["kvstrata_node_promoted_total", ""] for index in range(2))


def _nodes(pool: TieredPool) -> dict[str, float]:
    total: dict[str, float] = {}
    for index in range(2):
        for (name, label), value in pool.metrics(f"node{index}").items():
            if name == "kvstrata_node_read_blocks_total":
                total[label] = total.get(label, 0) + value
    return total


def test_what_a_lost_node_had(client: Client, admin: AdminClient, pool: TieredPool) -> None:
    """The last of this file: it costs the pool a node, for good."""
    tenants = [Tenant(client, f"lost-{number}", 4).stored() for number in range(6)]
    where = [admin.list_blocks("model/t", tenant.salt).blocks[0].where[0] for tenant in tenants]
    node_id = where[0].split("/")[0]
    pool.node_named(node_id).end()
    lost = tenants[0]
    until(lambda: lost.lookup("lost-1").hit_blocks == 0, 20)
    until(lambda: verdict_of(admin, lost).verdict == "node_lost", 20)
    lost.lookup("lost-2")
    assert admin.explain(request="lost-2").verdict == "node_lost"
