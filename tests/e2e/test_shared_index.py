"""Clients on a node's host read by its index: real processes, and what becomes of it when one of them stops or dies."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.client import Client, LoadResult
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import ForbiddenSalt
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.e2e.ticket_pool import TicketPool
from tests.waiting import until

SIZE = 16 << 10
COUNT = 40
#: From a stop to a miss: the beat's age, a call's silence, and a busy machine.
BOUND_S = 5.0


class Engine:
    """A client and one tenant's blocks."""

    def __init__(self, client: Client, salt: str = "", group: str = "model/index") -> None:
        self.client, self.salt = client, salt
        self.ns = client.namespace(group, block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(COUNT, f"index/{salt}")
        self.data = payload(self.hashes, salt, SIZE)
        self.into = np.zeros_like(self.data)
        self.rows = client.register(self.into).rows(self.ns)

    def store(self) -> None:
        rows = self.client.register(self.data.copy()).rows(self.ns)
        until(lambda: bool(self.client.store(self.ns, self.salt, self.hashes, rows).stored.all()), 20)

    def load(self) -> LoadResult:
        self.into[:] = 0
        result = self.client.load(self.ns, self.salt, self.hashes, self.rows)
        assert (self.into[result.loaded] == self.data[result.loaded]).all(), "wrong bytes"
        return result

    def by_index(self) -> int:
        """Blocks of one load that come by the index."""
        before = self.client.health()["blocks_by_index"]
        self.load()
        return int(str(self.client.health()["blocks_by_index"])) - int(str(before))


def of_node(daemon: Daemon, name: str, outcome: str = "") -> float:
    with urllib.request.urlopen(f"http://{daemon.ready['http']}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = [s.value for f in families for s in f.samples if s.name == name and s.labels.get("outcome", "") == outcome]
    assert len(found) == 1, name
    return found[0]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("index"))
    yield pool
    pool.end()


def test_a_dropped_tenant_and_new_weights_are_seen_at_once(pool: RealPool) -> None:
    with Client(pool.address, transport="shm", transfer_deadline_ms=10_000) as client:
        engines = [Engine(client, salt) for salt in ("a", "b")]
        for engine in engines:
            engine.store()
            until(lambda engine=engine: engine.by_index() == COUNT)  # type: ignore[misc]
        with AdminClient(pool.address) as admin:
            until(lambda: not admin.drop("model/index", "a").unreached, 20)
            assert not engines[0].load().loaded.any() and engines[1].load().loaded.all()
            until(lambda: not admin.bump_epoch("model/index").unreached, 20)
            assert not engines[1].load().loaded.any()


def test_every_side_counts_what_was_read_by_it(pool: RealPool) -> None:
    """And a client that is closed has told all of it."""
    node = pool.node()
    names = (("kvstrata_node_read_blocks_total", "hit_dram"), ("kvstrata_node_hits_index_total", ""))
    before = [of_node(node, *name) for name in names]
    with Client(pool.address, transport="shm", transfer_deadline_ms=10_000) as client:
        engine = Engine(client, "counted", "model/counted")
        engine.store()
        until(lambda: engine.by_index() == COUNT)
        assert of_node(node, "kvstrata_node_index_blocks") >= COUNT
        for _ in range(20):
            engine.load()
        collector = client.metrics()
    samples = [sample for family in collector.collect() for sample in family.samples]
    loaded = sum(
        s.value for s in samples if s.name == "kvstrata_client_block_hits_total" and s.labels["call"] == "load"
    )
    told = loaded, sum(s.value for s in samples if s.name == "kvstrata_client_index_blocks_total")
    assert told[0] >= 21 * COUNT and told[1] >= COUNT
    until(
        lambda: [of_node(node, *name) for name in names] == [was + now for was, now in zip(before, told, strict=True)]
    )


def test_a_node_that_stands_still_is_soon_distrusted_and_a_dead_one_at_once(tmp_path: Path) -> None:
    pool = RealPool(tmp_path)
    try:
        with Client(pool.address, transport="shm", transfer_deadline_ms=10_000) as client:
            engine = Engine(client)
            engine.store()
            until(lambda: engine.by_index() == COUNT)
            pool.node().signal(signal.SIGSTOP)
            until(lambda: not engine.load().loaded.any(), BOUND_S)
            assert engine.by_index() == 0
            pool.node().signal(signal.SIGCONT)
            until(lambda: engine.by_index() == COUNT, 20)
            pool.node().signal(signal.SIGKILL)
            assert not engine.load().loaded.any()
    finally:
        pool.end()


def test_only_who_may_read_everything_reads_by_it(tmp_path: Path) -> None:
    """And no longer than it may: the index is let go of soon after its ticket is not good any more."""
    pool = TicketPool(tmp_path, nodes=1)
    try:
        with (
            Client(pool.address, token=pool.tokens["engine"], transport="shm", transfer_deadline_ms=10_000) as any_salt,
            Client(pool.address, token=pool.tokens["acme"], transport="shm", transfer_deadline_ms=10_000) as acme,
        ):
            free, bound = Engine(any_salt, "acme-1"), Engine(acme, "acme-1")
            free.store()
            until(lambda: free.by_index() == COUNT)
            for _ in range(3):
                until(lambda: bool(bound.load().loaded.all()))
            assert acme.health()["blocks_by_index"] == 0
            with pytest.raises(ForbiddenSalt):
                acme.load(bound.ns, "other", bound.hashes, bound.rows)
            pool.write_keys("two")  # what was made with the first is not good any more
            pool.daemons["master"].end()  # and nobody gives another
            until(lambda: free.by_index() == 0, 20)
    finally:
        pool.end()
