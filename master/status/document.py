"""The status document: everything that the page and ``kvstrata top`` show, in one piece of JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvstrata.master.hub import Hub
from kvstrata.master.state import MasterState
from kvstrata.master.status import tenants
from kvstrata.master.status.attention import attention, verdict
from kvstrata.master.status.meaning import meanings
from kvstrata.master.status.nodes import NODES_MAX, client_rows, master_rows, node_rows, tiers_of
from kvstrata.master.status.sampler import HITS, MOVED, Sampler, plain_lookups
from kvstrata.master.views import Views

#: Grows when a field is taken away or means something else. Fields may be added at any time.
SCHEMA: Final = 1
#: The document is made at most this often, whoever asks.
FRESH_S: Final = 1.0
EVENTS_SHOWN: Final = 60
#: Points of the document's series, and the seconds of each.
SERIES_POINTS: Final = 60
SERIES_STEP_S: Final = 60.0
_SPANS: Final = {"minute": 60.0, "hour": 3600.0}

Document = dict[str, Any]


class StatusDocument:
    """Makes the document. Thread-safe; :meth:`encoded` costs nothing while the last one is fresh."""

    def __init__(
        self,
        hub: Hub,
        views: Views,
        sampler: Sampler,
        refused: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._views = views
        self._sampler = sampler
        self._refused = refused
        self._clock = clock
        self._lock = threading.Lock()
        self._made_at = float("-inf")
        self._encoded = b""
        self.made = 0  #: documents made since the start

    def encoded(self) -> bytes:
        """As JSON, at most ``FRESH_S`` old. Those who ask while it is made wait for the same one."""
        with self._lock:
            if self._clock() - self._made_at >= FRESH_S:
                started = time.perf_counter()
                document = self.made_now()
                document["cost_ms"] = round((time.perf_counter() - started) * 1e3, 2)
                # Lone surrogates, which a salt may have, go as escapes.
                self._encoded = json.dumps(document, separators=(",", ":")).encode("ascii")
                self._made_at = self._clock()
                self.made += 1
            return self._encoded

    def made_now(self) -> Document:
        """O(nodes + tenants)."""
        report = self._views.health()
        gone, copies = self._hub.read(lambda state, _: (_gone(state), _copies(state)))
        nodes = node_rows(self._views.nodes().nodes, gone, self._sampler)
        clients, clients_left_out = client_rows(self._views.clients().clients)
        masters = self._sampler.masters()
        rows_of_masters = master_rows(masters)
        document: Document = {
            "schema": SCHEMA,
            "at": time.time(),
            "cluster_id": report.cluster_id,
            "software": report.software,
            "uptime_seconds": round(report.uptime_seconds, 1),
            "master": {
                "channel": self._hub.address(),
                "leading": report.leading,
                "epoch": report.epoch,
                "ready": report.ready,
                "healthy": report.healthy,
            },
            "leader": self._leader(report.leading, report.leader, rows_of_masters),
            "masters": rows_of_masters,
            "masters_problem": masters.problem,
            "problems": list(report.problems),
            "warnings": list(report.warnings),
            "totals": {
                "blocks": report.blocks,
                "nodes_active": report.nodes_active,
                "nodes": sum(not row["gone"] for row in nodes),
                "clients": report.clients,
                **tiers_of(nodes),
            },
            **self._rates(),
            "copies": copies,
            "nodes": nodes[:NODES_MAX],
            "nodes_left_out": max(0, len(nodes) - NODES_MAX),
            **self._tenants(),
            "clients": clients,
            "clients_left_out": clients_left_out,
            "refused": {"versions": dict(report.refused_versions), "security": dict(self._refused())},
            "events": [event.plain() for event in self._hub.events.since(0, EVENTS_SHOWN)],
            "events_seq": self._hub.events.seq,
            "miss_reasons": meanings(),
        }
        rows = attention(document)
        return {"verdict": verdict(rows), "attention": rows, **document}

    def _leader(self, leading: bool, leader: str, masters: list[dict[str, Any]]) -> dict[str, str] | None:
        """Where the leader is; None when none is known."""
        if leading:
            return {"channel": self._hub.address(), "http": ""}
        if not leader:
            return None
        http = next((row["http"] for row in masters if row["channel"] == leader), "")
        return {"channel": leader, "http": http}

    def _rates(self) -> Document:
        spans = {name: self._sampler.grown(seconds) for name, seconds in _SPANS.items()}
        seconds, lately = self._sampler.grown(10.0)
        moved = {
            name.replace(" ", "_") + "_per_second": round(lately[name] / seconds) if seconds else 0 for name in MOVED
        }
        series = self._sampler.series(("asked", *HITS, *MOVED), SERIES_STEP_S, SERIES_POINTS)
        hits = [
            None if asked is None else sum(series[name][point] or 0 for name in HITS)
            for point, asked in enumerate(series["asked"])
        ]
        return {
            "lookups": {name: plain_lookups(*span) for name, span in spans.items()},
            "transfers": moved,
            "series": {
                "step_seconds": SERIES_STEP_S,
                "asked": series["asked"],
                "hit": hits,
                **{name.replace(" ", "_"): series[name] for name in MOVED},
            },
        }

    def _tenants(self) -> Document:
        held = tenants.held(self._hub)
        if held is None:
            return {"tenants": None, "tenants_left_out": 0, "tenants_default": None}
        rows, left_out = tenants.rows(held, self._sampler.refused_lately(held.refused))
        default = {"dram": held.fallback.dram_limit, "ssd": held.fallback.ssd_limit, "denies": held.denies}
        return {"tenants": rows, "tenants_left_out": left_out, "tenants_default": default}


def _gone(state: MasterState) -> dict[str, bool]:
    return {node.node_id: node.gone for node in state.nodes}


def _copies(state: MasterState) -> dict[str, int]:
    replication = state.replication
    return {
        "under_way": len(replication.copies),
        "waiting": replication.waiting,
        "replicas_wanting": replication.scan.wanting,
        "replicas_surplus": replication.scan.surplus,
        "bytes_copied": replication.copies.bytes_copied,
    }
