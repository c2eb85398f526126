"""Nodes, clients and masters as rows of the status document: those in trouble first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstrata.master.status.sampler import Sampler
from kvstrata.proto import control_pb2 as control

NODES_MAX: Final = 512
CLIENTS_MAX: Final = 64
DEVICES_MAX: Final = 16
_ORDER: Final = {"offline": 0, "suspected": 1, "joining": 2, "active": 3}


def node_rows(listed: Iterable[control.NodeRow], gone: Mapping[str, bool], sampler: Sampler) -> list[dict[str, Any]]:
    """All of them, for JSON. A node that said goodbye is last."""
    rows = [_node(row, gone.get(row.node_id, False), sampler) for row in listed]
    rows.sort(key=lambda row: (row["gone"], _ORDER.get(row["state"], 9), row["node_id"]))
    return rows


def _node(row: control.NodeRow, gone: bool, sampler: Sampler) -> dict[str, Any]:
    here = row.state != "offline"
    (out, into, copied), since = sampler.of_node(row.node_id)
    status = row.status
    return {
        "node_id": row.node_id,
        "state": row.state,
        "gone": gone,
        "since": since,
        "synced": row.synced,
        "host": row.host,
        "channel": row.channel,
        "http": row.http,
        "software": row.software,
        "heartbeat_age_seconds": round(row.heartbeat_age_seconds, 2) if here else None,
        "progress_age_seconds": round(row.progress_age_seconds, 2) if here else None,
        "blocks": row.blocks,
        "clients": status.clients,
        "leases": status.leases,
        "dram": {"used": status.dram_bytes_used, "size": row.dram_bytes},
        "ssd": {"used": status.ssd_bytes_used, "size": row.ssd_bytes},
        "bytes_out_per_second": round(out),
        "bytes_in_per_second": round(into),
        "bytes_copied_per_second": round(copied),
        "copies": row.copies,
        "drain": _drain(row.drain) if row.drain.state else None,
        "devices": [
            {"path": d.path, "state": d.state, "used": d.bytes_used, "size": d.bytes, "problem": d.problem}
            for d in status.devices[:DEVICES_MAX]
        ],
    }


def _drain(drain: control.DrainRow) -> dict[str, Any]:
    return {
        "state": drain.state,
        "bytes_total": drain.bytes_total,
        "bytes_moved": drain.bytes_moved,
        "bytes_failed": drain.bytes_failed,
        "elapsed_seconds": round(drain.elapsed_seconds, 1),
        "budget_seconds": round(drain.budget_seconds, 1),
    }


def tiers_of(nodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Used and size by tier of the nodes that are here."""
    here = [node for node in nodes if node["state"] != "offline"]
    return {
        tier: {"used": sum(node[tier]["used"] for node in here), "size": sum(node[tier]["size"] for node in here)}
        for tier in ("dram", "ssd")
    }


def client_rows(listed: Iterable[control.ClientRow]) -> tuple[list[dict[str, Any]], int]:
    """The busiest lately first, for JSON, and how many were left out."""
    rows = [
        {
            "name": row.name,
            "host": row.host,
            "pid": row.pid,
            "software": row.software,
            "lookups": row.lookups,
            "idle_seconds": round(row.idle_seconds, 1),
            "connected_seconds": round(row.connected_seconds, 1),
        }
        for row in listed
    ]
    rows.sort(key=lambda row: (row["idle_seconds"], row["name"]))
    return rows[:CLIENTS_MAX], max(0, len(rows) - CLIENTS_MAX)


def master_rows(listed: control.MasterList) -> list[dict[str, Any]]:
    return [
        {"channel": row.channel, "http": row.http, "leading": row.leading, "self": row.self}
        for row in sorted(listed.masters, key=lambda row: (not row.leading, row.channel))
    ]
