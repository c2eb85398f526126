"""Epochs, drops and explanations on real processes: what an operator orders is so for every reader and writer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.client.client import PoolNamespace
from kvstrata.proto.errors import FingerprintMismatch
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

SIZE = 64 << 10
COUNT = 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("pool"), nodes=2)
    yield pool
    pool.end()


@pytest.fixture
def client(pool: RealPool) -> Iterator[Client]:
    with Client(pool.address, verify="always") as client:
        yield client


@pytest.fixture
def admin(pool: RealPool) -> Iterator[AdminClient]:
    with AdminClient(pool.address) as admin:
        yield admin


def opened(client: Client, group: str) -> PoolNamespace:
    return client.namespace(group, block_bytes=SIZE, block_tokens=16)


def stored(client: Client, ns: PoolNamespace, salt: str, hashes: bytes) -> None:
    data = payload(hashes, salt, SIZE)
    assert client.store(ns, salt, hashes, client.register(data.reshape(-1)).rows(ns)).stored.all()
    until(lambda: client.lookup(ns, salt, hashes).hit_blocks == COUNT)


def loaded(client: Client, ns: PoolNamespace, salt: str, hashes: bytes) -> int:
    """Blocks that came back, right."""
    into = np.zeros((COUNT, SIZE), np.uint8)
    mask = client.load(ns, salt, hashes, client.register(into.reshape(-1)).rows(ns)).loaded
    assert (into[mask] == payload(hashes, salt, SIZE)[mask]).all()
    return int(mask.sum())


def test_after_a_bump_nothing_older_is_read_or_written_by_anyone(client: Client, admin: AdminClient) -> None:
    ns, hashes = opened(client, "bumped"), keys(COUNT, "bumped")
    stored(client, ns, "t", hashes)
    bumped = admin.bump_epoch("bumped")
    assert (bumped.epoch, bumped.blocks, list(bumped.unreached)) == (1, COUNT, [])
    assert client.lookup(ns, "t", hashes).hit_blocks == 0
    assert loaded(client, ns, "t", hashes) == 0, "the nodes give it to nobody, whatever a reader remembers"
    assert admin.explain(block_hash=hashes[:16], group="bumped", salt="t").verdict == "epoch"
    with pytest.raises(FingerprintMismatch, match="open the namespace again"):
        client.store(ns, "t", hashes, client.register(payload(hashes, "t", SIZE).reshape(-1)).rows(ns))
    with Client(admin.address) as fresh:
        again = opened(fresh, "bumped")
        stored(fresh, again, "t", hashes)
        assert loaded(fresh, again, "t", hashes) == COUNT


def test_a_dropped_tenant_is_gone_and_others_are_not(client: Client, admin: AdminClient) -> None:
    ns, hashes = opened(client, "dropped"), keys(COUNT, "dropped")
    for salt in ("gone", "stays"):
        stored(client, ns, salt, hashes)
    assert admin.list_blocks("dropped", "gone").total == COUNT
    dropped = admin.drop(salt="gone")
    assert (dropped.blocks, list(dropped.unreached)) == (COUNT, [])
    assert client.lookup(ns, "gone", hashes).hit_blocks == loaded(client, ns, "gone", hashes) == 0
    assert loaded(client, ns, "stays", hashes) == COUNT
    told = admin.explain(block_hash=hashes[:16], group="dropped", salt="gone")
    assert told.verdict == "dropped" and list(told.elsewhere) == ["tenant 'stays' in namespace 'dropped'"]
    stored(client, ns, "gone", hashes)
    assert loaded(client, ns, "gone", hashes) == COUNT


def test_a_request_is_explained_by_its_name(client: Client, admin: AdminClient) -> None:
    ns, hashes = opened(client, "asked"), keys(COUNT, "asked")
    stored(client, ns, "t", hashes)
    client.remove(ns, "t", hashes[16 * 5 : 16 * 6])
    assert client.lookup(ns, "t", hashes, request="req-1").hit_blocks == 5
    told = admin.explain(request="req-1")
    assert (told.verdict, told.asked, told.hit, told.hash) == ("removed", COUNT, 5, hashes[16 * 5 : 16 * 6])
