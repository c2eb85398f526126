"""One denominator: master, node and client count the same blocks, and each block asked for is one hit or one miss."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.client import Client
from kvstrata.client.metrics import CLIENTS
from kvstrata.proto.errors import Closed
from kvstrata.transfer.regions import BlockView
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.waiting import until

BLOCK_BYTES = 64 << 10
#: Blocks that fit into the node's memory.
DRAM = "8MiB"
FIT = 100


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """Of tests that leave it as it was, each with a namespace of its own."""
    pool = RealPool(tmp_path_factory.mktemp("counted"))
    yield pool
    pool.end()


Values = dict[str, dict[tuple[str, ...], float]]


def parsed(text: str, without: str = "client") -> Values:
    """sample name -> (label values in order of label names, but ``without``) -> value."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != without)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scraped(daemon: Daemon, accept: str = "") -> str:
    request = urllib.request.Request(f"http://{daemon.ready['http']}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return bytes(answer.read()).decode()


def of_client(client: Client) -> Values:
    registry = CollectorRegistry()
    registry.register(client.metrics())
    return parsed(generate_latest(registry).decode())


def total(values: Values, name: str, *having: str) -> float:
    """The sum of a metric's samples that have all these label values."""
    return sum(value for labels, value in values.get(name, {}).items() if set(having) <= set(labels))


class Sides:
    """All three at a moment."""

    def __init__(self, pool: RealPool, client: Client) -> None:
        self.master = parsed(scraped(pool.daemons["master"]))
        self.node = parsed(scraped(pool.node()))
        self.client = of_client(client)

    def agree(self) -> None:
        master, node, client = self.master, self.node, self.client
        asked = total(master, "kvstrata_master_blocks_asked_total")
        hits, misses = (total(master, f"kvstrata_master_block_{kind}_total") for kind in ("hits", "misses"))
        assert asked == hits + misses > 0
        for call in ("lookup", "load"):
            told = total(client, "kvstrata_client_blocks_asked_total", call)
            found = total(client, "kvstrata_client_block_hits_total", call)
            lost = total(client, "kvstrata_client_block_misses_total", call)
            assert told == found + lost, (call, told, found, lost)
        assert total(client, "kvstrata_client_block_hits_total", "load") <= sum(
            total(node, "kvstrata_node_read_blocks_total", outcome) for outcome in ("hit_dram", "hit_ssd")
        )
        stored = total(client, "kvstrata_client_store_blocks_total", "stored")
        assert stored == total(node, "kvstrata_node_write_blocks_total", "stored")
        moved = total(client, "kvstrata_client_bytes_total", "store")
        assert moved == total(node, "kvstrata_node_bytes_in_total") == stored * BLOCK_BYTES


def test_each_block_is_counted_once_on_every_side(tmp_path: Path) -> None:
    pool = RealPool(tmp_path, 1, DRAM)
    try:
        with Client(pool.address, transport="tcp", transfer_deadline_ms=10_000) as client:
            ns = client.namespace("model/counts", block_bytes=BLOCK_BYTES, block_tokens=16)

            def rows(hashes: bytes) -> BlockView:
                return client.register(payload(hashes, "s", BLOCK_BYTES)).rows(ns)

            one = keys(40, "one")
            assert client.store(ns, "s", one, rows(one)).stored.all()
            until(lambda: client.lookup(ns, "s", one).hit_blocks == 40)
            assert client.load(ns, "s", one, rows(one)).loaded.all()
            Sides(pool, client).agree()

            # Half of it is there.
            longer = one + keys(40, "absent")
            before = Sides(pool, client)
            found = client.lookup(ns, "s", longer, request="half")
            assert found.hit_blocks == 40 and found.reasons == {"present": 40, "missing": 40}
            after = Sides(pool, client)
            for name, kind in (("blocks_asked", 80), ("block_hits", 40), ("block_misses", 40)):
                for side, prefix in (("master", "kvstrata_master_"), ("client", "kvstrata_client_")):
                    having = ("lookup",) if side == "client" else ()
                    now, then = (total(getattr(s, side), f"{prefix}{name}_total", *having) for s in (after, before))
                    assert now - then == kind, (side, name)
            assert client.load(ns, "s", longer, rows(longer)).loaded.sum() == 40
            Sides(pool, client).agree()

            # Others push the first ones out.
            for index in range(3):
                more = keys(FIT // 2, f"more/{index}")
                client.store(ns, "s", more, rows(more))
            until(lambda: (client.lookup(ns, "s", one).hit_blocks or 0) < 40)
            got = client.load(ns, "s", one, rows(one))
            assert not got.loaded.all()
            after = Sides(pool, client)
            after.agree()
            assert total(after.master, "kvstrata_master_block_misses_total", "evicted_room") > 0
            assert total(after.node, "kvstrata_node_evicted_total", "room") > 0

            # Nobody to ask: the client's counts go on, and stay whole.
            pool.daemons["master"].end()
            lost = client.lookup(ns, "s", longer)
            assert not lost.answered
            mine = of_client(client)
            assert total(mine, "kvstrata_client_block_misses_total", "lookup", "node_lost") >= 80
            assert total(mine, "kvstrata_client_breaker_opens_total", "master") >= 1
            told = total(mine, "kvstrata_client_blocks_asked_total", "lookup")
            assert told == total(mine, "kvstrata_client_block_hits_total", "lookup") + total(
                mine, "kvstrata_client_block_misses_total", "lookup"
            )
    finally:
        pool.end()


def test_hits_on_ssd_and_loads_that_are_late_are_counted_once_on_every_side(tmp_path: Path) -> None:
    ssd = ("--slab", "1MiB", "--ssd", f"{tmp_path / 'ssd'}=64MiB", "--ssd-policy", "write-through")
    pool = RealPool(tmp_path, 1, DRAM, options=ssd)
    try:
        with Client(pool.address, transport="tcp", transfer_deadline_ms=10_000) as client:
            ns = client.namespace("model/tiers", block_bytes=BLOCK_BYTES, block_tokens=16)
            chains = [keys(FIT // 2, f"chain/{index}") for index in range(4)]
            rows = [client.register(payload(hashes, "s", BLOCK_BYTES)).rows(ns) for hashes in chains]
            for hashes, blocks in zip(chains, rows, strict=True):
                assert client.store(ns, "s", hashes, blocks).stored.all()
            until(lambda: all(client.lookup(ns, "s", hashes).hit_blocks == FIT // 2 for hashes in chains))
            for hashes, blocks in zip(chains, rows, strict=True):
                assert client.load(ns, "s", hashes, blocks).loaded.all()
            sides = Sides(pool, client)
            sides.agree()
            # What was read ahead is in memory when it is fetched: the two sides may tell its tier differently.
            assert total(sides.client, "kvstrata_client_block_hits_total", "load", "ssd") > 0
            assert total(sides.node, "kvstrata_node_read_blocks_total", "hit_ssd") > 0
            assert total(sides.client, "kvstrata_client_block_hits_total", "load") == 4 * (FIT // 2)
            assert total(sides.master, "kvstrata_master_block_hits_total", "ssd") > 0

            with Client(pool.address, transport="tcp", transfer_deadline_ms=1000) as hasty:
                rows[0] = hasty.register(payload(chains[0], "s", BLOCK_BYTES)).rows(ns)
                hasty_ns = hasty.namespace("model/tiers", block_bytes=BLOCK_BYTES, block_tokens=16)
                assert hasty.lookup(hasty_ns, "s", chains[0]).hit_blocks == FIT // 2
                pool.node().process.send_signal(signal.SIGSTOP)
                try:
                    late = hasty.load(hasty_ns, "s", chains[0], rows[0])
                finally:
                    pool.node().process.send_signal(signal.SIGCONT)
                assert not late.loaded.any() and set(late.reasons) <= {"late", "node_lost"}, late.reasons
                mine = of_client(hasty)
                lost = sum(total(mine, "kvstrata_client_block_misses_total", "load", why) for why in late.reasons)
                assert lost == FIT // 2 == total(mine, "kvstrata_client_block_misses_total", "load")
                assert total(mine, "kvstrata_client_blocks_asked_total", "load") == FIT // 2
                assert total(mine, "kvstrata_client_block_hits_total", "load") == 0
    finally:
        pool.end()


def test_pages_in_openmetrics_have_exemplars_and_the_same_numbers(pool: RealPool) -> None:
    before = parsed(scraped(pool.daemons["master"]))["kvstrata_master_blocks_asked_total"][()]
    with Client(pool.address, name="engine-7") as client:
        ns = client.namespace("model/pages", block_bytes=BLOCK_BYTES, block_tokens=16)
        client.lookup(ns, "s", keys(3), request="chatcmpl-1")
        asked_for = "application/openmetrics-text; version=1.0.0"
        families = {family.name: family for family in openmetrics(scraped(pool.daemons["master"], asked_for))}
        named = [s.exemplar.labels for s in families["kvstrata_master_lookup_seconds"].samples if s.exemplar]
        assert {"request": "chatcmpl-1"} in named
        assert list(openmetrics(scraped(pool.node(), asked_for)))
        plain = scraped(pool.daemons["master"])
        assert "chatcmpl-1" not in plain and parsed(plain)["kvstrata_master_blocks_asked_total"][()] == before + 3

        registry = CollectorRegistry(auto_describe=True)
        registry.register(CLIENTS)
        page = parsed(generate_latest(registry).decode(), without="")
        assert page["kvstrata_client_blocks_asked_total"]["lookup", "engine-7"] == 3
        with Client(pool.address, name="engine-7") as second:
            second.lookup(ns, "s", keys(2))
            page = parsed(generate_latest(registry).decode(), without="")
            assert page["kvstrata_client_blocks_asked_total"]["lookup", "engine-7"] == 5
            mine = client.metrics()
    page = parsed(generate_latest(registry).decode(), without="")
    assert page["kvstrata_client_blocks_asked_total"]["lookup", "engine-7"] == 5, "a sum does not fall"
    assert list(mine.collect())
    try:
        client.metrics()
        raise AssertionError("a closed client has metrics")
    except Closed:
        pass


def test_corrupt_blocks_are_misses_with_their_reason(pool: RealPool) -> None:
    with Client(pool.address, transport="tcp", transfer_deadline_ms=10_000) as client:
        ns = client.namespace("model/wrong", block_bytes=BLOCK_BYTES, block_tokens=16)
        hashes = keys(4)
        data = payload(hashes, "s", BLOCK_BYTES)
        assert client.store(ns, "s", hashes, client.register(data).rows(ns)).stored.all()
        until(lambda: client.lookup(ns, "s", hashes).hit_blocks == 4)
        (known,) = client._peers.all()
        peer: Any = known.peer
        while hasattr(peer, "inner"):
            peer = peer.inner

        def flip(blocks: BlockView, index: int) -> None:
            blocks.region.bytes[int(blocks.table[index, 0, 0])] ^= 1

        peer.tamper = flip
        got = client.load(ns, "s", hashes, client.register(np.zeros_like(data)).rows(ns))
        assert not got.loaded.any()
        found = of_client(client)
        (reason,) = {labels[1] for labels in found["kvstrata_client_block_misses_total"] if labels[0] == "load"}
        assert reason == "corrupt"
        assert total(found, "kvstrata_client_block_misses_total", "load") == 4
        assert total(found, "kvstrata_client_blocks_asked_total", "load") == 4
        assert total(found, "kvstrata_client_block_hits_total", "load") == 0
