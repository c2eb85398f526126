"""HTTP of the master: /metrics, /healthz, /readyz, /quota."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstrata.master.hub import Hub
from kvstrata.master.liveness import NodeState
from kvstrata.master.replication.metrics import replication_metrics
from kvstrata.master.tenants.answers import Tenants
from kvstrata.master.tenants.metrics import tenant_metrics
from kvstrata.master.tenants.quota_api import routes
from kvstrata.master.views import Views
from kvstrata.proto import control_pb2 as control
from kvstrata.transfer.exposition import add_process, build_info, exposition, seconds_family, traces_family
from kvstrata.transfer.security.http_guard import rights_in
from kvstrata.transfer.security.metrics import channel_metrics, security_metrics
from kvstrata.transfer.security.rights import Role
from kvstrata.transfer.traces import trace_facts


class _StateCollector(Collector):
    """Gauges worked out at the scrape."""

    def __init__(self, hub: Hub, views: Views, tenants: Tenants) -> None:
        self._tenants = tenants
        self._hub = hub
        self._views = views

    def collect(self) -> Iterable[Metric]:
        report = self._views.health()
        yield build_info("master")
        yield from self._calls()
        nodes = self._views.nodes().nodes
        states = GaugeMetricFamily("kvstrata_master_nodes", "Rostered nodes, by state", labels=["state"])
        for state in NodeState:
            states.add_metric([state.value], sum(row.state == state.value for row in nodes))
        yield states
        ages = GaugeMetricFamily("kvstrata_master_loop_age_seconds", "Time since a loop's last turn", labels=["loop"])
        for name, age_s in report.loop_age_seconds.items():
            ages.add_metric([name], age_s)
        yield ages
        directory_bytes, ghosts, intents, tombstones, orphans = self._hub.read(
            lambda state, _: (
                state.directory.nbytes,
                state.directory.ghost_blocks,
                state.placement.intents,
                len(state.tombstones),
                dataclasses.replace(state.orphans.counted),
            )
        )
        for name, text, value in (
            ("blocks", "Distinct blocks in the directory", report.blocks),
            ("clients", "Client processes connected", report.clients),
            ("healthy", "1 when /healthz answers 200", int(report.healthy)),
            ("ready", "1 when /readyz answers 200", int(report.ready)),
            ("leading", "1 while this master leads", int(report.leading)),
            ("leader_known", "1 while some master is known to lead", int(bool(report.leading or report.leader))),
            ("leader_epoch", "The leader's epoch, as far as it is known here", report.epoch),
            ("directory_bytes", "Memory of the directory's tables", directory_bytes),
            ("ghosts", "Blocks that left, of which the reason is remembered", ghosts),
            ("intents", "Soft intents remembered", intents),
            ("tombstones", "Removals that some node has not confirmed", tombstones),
            ("store_failures", "Writes the state store refused", self._hub.journal.failures),
        ):
            yield GaugeMetricFamily(f"kvstrata_master_{name}", text, value=value)
        refused = CounterMetricFamily(
            "kvstrata_master_refused_versions", "Hellos refused for their protocol version", labels=["software"]
        )
        for software, count in report.refused_versions.items():
            refused.add_metric([software], count)
        yield refused
        told = CounterMetricFamily("kvstrata_master_orphans", "Sister shards of evicted blocks", labels=["what"])
        for what, count in dataclasses.asdict(orphans).items():
            told.add_metric([what], count)
        yield told
        yield from tenant_metrics(self._hub, self._tenants)
        yield from replication_metrics(self._hub)
        yield from security_metrics("kvstrata_master", self._views.security)
        yield from channel_metrics("kvstrata_master", self._views.channel_counts)

    def _calls(self) -> Iterable[Metric]:
        timings, traces = self._views.timings, self._views.traces
        if timings is not None:
            text = "Seconds of what clients ask, by operation"
            yield seconds_family("kvstrata_master_call_seconds", text, [], [((), [timings])])
        if traces is not None:
            yield traces_family("kvstrata_master", traces.counts())


def _plain(report: control.HealthReport) -> dict[str, object]:
    """As JSON, with numbers as numbers (protobuf's own JSON makes strings of 64-bit integers)."""
    body: dict[str, object] = {field.name: getattr(report, field.name) for field in report.DESCRIPTOR.fields}
    maps = {"loop_age_seconds": dict(report.loop_age_seconds), "refused_versions": dict(report.refused_versions)}
    security = {
        field.name: getattr(report.security, field.name)
        if not field.has_presence or report.security.HasField(field.name)
        else None
        for field in report.security.DESCRIPTOR.fields
    }
    told = {"problems": list(report.problems), "warnings": list(report.warnings), "security": security}
    return body | told | maps


def application(hub: Hub, views: Views, tenants: Tenants, pages: Sequence[Route] = ()) -> Starlette:
    """The ASGI application; ``pages`` are served beside what is here."""
    registry = hub.metrics.registry
    registry.register(_StateCollector(hub, views, tenants))
    add_process(registry)

    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = await run_in_threadpool(exposition, registry, accept)
        return Response(page, headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        report = await run_in_threadpool(views.health)
        told = (
            _plain(report) | {"traces": trace_facts(views.traces)}
            if rights_in(request).has(Role.READ)
            else {"healthy": report.healthy}
        )
        return JSONResponse(told, status_code=200 if report.healthy else 503)

    async def readyz(_: Request) -> Response:
        report = await run_in_threadpool(views.health)
        return JSONResponse({"ready": report.ready}, status_code=200 if report.ready else 503)

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            *routes(tenants),
            *pages,
        ]
    )
