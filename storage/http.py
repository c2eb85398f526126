"""The node's HTTP side: Prometheus metrics, health, readiness."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvstrata.storage.report import NodeReport
from kvstrata.transfer.web import WebServer

_GAUGES = (
    ("dram_bytes", "DRAM of the pool on this node"),
    ("dram_bytes_used", "DRAM in slots that are taken"),
    ("dram_bytes_free", "DRAM not in taken slots"),
    ("slabs", "slabs, each cut into slots of one size"),
    ("slabs_free", "slabs not cut"),
    ("blocks", "blocks that can be read"),
    ("leases", "read leases that stand"),
    ("reservations", "write reservations that stand"),
    ("sessions", "sessions that hold a lease or a reservation"),
    ("salts", "tenants that are charged for something"),
)
#: Outcomes of blocks asked for, and of blocks offered: each family adds up to what was asked.
_READS = ("hits", "misses")
_WRITES = ("stored", "already_present", "full", "refused", "aborted", "corrupt")
_PLAIN = (
    ("evicted", "blocks evicted for room"),
    ("slabs_taken_over", "slabs that changed their slot size with blocks in them"),
    ("removed", "blocks removed by order"),
    ("leases_expired", "leases that ended by their deadline"),
    ("reservations_expired", "reservations that ended by their deadline"),
    ("bytes_in", "payload bytes written into slots"),
    ("bytes_out", "payload bytes sent from slots"),
)


class NodeCollector(Collector):
    """Reads the report when it is scraped: nothing is counted twice."""

    def __init__(self, report: NodeReport) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        totals = self._report.totals()
        for name, text in _GAUGES:
            yield GaugeMetricFamily(f"kvstrata_node_{name}", text, value=getattr(totals, name))
        yield _outcomes("read_blocks", "blocks asked for, by outcome", _READS, totals.counts)
        yield _outcomes("write_blocks", "blocks offered, by outcome", _WRITES, totals.counts)
        for name, text in _PLAIN:
            yield CounterMetricFamily(f"kvstrata_node_{name}", text, value=totals.counts[name])
        yield self._slots(totals.slots)
        yield GaugeMetricFamily("kvstrata_node_clients", "client sessions", value=self._report.clients())
        attached = GaugeMetricFamily("kvstrata_node_master_attached", "1 while attached", labels=["master"])
        for link in self._report.links:
            attached.add_metric([link.master], float(link.attached))
        yield attached
        ages = GaugeMetricFamily("kvstrata_node_loop_age_seconds", "since a loop's last turn", labels=["loop"])
        for loop, age in self._report.loops.ages_s().items():
            ages.add_metric([loop], age)
        yield ages
        problems = len(self._report.problems())
        yield GaugeMetricFamily("kvstrata_node_problems", "what health complains of", value=problems)

    def _slots(self, slots: dict[int, tuple[int, int]]) -> Metric:
        family = GaugeMetricFamily("kvstrata_node_slots", "slots by size", labels=["slot_bytes", "state"])
        for size, (taken, cut) in slots.items():
            family.add_metric([str(size), "taken"], taken)
            family.add_metric([str(size), "free"], cut - taken)
        return family


def _outcomes(name: str, text: str, outcomes: Iterable[str], counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvstrata_node_{name}", text, labels=["outcome"])
    for outcome in outcomes:
        family.add_metric([outcome], counts[outcome])
    return family


def node_app(report: NodeReport) -> Starlette:
    """``/metrics``, ``/healthz`` (503 with the same body when something is wrong), ``/readyz``."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(report))

    # Plain functions: they take the state's lock, so they run in the server's threads, not in its event loop.
    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def healthz(_: Request) -> Response:
        health = report.health()
        return JSONResponse(health, status_code=200 if health["healthy"] else 503)

    def readyz(_: Request) -> Response:
        return PlainTextResponse("ready\n")  # the node serves from before this port listens until after it closes

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)])


def serve_http(report: NodeReport, address: str) -> WebServer:
    """Bind now, so that a port in use is known at once; the caller starts it."""
    return WebServer(node_app(report), address)
