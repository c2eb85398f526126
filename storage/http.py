"""The node's HTTP side: Prometheus metrics, health, readiness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvstrata.storage.access import ROUTES
from kvstrata.storage.report import Device, NodeReport
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.transfer.exposition import add_process, build_info, exposition, seconds_family, traces_family
from kvstrata.transfer.security.guarded_web import guarded_server
from kvstrata.transfer.security.http_guard import rights_in
from kvstrata.transfer.security.metrics import channel_metrics, security_metrics
from kvstrata.transfer.security.rights import Role
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
    ("ssd_bytes", "SSD of the pool on this node, of devices that serve"),
    ("ssd_bytes_used", "SSD in slots that are taken"),
    ("ssd_bytes_free", "SSD not in taken slots"),
    ("ssd_blocks", "blocks that can be read on SSD"),
    ("index_blocks", "blocks that clients of this host find by themselves"),
    ("index_bytes", "room of the index in which they do"),
)
#: Outcomes of blocks offered: they add up to what was asked.
_WRITES = ("stored", "already_present", "full", "quota", "refused", "aborted", "corrupt")
#: Misses that have a reason of their own; of all others the node has nothing.
_MISSES = ("epoch", "no_room", "late", "corrupt", "read_error")
_EVICTIONS = ("quota", "lowered")
_PLAIN = (
    ("retired", "blocks taken away with their namespace, tenant or weights"),
    ("hints", "blocks moved by a hint of their owner"),
    ("demoted", "blocks written to SSD"),
    ("demoted_bytes", "bytes of slots written to SSD"),
    ("demote_refused", "blocks for which there was no room on SSD"),
    ("demote_failed", "blocks that did not get to SSD"),
    ("evicted_unwritten", "blocks that left DRAM and were not on SSD"),
    ("promoted", "blocks read from SSD into DRAM"),
    ("promoted_bytes", "payload bytes read from SSD into DRAM"),
    ("promote_refused", "blocks on SSD for which there was no room in DRAM"),
    ("slabs_taken_over", "slabs that changed their slot size with blocks in them"),
    ("removed", "blocks removed by order"),
    ("leases_expired", "leases that ended by their deadline"),
    ("reservations_expired", "reservations that ended by their deadline"),
    ("scrubbed", "blocks read back to see whether they are what was stored"),
    ("scrubbed_bytes", "payload bytes of those"),
    ("scrub_corrupt", "of those, blocks that were not, or could not be read: withdrawn"),
    ("hits_index", "blocks that clients of this host found and read by themselves; in the hits, too"),
    ("bytes_in", "payload bytes written into slots"),
    ("bytes_out", "payload bytes sent to readers, or leased to them to copy, or read by the shared index"),
)


class NodeCollector(Collector):
    """Reads the report when it is scraped: nothing is counted twice."""

    def __init__(self, report: NodeReport) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        totals = self._report.totals()
        yield build_info("node")
        yield from self._calls()
        for name, text in _GAUGES:
            yield GaugeMetricFamily(f"kvstrata_node_{name}", text, value=getattr(totals, name))
        counts = totals.counts
        yield _family("read_blocks", "blocks asked for, by outcome", "outcome", _reads(counts))
        yield _family("write_blocks", "blocks offered, by outcome", "outcome", {each: counts[each] for each in _WRITES})
        yield _family("evicted", "blocks evicted, by reason", "reason", _evictions(counts))
        for name, text in _PLAIN:
            yield CounterMetricFamily(f"kvstrata_node_{name}", text, value=counts[name])
        yield self._slots(totals.slots)
        yield from _devices(totals.devices)
        yield from _copies(self._report.copies())
        yield from _rails(self._report.rails)
        draining = float(bool(self._report.drain()["state"]))
        yield GaugeMetricFamily("kvstrata_node_draining", "1 while the node takes no new blocks", value=draining)
        yield GaugeMetricFamily("kvstrata_node_clients", "client sessions", value=self._report.clients())
        versions = self._report.refused_versions.counts()
        yield _family("refused_versions", "hellos refused for their protocol version", "software", versions)
        attached = GaugeMetricFamily("kvstrata_node_master_attached", "1 while attached", labels=["master"])
        for link in self._report.links:
            attached.add_metric([link.master], float(link.attached))
        yield attached
        epoch, refused = self._report.leader()
        yield GaugeMetricFamily("kvstrata_node_leader_epoch", "of the leader that is obeyed", value=epoch)
        yield CounterMetricFamily("kvstrata_node_orders_refused", "orders of masters that do not lead", value=refused)
        ages = GaugeMetricFamily("kvstrata_node_loop_age_seconds", "since a loop's last turn", labels=["loop"])
        for loop, age in self._report.loops.ages_s().items():
            ages.add_metric([loop], age)
        yield ages
        yield from security_metrics("kvstrata_node", self._report.security)
        yield from channel_metrics("kvstrata_node", self._report.channel_counts)
        problems = len(self._report.problems())
        yield GaugeMetricFamily("kvstrata_node_problems", "what health complains of", value=problems)

    def _calls(self) -> Iterable[Metric]:
        timings, traces = self._report.timings, self._report.traces
        if timings is not None:
            text = "Seconds of reads and writes, by operation; bytes that follow an answer are not in it"
            yield seconds_family("kvstrata_node_call_seconds", text, [], [((), [timings])])
        if traces is not None:
            yield traces_family("kvstrata_node", traces.counts())

    def _slots(self, slots: dict[int, tuple[int, int]]) -> Metric:
        family = GaugeMetricFamily("kvstrata_node_slots", "slots by size", labels=["slot_bytes", "state"])
        for size, (taken, cut) in slots.items():
            family.add_metric([str(size), "taken"], taken)
            family.add_metric([str(size), "free"], cut - taken)
        return family


def _reads(counts: Mapping[str, int]) -> dict[str, int]:
    """What was asked for, by outcome: all of it, each block once."""
    misses = {f"miss_{why}": counts[f"misses_{why}"] for why in _MISSES}
    return {
        "hit_dram": counts["hits"] - counts["hits_ssd"],
        "hit_ssd": counts["hits_ssd"],
        "miss_absent": counts["misses"] - sum(misses.values()),
        **misses,
    }


def _evictions(counts: Mapping[str, int]) -> dict[str, int]:
    reasons = {why: counts[f"evicted_{why}"] for why in _EVICTIONS}
    return {"room": counts["evicted"] - sum(reasons.values()), **reasons, "device": counts["evicted_device"]}


def _family(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvstrata_node_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


#: What copies count apart from outcomes of blocks taken.
_COPIED_PLAIN = {
    "taken_bytes": "payload bytes taken from other nodes",
    "given": "blocks sent to other nodes",
    "given_bytes": "payload bytes sent to other nodes",
    "given_from_ssd": "of the blocks sent, those that were read from SSD for it",
    "surplus": "replicas let go of, since other nodes have the blocks",
    "orders_refused": "orders to copy that were refused",
}
_TAKEN = ("taken", "present", "missing", "corrupt", "no_room", "failed")


def _copies(counts: Mapping[str, int]) -> Iterable[Metric]:
    orders = counts["orders"]
    yield GaugeMetricFamily("kvstrata_node_copy_orders", "orders to copy that are under way", value=orders)
    outcomes = {each: counts[each] for each in _TAKEN}
    yield _family("copy_blocks", "blocks to be taken from other nodes, by outcome", "outcome", outcomes)
    for name, text in _COPIED_PLAIN.items():
        yield CounterMetricFamily(f"kvstrata_node_copy_{name}", text, value=counts[name])


def _devices(devices: Sequence[Device]) -> Iterable[Metric]:
    serving = GaugeMetricFamily("kvstrata_node_device_serving", "1 while an SSD serves", labels=["device"])
    events = CounterMetricFamily("kvstrata_node_device", "what an SSD has done", labels=["device", "what"])
    for device in devices:
        serving.add_metric([device.path], float(device.state == "serving"))
        for what, count in device.counts.items():
            events.add_metric([device.path, what], count)
    yield serving
    yield events


def _rails(rails: NodeRails | None) -> Iterable[Metric]:
    """Nothing on a node that has none."""
    if rails is None:
        return
    health = rails.health()
    for name, text, value in (
        ("rail_peers", "agents of clients that are known", health["peers"]),
        ("rail_unsettled", "pulls that nobody waits for and that have not settled", health["unsettled"]),
        ("rail_unsettled_bytes", "DRAM in slots that those may still write to", health["unsettled_bytes"]),
        ("rail_age_seconds", "since the agent's thread last came round", health["age_seconds"]),
    ):
        yield GaugeMetricFamily(f"kvstrata_node_{name}", text, value=value)
    pulls = dict(health["pulls"])
    moved = pulls.pop("bytes")
    yield CounterMetricFamily("kvstrata_node_rail_pulled_bytes", "payload bytes taken one-sidedly", value=moved)
    yield _family("rail_pulls", "pulls of clients' memory by one-sided transfers, by outcome", "outcome", pulls)


def node_app(report: NodeReport) -> Starlette:
    """``/metrics``, ``/healthz`` (503 with the same body when something is wrong), ``/readyz`` (503 while the node is
    leaving), ``/tenants``.

    ``/tenants?salt=A&salt=B`` gives these tenants' bytes and shares on this node, without ``salt`` all of them.
    """
    registry = CollectorRegistry()
    registry.register(NodeCollector(report))
    add_process(registry)

    # Plain functions: they take the state's lock, so they run in the server's threads, not in its event loop.
    def metrics(request: Request) -> Response:
        page, content_type = exposition(registry, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    def healthz(request: Request) -> Response:
        health = report.health()
        told = health if rights_in(request).has(Role.READ) else {"healthy": health["healthy"]}
        return JSONResponse(told, status_code=200 if health["healthy"] else 503)

    def readyz(_: Request) -> Response:
        # The node serves from before this port listens until after it closes; a leaving one takes no new blocks.
        state = report.drain()["state"]
        return PlainTextResponse(f"{state or 'ready'}\n", status_code=503 if state else 200)

    def tenants(request: Request) -> Response:
        return JSONResponse({"tenants": report.tenants(request.query_params.getlist("salt") or None)})

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/tenants", tenants),
        ]
    )


def serve_http(report: NodeReport, address: str) -> WebServer:
    """Bind now, so that a port in use is known at once; the caller starts it."""
    return guarded_server(node_app(report), address, report.security, ROUTES)
