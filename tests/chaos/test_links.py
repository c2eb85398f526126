"""Links between hosts that drop everything, or are slow: who is affected, by how much, and who is not at all."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client, LoadResult
from kvstrata.transfer.connection import SILENCE_S
from tests.chaos import hosts
from tests.chaos.cluster import Cluster
from tests.e2e.real_pool import keys, payload
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "hosts work")

SIZE = 4096
#: Blocks on each node, stored by a client that knows only that node's keys apart.
COUNT = 64
#: Silence costs 250 ms, a connection that is not answered as much again; the rest is for a shared machine.
BOUND_S = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("links"), nodes=2, hosts=True) as cluster:
        yield cluster


class Chain:
    """Blocks that all lie on one node."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.ns = client.namespace("model/links", block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(COUNT, name)
        self.data = payload(self.hashes, "", SIZE)
        self._into = np.zeros_like(self.data)
        self._rows = client.register(self._into).rows(self.ns)
        source = client.register(self.data.copy()).rows(self.ns)
        until(lambda: client.store(self.ns, "", self.hashes, source).stored.all())
        until(lambda: client.lookup(self.ns, "", self.hashes).hit_blocks == COUNT)

    def load(self) -> tuple[LoadResult, float]:
        self._into[:] = 0
        began = time.monotonic()
        result = self._client.load(self.ns, "", self.hashes, self._rows)
        took_s = time.monotonic() - began
        assert (self._into[result.loaded] == self.data[result.loaded]).all(), "wrong bytes"
        return result, took_s


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.masters, transport="tcp", verify="always") as client:
        yield client


def chains(cluster: Cluster, client: Client, tag: str) -> dict[str, Chain]:
    """A chain on each node, by the node's name."""
    found: dict[str, Chain] = {}
    by_id = {str(cluster.daemon(name).ready["node_id"]): name for name in cluster.names("node")}
    for number in range(400):  # one that has just joined gets a twentieth of what is placed
        if len(found) == len(by_id):
            for chain in found.values():  # the client remembers where the newest few are
                assert client.lookup(chain.ns, "", chain.hashes).hit_blocks == COUNT
            return found
        chain = Chain(client, f"{tag}/{number}")
        with cluster.admin() as admin:
            rows = {row.node_id: row for row in admin.nodes()}
        holder = _holder(client, chain)
        assert holder in rows
        found.setdefault(by_id[holder], chain)
    raise AssertionError("placement never used one of the nodes")


def _holder(client: Client, chain: Chain) -> str:
    """Where the client would read the first block."""
    found = client._recent.find(chain.ns, "", chain.hashes)
    assert found is not None
    codes, nodes = found[0], found[1]
    return str(nodes[(int(codes[0]) - 1) >> 2].node_id)


def nearly_all(loads: list[tuple[LoadResult, float]]) -> float:
    """What nine in ten took at most, seconds: a busy machine may hold up one, waiting for a victim holds up all."""
    return sorted(took_s for _, took_s in loads)[len(loads) * 9 // 10]


def test_a_node_that_is_cut_off_is_a_miss_in_time_and_slows_nobody_else(cluster: Cluster, client: Client) -> None:
    both = chains(cluster, client, "cut")
    for chain in both.values():
        assert chain.load()[0].loaded.all()
    cluster.cut("node0")
    try:
        result, took_s = both["node0"].load()
        assert not result.loaded.any() and took_s < BOUND_S
        again = [both["node0"].load() for _ in range(5)]
        assert not any(result.loaded.any() for result, _ in again)
        assert min(took_s for _, took_s in again) < SILENCE_S / 2, "the breaker is open: nobody waits for it again"
        # INV-9: what does not need the victim does not wait for it, not once.
        others = [both["node1"].load() for _ in range(50)]
        assert all(result.loaded.all() for result, _ in others)
        assert nearly_all(others) < SILENCE_S, "nobody waited for it"
    finally:
        cluster.mend("node0")
    until(lambda: both["node0"].load()[0].loaded.all())


def test_a_node_that_masters_do_not_hear_is_suspected_and_still_serves(cluster: Cluster, client: Client) -> None:
    both = chains(cluster, client, "deaf")

    def states() -> set[str]:
        with cluster.admin() as admin:
            return {row.state for row in admin.nodes()}

    cluster.cut("node0", "master0")
    try:
        until(lambda: "suspected" in states())
        assert both["node0"].load()[0].loaded.all(), "known locations need no master"
    finally:
        cluster.mend("node0", "master0")
    until(cluster.whole, 20)
    until(lambda: client.lookup(both["node0"].ns, "", both["node0"].hashes).hit_blocks == COUNT)


def test_a_master_that_is_cut_off_costs_its_bound(cluster: Cluster, client: Client) -> None:
    both = chains(cluster, client, "headless")
    cluster.cut("master0")
    try:
        for chain in both.values():
            result, took_s = chain.load()
            assert result.loaded.all() and took_s < BOUND_S
        began = time.monotonic()
        found = client.lookup(both["node0"].ns, "", both["node0"].hashes)
        assert not found.answered and time.monotonic() - began < 2 * BOUND_S
    finally:
        cluster.mend("master0")
    until(cluster.whole, 20)
    until(lambda: client.lookup(both["node0"].ns, "", both["node0"].hashes).hit_blocks == COUNT)


def test_ten_megabits_are_slow_and_not_dead(cluster: Cluster, client: Client) -> None:
    """256 KiB take 0.2 s: every block arrives, no breaker opens, the other node is as fast as ever."""
    both = chains(cluster, client, "slow")
    assert cluster.hosts is not None
    victim = cluster.host("node0")
    assert victim is not None
    cluster.hosts.throttle(victim, "10mbit")
    try:
        result, took_s = both["node0"].load()
        assert result.loaded.all() and 0.05 < took_s < 2.0 + BOUND_S
        result, took_s = both["node1"].load()
        assert result.loaded.all() and took_s < 0.25
        assert client.health()["healthy"]
    finally:
        cluster.hosts.unthrottle(victim)


def test_a_stopped_node_is_a_miss_in_time(cluster: Cluster, client: Client) -> None:
    both = chains(cluster, client, "stopped")
    cluster.signal("node0", signal.SIGSTOP)
    try:
        result, took_s = both["node0"].load()
        assert not result.loaded.any() and took_s < BOUND_S
        assert nearly_all([both["node1"].load() for _ in range(20)]) < SILENCE_S
    finally:
        cluster.signal("node0", signal.SIGCONT)
    until(lambda: both["node0"].load()[0].loaded.all())


def test_a_node_that_is_started_again_within_a_second(cluster: Cluster, client: Client, tmp_path: Path) -> None:
    """Another incarnation at another port: its blocks are misses, never errors, and it takes new ones."""
    both = chains(cluster, client, "again")
    cluster.kill("node0")
    cluster.start("node0")
    result, took_s = both["node0"].load()
    assert not result.loaded.any() and took_s < BOUND_S
    until(cluster.whole, 20)
    fresh = chains(cluster, client, "anew")
    assert fresh["node0"].load()[0].loaded.all()
