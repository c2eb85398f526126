"""Metrics of clients, for an engine's Prometheus registry.

:meth:`Client.metrics` is one client's collector; :data:`CLIENTS` is that of all clients of this process, those that
are opened later too. Register one of them, once::

    prometheus_client.REGISTRY.register(kvstrata.client.metrics.CLIENTS)

Blocks have one denominator, as on masters and nodes: asked = hits by tier + misses by reason, of lookups, loads and
views. What :data:`CLIENTS` counts never falls: a client's counts stay in the sums of its name when it is closed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.peers import Peers
from kvstrata.client.security.fetched import FetchedTickets
from kvstrata.transfer.exposition import build_info
from kvstrata.transfer.timings import Timings, seconds_family

#: Calls that ask for blocks, and what a block that they got is among their reasons.
ASKING: Final = {"lookup": "present", "load": "loaded", "view": "loaded"}
#: What a client counts beside blocks by reason.
_OTHERS: Final = frozenset({"calls", "bytes", "asked"})

#: Names of closed clients that are kept apart; those of others are added up under this one.
NAMES_MAX: Final = 256
OTHER_NAMES: Final = "(others)"

R = TypeVar("R")
_Counts = Mapping[tuple[str, ...], float]
_Rows: TypeAlias = "list[tuple[str, Metered | Past]]"


@dataclass(frozen=True, eq=False, slots=True)
class Metered:
    """What is read of one client at a scrape. ``name`` is its label."""

    name: str
    counters: Counters
    directory: Directory
    peers: Peers
    tickets: FetchedTickets | None

    def opens(self) -> Counter[str]:
        """Breakers that opened, by what kind of peer."""
        return Counter(node=self.peers.breaker_opens(), master=self.directory.masters.breaker_opens())

    def fetched(self) -> Counter[str]:
        """Tickets asked for, by outcome."""
        if self.tickets is None:
            return Counter()
        told = self.tickets.health()
        return Counter({outcome: int(str(told[outcome])) for outcome in ("fetched", "failed")})


class Past:
    """What closed clients of one name have counted."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._opens: Counter[str] = Counter()
        self._fetched: Counter[str] = Counter()

    def absorb(self, client: Metered) -> None:
        self.counters.absorb(client.counters)
        self._opens.update(client.opens())
        self._fetched.update(client.fetched())

    def opens(self) -> Counter[str]:
        return self._opens

    def fetched(self) -> Counter[str]:
        return self._fetched


class OpenClients:
    """The clients of this process, and the sums of those that are closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Metered] = set()
        self._past: dict[str, Past] = {}
        #: Closed, and not in the sums yet. A client may be closed by the garbage collector, at any moment in any
        #: thread, maybe in the one that has the lock: it waits for nothing.
        self._closed: deque[Metered] = deque()

    def add(self, client: Metered) -> None:
        with self._lock:
            self._fold()
            self._open.add(client)

    def close(self, client: Metered) -> None:
        """It counts no more; once for each client. Never waits."""
        self._closed.append(client)

    def read(self, question: Callable[[_Rows], R]) -> R:
        """Ask something of all clients at one moment, by name."""
        with self._lock:
            self._fold()
            return question([(client.name, client) for client in self._open] + list(self._past.items()))

    def _fold(self) -> None:
        while self._closed:
            client = self._closed.popleft()
            self._open.discard(client)
            name = client.name if client.name in self._past or len(self._past) < NAMES_MAX else OTHER_NAMES
            self._past.setdefault(name, Past()).absorb(client)


class ClientCollector(Collector):
    """Reads its clients when it is scraped: nothing is counted twice. Clients of one name are added up.

    ``read`` asks a question of all of them at one moment."""

    def __init__(self, read: Callable[[Callable[[_Rows], list[Metric]]], list[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Families without samples."""
        return _families([])

    def collect(self) -> Iterator[Metric]:
        yield build_info("client")
        yield from self._read(lambda rows: list(_families(rows)))


def collector_of(client: Metered) -> ClientCollector:
    """Of one client alone; good when it is closed too."""
    return ClientCollector(lambda question: question([(client.name, client)]))


def _families(rows: _Rows) -> Iterator[Metric]:
    yield _counter("blocks_asked", "Blocks asked for", ("call",), _asked(rows))
    yield _counter("block_hits", "Blocks found, or loaded, by the tier they were in", ("call", "tier"), _hits(rows))
    yield _counter("block_misses", "Blocks not found, or not loaded, by reason", ("call", "reason"), _misses(rows))
    yield _counter("store_blocks", "Blocks offered, by outcome", ("outcome",), _offered(rows))
    yield _counter("bytes", "Payload bytes moved, by transport", ("call", "transport"), _moved(rows))
    timings: dict[str, list[Timings]] = {}
    for name, client in rows:
        timings.setdefault(name, []).append(client.counters.timings)
    named = [((name,), alike) for name, alike in timings.items()]
    yield seconds_family("kvstrata_client_call_seconds", "Seconds of calls, their waits included", ["client"], named)
    yield _counter("breaker_opens", "Times that a peer was found silent or gone", ("peer",), _opens(rows))
    yield _gauge("nodes", "Nodes that the client knows, by whether it reaches them", ("reachable",), _nodes(rows))
    yield _counter("tickets", "Tickets asked for, by what came of it", ("outcome",), _tickets(rows))
    ticketed = [(name, each.tickets) for name, each in rows if isinstance(each, Metered)]
    left: _Counts = {(name,): tickets.seconds_left() for name, tickets in ticketed if tickets is not None}
    yield _gauge("ticket_seconds_left", "Until the ticket in use ends", (), left)


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
        for peer, times in client.opens().items():
            total[name, peer] += times
    return total


def _nodes(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for known in client.peers.all() if isinstance(client, Metered) else ():
            reachable = known.peer is not None and known.peer.reachable()
            total[name, "yes" if reachable else "no"] += 1
    return total


def _tickets(rows: _Rows) -> _Counts:
    total = Counter[tuple[str, ...]]()
    for name, client in rows:
        for outcome, times in client.fetched().items():
            total[name, outcome] += times
    return total


def _counter(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(CounterMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(GaugeMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Counts) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


#: Of this process.
OPEN: Final = OpenClients()
#: Of every client of this process.
CLIENTS: Final = ClientCollector(OPEN.read)
