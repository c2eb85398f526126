"""Metrics of clients, for an engine's Prometheus registry.

:meth:`Client.metrics` is one client's collector; :data:`CLIENTS` is that of all clients of this process, those that
are opened later too. Register one of them, once::

    prometheus_client.REGISTRY.register(kvstrata.client.metrics.CLIENTS)

Blocks have one denominator, as on masters and nodes: asked = hits by tier + misses by reason, of lookups and of loads.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.peers import Peers
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.transfer.exposition import build_info
from kvstrata.transfer.timings import seconds_family

#: Calls that ask for blocks, and what a block that they got is among their reasons.
ASKING: Final = {"lookup": "present", "load": "loaded"}
#: What a client counts beside blocks by reason.
_OTHERS: Final = frozenset({"calls", "bytes", "asked"})

_Counts = Mapping[tuple[str, ...], float]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Metered:
    """What is read of one client at a scrape. ``name`` is its label."""

    name: str
    counters: Counters
    directory: Directory
    peers: Peers
    tickets: FetchedTickets | None


class ClientCollector(Collector):
    """Reads its clients when it is scraped: nothing is counted twice. Clients of one name are added up."""

    def __init__(self, clients: Callable[[], Iterable[Metered]]) -> None:
        self._clients = clients

    def describe(self) -> Iterable[Metric]:
        """Families without samples."""
        return _families({})

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[Metered]] = {}
        for client in self._clients():
            by_name.setdefault(client.name, []).append(client)
        yield build_info("client")
        yield from _families(by_name)


def _families(clients: Mapping[str, list[Metered]]) -> Iterator[Metric]:
    rows = [(name, client) for name, alike in clients.items() for client in alike]
    yield _counter("blocks_asked", "Blocks asked for", ("call",), _asked(rows))
    yield _counter("block_hits", "Blocks found, or loaded, by the tier they were in", ("call", "tier"), _hits(rows))
    yield _counter("block_misses", "Blocks not found, or not loaded, by reason", ("call", "reason"), _misses(rows))
    yield _counter("store_blocks", "Blocks offered, by outcome", ("outcome",), _offered(rows))
    yield _counter("bytes", "Payload bytes moved, by transport", ("call", "transport"), _moved(rows))
    timings = [((name,), [client.counters.timings for client in alike]) for name, alike in clients.items()]
    yield seconds_family("kvstrata_client_call_seconds", "Seconds of calls, their waits included", ["client"], timings)
    yield _counter("breaker_opens", "Times that a peer was found silent or gone", ("peer",), _opens(rows))
    yield _gauge("nodes", "Nodes that the client knows, by whether it reaches them", ("reachable",), _nodes(rows))
    yield _counter("tickets", "Tickets asked for, by what came of it", ("outcome",), _tickets(rows))
    left: _Counts = {(name,): each.tickets.seconds_left() for name, each in rows if each.tickets is not None}
    yield _gauge("ticket_seconds_left", "Until the ticket in use ends", (), left)


_Rows = list[tuple[str, Metered]]


def _asked(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        kinds = client.counters.snapshot()
        for call in ASKING:
            total[name, call] += kinds.get(call, {}).get("asked", 0)
    return total


def _hits(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for call, tiers in client.counters.hits().items():
            for tier, blocks in tiers.items():
                total[name, call, tier] += blocks
    return total


def _misses(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        kinds = client.counters.snapshot()
        for call, hit in ASKING.items():
            for reason, blocks in kinds.get(call, {}).items():
                if reason not in _OTHERS and reason != hit:
                    total[name, call, reason] += blocks
    return total


def _offered(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for outcome, blocks in client.counters.snapshot().get("store", {}).items():
            if outcome not in _OTHERS:
                total[name, outcome] += blocks
    return total


def _moved(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for (call, transport), nbytes in client.counters.bytes_moved().items():
            total[name, call, transport] += nbytes
    return total


def _opens(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        total[name, "node"] += client.peers.breaker_opens()
        total[name, "master"] += client.directory.masters.breaker_opens()
    return total


def _nodes(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for known in client.peers.all():
            reachable = known.peer is not None and known.peer.reachable()
            total[name, "yes" if reachable else "no"] += 1
    return total


def _tickets(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        if client.tickets is not None:
            told = client.tickets.health()
            for outcome in ("fetched", "failed"):
                total[name, outcome] += int(str(told[outcome]))
    return total


def _counter(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(CounterMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(GaugeMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Counts) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


#: Clients that are open.
OPEN: Final[weakref.WeakSet[Metered]] = weakref.WeakSet()
#: Of every client of this process.
CLIENTS: Final = ClientCollector(lambda: list(OPEN))
