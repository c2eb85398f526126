"""Metrics of clients, for an engine's Prometheus registry.

:meth:`Client.metrics` is one client's collector; :data:`CLIENTS` is that of all clients of this process, those that
are opened later too. Register one of them, once::

    prometheus_client.REGISTRY.register(kvstrata.client.metrics.CLIENTS)

Blocks have one denominator, as on masters and nodes: asked = hits by tier + misses by reason, of lookups, loads and
views. What :data:`CLIENTS` counts never falls: a client's counts stay in the sums of its name when it is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstrata.client.open_clients import OPEN, Metered, Past, Rows
from kvstrata.transfer.exposition import build_info, seconds_family
from kvstrata.transfer.timings import Timings

#: Calls that ask for blocks, and what a block that they got is among their reasons.
ASKING: Final = {"lookup": "present", "load": "loaded", "view": "loaded"}
#: What a client counts beside blocks by reason.
_OTHERS: Final = frozenset({"calls", "bytes", "asked"})

_Counts = Mapping[tuple[str, ...], float]
_Counted = Iterable[tuple[tuple[str, ...], int]]
_Client = Metered | Past
#: See :meth:`Counters.snapshot`.
_Kinds = Mapping[str, Mapping[str, int]]
T = TypeVar("T")


class ClientCollector(Collector):
    """Reads its clients when it is scraped: nothing is counted twice. Clients of one name are added up.

    ``read`` asks a question of all of them at one moment."""

    def __init__(self, read: Callable[[Callable[[Rows], list[Metric]]], list[Metric]]) -> None:
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


def _families(rows: Rows) -> Iterator[Metric]:
    kinds = [(name, client.counters.snapshot()) for name, client in rows]
    yield _counter("blocks_asked", "Blocks asked for", ("call",), _summed(kinds, _asked))
    text = "Blocks found, or loaded, by the tier they were in"
    yield _counter("block_hits", text, ("call", "tier"), _summed(rows, _hits))
    text = "Blocks not found, or not loaded, by reason"
    yield _counter("block_misses", text, ("call", "reason"), _summed(kinds, _misses))
    yield _counter("store_blocks", "Blocks offered, by outcome", ("outcome",), _summed(kinds, _offered))
    moved = _summed(rows, lambda client: client.counters.bytes_moved().items())
    yield _counter("bytes", "Payload bytes moved, by transport", ("call", "transport"), moved)
    text = "Blocks loaded by the shared index of a node on this host, which was not asked for them"
    yield _counter("index_blocks", text, (), _summed(rows, lambda client: [((), client.counters.by_index)]))
    timings: dict[str, list[Timings]] = {}
    for name, client in rows:
        timings.setdefault(name, []).append(client.counters.timings)
    named = [((name,), alike) for name, alike in timings.items()]
    yield seconds_family("kvstrata_client_call_seconds", "Seconds of calls, their waits included", ["client"], named)
    opens = _summed(rows, lambda client: _by(client.opens()))
    yield _counter("breaker_opens", "Times that a peer was found silent or gone", ("peer",), opens)
    text = "Nodes that the client knows, by whether it reaches them"
    yield _gauge("nodes", text, ("reachable",), _summed(rows, _nodes))
    fetched = _summed(rows, lambda client: _by(client.fetched()))
    yield _counter("tickets", "Tickets asked for, by what came of it", ("outcome",), fetched)
    ticketed = [(name, each.tickets) for name, each in rows if isinstance(each, Metered)]
    left: _Counts = {(name,): tickets.seconds_left() for name, tickets in ticketed if tickets is not None}
    yield _gauge("ticket_seconds_left", "Until the ticket in use ends", (), left)


def _asked(kinds: _Kinds) -> _Counted:
    return (((call,), kinds.get(call, {}).get("asked", 0)) for call in ASKING)


def _misses(kinds: _Kinds) -> _Counted:
    for call, hit in ASKING.items():
        for reason, blocks in kinds.get(call, {}).items():
            if reason not in _OTHERS and reason != hit:
                yield (call, reason), blocks


def _offered(kinds: _Kinds) -> _Counted:
    return (((outcome,), blocks) for outcome, blocks in kinds.get("store", {}).items() if outcome not in _OTHERS)


def _hits(client: _Client) -> _Counted:
    for call, tiers in client.counters.hits().items():
        for tier, blocks in tiers.items():
            yield (call, tier), blocks


def _nodes(client: _Client) -> _Counted:
    for known in client.peers.all() if isinstance(client, Metered) else ():
        yield ("yes" if known.peer is not None and known.peer.reachable() else "no",), 1


def _by(counts: Mapping[str, int]) -> _Counted:
    return (((name,), count) for name, count in counts.items())


def _summed(rows: Iterable[tuple[str, T]], of: Callable[[T], _Counted]) -> _Counts:
    """What ``of`` says of each row, added up by the name of its client and the labels."""
    total = Counter[tuple[str, ...]]()
    for name, row in rows:
        for labels, count in of(row):
            total[name, *labels] += count
    return total


def _counter(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(CounterMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: _Counts) -> Metric:
    return _filled(GaugeMetricFamily(f"kvstrata_client_{name}", text, labels=["client", *labels]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: _Counts) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


#: Of every client of this process.
CLIENTS: Final = ClientCollector(OPEN.read)
