"""What clients count: every block that is asked for is a hit or a miss, however its call ended; sums never fall."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from prometheus_client.core import Metric

from kvstrata.client import BlockStatus, Client, open_clients
from kvstrata.client.metrics import ClientCollector, collector_of
from kvstrata.client.open_clients import OTHER_NAMES, Metered, OpenClients
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.client.transfers import Transfers
from tests.client.fake_pool import FakeMaster, packed

SIZE = 64


def samples(collector: ClientCollector, name: str) -> dict[tuple[str, ...], float]:
    """Label values in order of label names -> value."""
    found: Iterator[Metric] = iter(collector.collect())
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in found
        for sample in family.samples
        if sample.name == f"kvstrata_client_{name}"
    }


def of_call(client: Client, name: str, call: str) -> float:
    return sum(value for labels, value in samples(client.metrics(), name).items() if call in labels)


def whole(client: Client, call: str, asked: int, hits: int) -> None:
    told = [of_call(client, f"{name}_total", call) for name in ("blocks_asked", "block_hits", "block_misses")]
    assert told == [asked, hits, asked - hits]


def test_shed_and_failed_loads_and_views_are_counted(client: Client, master: FakeMaster) -> None:
    ns = client.namespace("model/m", block_bytes=SIZE, block_tokens=16)
    blocks = client.register(np.ones((4, SIZE), np.uint8)).rows(ns)
    assert client.store(ns, "", packed(4), blocks).stored.all()
    master.learn()
    full = Transfers(threads=1, pending_max=0)
    usual, client._transfers = client._transfers, full
    try:
        assert (client.load_async(ns, "", packed(4), blocks).result().status == BlockStatus.LATE).all()
        assert (client.store_async(ns, "", packed(4), blocks).result().status == BlockStatus.LATE).all()
    finally:
        client._transfers = usual
        full.close()
    whole(client, "load", 4, 0)
    assert samples(client.metrics(), "store_blocks_total")[client._metered.name, "late"] == 4

    def refuse(part: int, mask: object) -> None:
        raise RuntimeError("the engine's own trouble")

    with pytest.raises(RuntimeError, match="own trouble"):
        client.load(ns, "", packed(4), blocks, parts=(SIZE,), landed=refuse)
    whole(client, "load", 8, 4)

    missing = packed(6)
    with client.view(ns, "", missing) as view:
        assert sum(row is not None for row in view) == 4
    whole(client, "view", 6, 4)


def test_what_closed_and_dropped_clients_counted_stays(
    master: FakeMaster, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = OpenClients()
    monkeypatch.setattr("kvstrata.client.client.OPEN", registry)
    everyone = ClientCollector(registry.read)

    def asked() -> dict[tuple[str, ...], float]:
        return {labels: n for labels, n in samples(everyone, "blocks_asked_total").items() if "lookup" in labels}

    for count in (1, 2):
        client = connect(master.address, name="engine")
        ns = client.namespace("model/m", block_bytes=SIZE, block_tokens=16)
        client.lookup(ns, "", packed(3))
        assert asked() == {("lookup", "engine"): 3 * count}
        client.close()
        client.close()
        assert asked() == {("lookup", "engine"): 3 * count}
    mine = collector_of(client._metered)
    assert sum(samples(mine, "blocks_asked_total").values()) == 3, "the last one alone"
    assert samples(everyone, "call_seconds_count")["lookup", "engine"] == 2

    dropped = Client(master.address, name="dropped")
    dropped.lookup(dropped.namespace("model/m", block_bytes=SIZE, block_tokens=16), "", packed(3))
    del dropped
    gc.collect()
    assert asked()["lookup", "dropped"] == 3 and not registry._open


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch, master: FakeMaster, connect: Callable[..., Client]) -> None:
    monkeypatch.setattr(open_clients, "NAMES_MAX", 2)
    client = connect(master.address)
    read = client._metered
    registry = OpenClients()
    read.counters.add("lookup", {"missing": 1})
    for number in range(5):
        each = Metered(f"e{number}", read.counters, read.directory, read.peers, None)
        registry.add(each)
        registry.close(each)
    asked = samples(ClientCollector(registry.read), "blocks_asked_total")
    assert {labels[1] for labels in asked} == {"e0", "e1", OTHER_NAMES}
    assert sum(asked.values()) == 5


def test_clients_come_and_go_while_others_read(master: FakeMaster, connect: Callable[..., Client]) -> None:
    read, registry, over = connect(master.address)._metered, OpenClients(), threading.Event()
    read.counters.add("lookup", {"missing": 1})

    def come_and_go() -> None:
        while not over.is_set():
            each = Metered("e", read.counters, read.directory, read.peers, None)
            registry.add(each)
            registry.close(each)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        told = [
            samples(ClientCollector(registry.read), "blocks_asked_total").get(("lookup", "e"), 0.0) for _ in range(60)
        ]
    finally:
        over.set()
        thread.join()
    assert told == sorted(told)


def test_tickets_are_counted_by_outcome_when_the_client_is_closed_too(
    master: FakeMaster, connect: Callable[..., Client]
) -> None:
    read, registry = connect(master.address)._metered, OpenClients()
    counts = {"fetched": 3, "failed": 1}
    tickets = cast(FetchedTickets, SimpleNamespace(counts=lambda: counts, seconds_left=lambda: 9.0))
    for _ in range(2):
        each = Metered("e", read.counters, read.directory, read.peers, tickets)
        registry.add(each)
        assert samples(ClientCollector(registry.read), "ticket_seconds_left") == {("e",): 9.0}
        registry.close(each)
    told = samples(ClientCollector(registry.read), "tickets_total")
    assert told == {("e", "fetched"): 6, ("e", "failed"): 2}
