"""A node whose process stands still: its heartbeat process goes on, so it is suspected and never forgotten."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

#: Longer than the ten seconds after which a silent node is offline; the long tier stops it as long as is promised.
STOPPED_S = [
    pytest.param(12.0, marks=pytest.mark.slow),
    pytest.param(60.0, marks=[pytest.mark.long, pytest.mark.timeout(180)]),
]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path, nodes=1)
    yield pool
    pool.end()


@pytest.mark.parametrize("stopped_s", STOPPED_S)
def test_a_node_that_stands_still_for_long_keeps_its_blocks(pool: RealPool, stopped_s: float) -> None:
    with Client(pool.address, verify="always") as client, AdminClient(pool.address) as admin:
        ns = client.namespace("model/s", block_bytes=4096, block_tokens=16)
        hashes = keys(80, "stopped")
        data = payload(hashes, "", 4096)
        rows = client.register(data).rows(ns)
        until(lambda: client.store(ns, "", hashes, rows).stored.all())
        until(lambda: client.lookup(ns, "", hashes).hit_blocks == 80)
        states: set[str] = set()
        pool.node().signal(signal.SIGSTOP)
        try:
            ends = time.monotonic() + stopped_s
            while time.monotonic() < ends:
                states.add(admin.nodes()[0].state)
                assert not client.load(ns, "", hashes, rows).loaded.any()
                time.sleep(0.2)
        finally:
            pool.node().signal(signal.SIGCONT)
        assert "suspected" in states and "offline" not in states
        until(lambda: admin.nodes()[0].state == "active")
        into = np.zeros_like(data)
        target = client.register(into).rows(ns)
        until(lambda: client.load(ns, "", hashes, target).loaded.all())
        assert (into == data).all()
