"""Two shards of one model on a real pool: what one of them loses to eviction, the other gives up first."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.client import Client
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

SIZE = 64 << 10
COUNT = 16
#: 64 MiB of memory.
FLOOD = 1100
STEP = 8


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    one = RealPool(tmp_path)
    yield one
    one.end()


def counted(pool: RealPool, name: str) -> int:
    with urllib.request.urlopen(f"http://{pool.node().ready['http']}/healthz", timeout=5) as answer:
        return int(json.loads(answer.read())["counts"][name])


def test_sisters_of_what_was_evicted_leave_before_others(pool: RealPool) -> None:
    """The tails of both shards leave, and the heads of both stay: of use to somebody."""
    with Client(pool.address, transfer_deadline_ms=20_000) as client:
        shards = [client.namespace("model", block_bytes=SIZE, block_tokens=16, shard=n, shard_count=2) for n in (0, 1)]
        hashes = keys(COUNT, "sharded")
        for space in shards:
            rows = client.register(payload(hashes, str(space), SIZE)).rows(space)
            assert client.store(space, "", hashes, rows).stored.all()
        other = client.namespace("other", block_bytes=SIZE, block_tokens=16)
        flood = keys(FLOOD, "flood")
        rows = client.register(payload(flood, "", SIZE)).rows(other)
        at = 0

        def store(count: int) -> None:
            nonlocal at
            part = slice(at, at + count)
            assert client.store(other, "", flood[16 * at : 16 * (at + count)], rows[part]).stored.all()
            at += count

        until(lambda: client.lookup(shards[0], "", hashes).hit_blocks == COUNT)
        for _ in range(14):
            store(64)
        assert not counted(pool, "evicted")
        while not counted(pool, "evicted"):
            store(STEP)
        gone = counted(pool, "evicted")
        assert gone <= STEP
        until(lambda: counted(pool, "orphaned") == gone)
        store(gone)
        assert counted(pool, "evicted") == 2 * gone
        for space in shards:
            until(lambda space=space: client.lookup(space, "", hashes).hit_blocks == COUNT - gone)  # type: ignore[misc]
