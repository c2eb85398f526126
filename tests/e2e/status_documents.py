"""Status documents as a master would make them: a pool that is well, an empty one, one in trouble, hostile names."""

from __future__ import annotations

import copy
import math
from typing import Any

from kvstrata.master.status.attention import attention, verdict
from kvstrata.master.status.meaning import meanings

Document = dict[str, Any]

NOW = 1_796_000_000.0
GIB = 1 << 30
HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\u202egnp.exe \u2066左から右 🧊 e\u0301",
    "n" * 512,
    "a&b'c\"d`${1}",
    "\ud800 lone, \x1b[31mred\x1b[0m, \x07",
)


def node(index: int, name: str = "", **changes: Any) -> Document:
    return {
        "node_id": name or f"node-{index:02d}",
        "state": "active",
        "gone": False,
        "since": NOW - 86_000,
        "synced": True,
        "host": f"gpu-{index:02d}.rack{index % 4}",
        "channel": f"10.0.{index % 4}.{index}:7410",
        "http": f"10.0.{index % 4}.{index}:7411",
        "software": "kvstrata 0.1.0",
        "heartbeat_age_seconds": 0.1 * (index % 7),
        "progress_age_seconds": 0.1,
        "blocks": 48_000 + 731 * index,
        "clients": 4,
        "leases": 12,
        "dram": {"used": int((0.82 + 0.015 * (index % 11)) * 64 * GIB), "size": 64 * GIB},
        "ssd": {"used": int((0.30 + 0.05 * (index % 9)) * 1024 * GIB), "size": 1024 * GIB},
        "bytes_out_per_second": (310 + 41 * (index % 5)) << 20,
        "bytes_in_per_second": (88 + 13 * (index % 3)) << 20,
        "bytes_copied_per_second": 0,
        "copies": 0,
        "drain": None,
        "devices": [{"path": "/ssd0", "state": "serving", "used": 1, "size": 2, "problem": ""}],
    } | changes


def tenant(
    name: str, dram: float, limit: int | None, state: str = "ok", refused: int = 0, policy: bool = True
) -> Document:
    return {
        "name": name,
        "policy": policy,
        "dram": {"used": int(dram * GIB), "limit": limit and limit * GIB, "floor": 8 * GIB if policy else 0},
        "ssd": {"used": int(dram * 3 * GIB), "limit": None, "floor": 0},
        "state": state,
        "refused_bytes": refused,
        "refused_bytes_last_minute": refused,
    }


def event(
    seq: int, age: float, text: str, severity: str = "info", kind: str = "node.active", times: int = 1
) -> Document:
    at = NOW - age
    return {
        "seq": seq, "at": at, "kind": kind, "text": text, "severity": severity, "about": "", "times": times,
        "first_at": at,
    }  # fmt: skip


def lookups(asked: int, dram: int, ssd: int, misses: dict[str, int], seconds: float) -> Document:
    return {
        "seconds": seconds, "lookups": asked // 64, "asked": asked, "hits": {"dram": dram, "ssd": ssd},
        "misses": misses, "hit_rate": round((dram + ssd) / asked, 4) if asked else None,
    }  # fmt: skip


def finished(document: Document) -> Document:
    rows = attention(document)
    return {"verdict": verdict(rows), "attention": rows, **document}


def _healthy() -> Document:
    asked = [int(52_000 + 9_000 * math.sin(at / 6)) for at in range(60)]
    hit = [int(n * (0.83 + 0.03 * math.sin(at / 4))) for at, n in enumerate(asked)]
    nodes = [node(index) for index in range(1, 9)]
    return {
        "schema": 1,
        "at": NOW,
        "cost_ms": 1.0,
        "cluster_id": "prod-eu-1",
        "software": "kvstrata 0.1.0",
        "uptime_seconds": 432_000.0,
        "master": {"channel": "10.0.0.2:7400", "leading": True, "epoch": 7, "ready": True, "healthy": True},
        "leader": {"channel": "10.0.0.2:7400", "http": ""},
        "masters": [
            {"channel": f"10.0.0.{at}:7400", "http": f"10.0.0.{at}:7402", "leading": at == 2, "self": at == 2}
            for at in (2, 3, 4)
        ],
        "masters_problem": "",
        "problems": [],
        "warnings": [],
        "totals": {
            "blocks": 402_113,
            "nodes_active": 8,
            "nodes": 8,
            "clients": 16,
            "dram": {tier: sum(row["dram"][tier] for row in nodes) for tier in ("used", "size")},
            "ssd": {tier: sum(row["ssd"][tier] for row in nodes) for tier in ("used", "size")},
        },
        "lookups": {
            "minute": lookups(54_112, 38_004, 7_210, {"never_stored": 7_612, "evicted_room": 1_286}, 60),
            "hour": lookups(3_120_400, 2_170_210, 430_190, {"never_stored": 441_000, "evicted_room": 79_000}, 3600),
        },
        "transfers": {
            "bytes_out_per_second": 3_300 << 20,
            "bytes_in_per_second": 810 << 20,
            "bytes_copied_per_second": 22 << 20,
        },
        "series": {
            "step_seconds": 60.0,
            "asked": asked,
            "hit": hit,
            "bytes_out": [int(n * 3.6e6) for n in asked],
            "bytes_in": [int(n * (0.9 + 0.2 * math.cos(at / 3)) * 9e5) for at, n in enumerate(asked)],
            "bytes_copied": [0] * 60,
        },
        "copies": {
            "under_way": 2, "waiting": 0, "replicas_wanting": 0, "replicas_surplus": 14, "bytes_copied": 7 << 33,
        },
        "nodes": nodes,
        "nodes_left_out": 0,
        "tenants": [
            tenant("search", 118, 128, "near"),
            tenant("assistants", 204, 256),
            tenant("batch-evals", 61, 96),
            tenant("#9f21c04be77a", 12.5, None, policy=False),
        ],
        "tenants_left_out": 0,
        "tenants_default": {"dram": None, "ssd": None, "denies": False},
        "clients": [
            {
                "name": f"vllm-{at}", "host": f"gpu-{at:02d}.rack{at % 4}", "pid": 4000 + at,
                "software": "kvstrata 0.1.0", "lookups": 90_000 + at, "idle_seconds": 0.1 * at,
                "connected_seconds": 80_000.0,
            }
            for at in range(1, 7)
        ],
        "clients_left_out": 10,
        "refused": {"versions": {}, "security": {}},
        "events": [
            event(1, 86_000, "this master leads, epoch 7", "notice", "leader"),
            event(2, 85_990, "node node-07 has attached; its blocks are being listed"),
            event(3, 85_988, "node node-07 serves"),
            event(4, 2_400, "node node-03 is being drained", "notice", "node.drain"),
            event(5, 2_100, "the drain of node node-03 was cancelled: it stays", "notice", "node.drain"),
            event(6, 1_250, "tenant search: memory 128 GiB (was 96 GiB)", "notice", "tenant.policy"),
        ],
        "events_seq": 6,
        "miss_reasons": meanings(),
    }  # fmt: skip


def healthy() -> Document:
    return finished(_healthy())


def empty() -> Document:
    """A master that nobody has come to."""
    nobody = _healthy()
    nothing = lookups(0, 0, 0, {}, 0.0)
    nobody |= {
        "cluster_id": "6b1f09c2", "uptime_seconds": 12.0, "nodes": [], "tenants": [], "clients": [],
        "clients_left_out": 0, "events": [], "events_seq": 0, "lookups": {"minute": nothing, "hour": nothing},
        "transfers": dict.fromkeys(nobody["transfers"], 0), "copies": dict.fromkeys(nobody["copies"], 0),
        "series": {"step_seconds": 60.0}
        | {name: [None] * 60 for name in ("asked", "hit", "bytes_out", "bytes_in", "bytes_copied")},
        "master": nobody["master"] | {"channel": "127.0.0.1:7400", "epoch": 1},
        "masters": [{"channel": "127.0.0.1:7400", "http": "127.0.0.1:7402", "leading": True, "self": True}],
        "totals": nobody["totals"]
        | {"blocks": 0, "nodes": 0, "nodes_active": 0, "clients": 0}
        | {tier: {"used": 0, "size": 0} for tier in ("dram", "ssd")},
    }  # fmt: skip
    return finished(nobody)


def trouble() -> Document:
    """A node is missing, another does not answer, a device failed, a tenant is at its limit, the hit rate falls."""
    bad = _healthy()
    bad["nodes"] = [
        node(5, state="offline", since=NOW - 190, heartbeat_age_seconds=None, blocks=0, bytes_out_per_second=0,
             dram={"used": 0, "size": 64 << 30}, ssd={"used": 0, "size": 1 << 40}, bytes_in_per_second=0),
        node(3, state="suspected", since=NOW - 4, heartbeat_age_seconds=4.2, bytes_out_per_second=0),
        node(1, devices=[{"path": "/ssd0", "state": "failed", "used": 0, "size": 1, "problem": "5 errors in a row"}]),
        node(2, copies=4),
        node(4, drain={
            "state": "draining", "bytes_total": 52 * GIB, "bytes_moved": 31 * GIB, "bytes_failed": 0,
            "elapsed_seconds": 40.0, "budget_seconds": 600.0,
        }),
        *(node(index) for index in (6, 7, 8)),
    ]  # fmt: skip
    bad["totals"] = bad["totals"] | {"nodes_active": 6}
    bad["tenants"][0] = tenant("search", 127.4, 128, "full", 3 * GIB)
    bad["problems"] = ["the state store refuses writes: connection refused (12 rows wait)"]
    bad["lookups"]["minute"] = lookups(
        51_002, 21_400, 5_300, {"node_lost": 15_200, "never_stored": 7_800, "evicted_quota": 1_302}, 60
    )
    bad["series"]["hit"][-4:] = [
        int(n * rate) for n, rate in zip(bad["series"]["asked"][-4:], (0.8, 0.7, 0.6, 0.52), strict=True)
    ]
    bad["copies"] = bad["copies"] | {"under_way": 9, "waiting": 18_200, "replicas_wanting": 48_100}
    bad["events"] += [
        event(7, 200, "node node-05 is not routed to: silent for 3.1 s", "warning", "node.suspected"),
        event(8, 190, "node node-05 is gone: silent for 10.0 s", "critical", "node.offline"),
        event(9, 60, "the state store refuses writes: connection refused (3 rows wait)", "critical", "problem"),
        event(
            10,
            4,
            "node node-03 is not routed to: its main loop has not moved for 3.0 s",
            "warning",
            "node.suspected",
            3,
        ),
    ]
    return finished(bad)


def standby() -> Document:
    waits = _healthy()
    waits["master"] = waits["master"] | {"leading": False, "channel": "10.0.0.3:7400"}
    waits["leader"] = {"channel": "10.0.0.2:7400", "http": "10.0.0.2:7402"}
    waits["tenants"] = None
    waits["tenants_default"] = None
    for row in waits["masters"]:
        row["self"] = row["channel"] == "10.0.0.3:7400"
    return finished(waits)


def hostile(nodes: int = 100, tenants: int = 200) -> Document:
    """Many of everything, with names that nobody should have."""
    bad = _healthy()
    wild = [HOSTILE[at % len(HOSTILE)] for at in range(nodes)]
    bad["cluster_id"] = HOSTILE[0]
    bad["nodes"] = [node(at, f"{at} {text}", host=text, channel=text, software=text) for at, text in enumerate(wild)]
    bad["nodes"][1] |= {"state": "offline", "heartbeat_age_seconds": None}
    bad["tenants"] = [tenant(f"{at} {HOSTILE[at % len(HOSTILE)]}", 1 + at, 400) for at in range(tenants)]
    bad["clients"] = [row | {"name": HOSTILE[at % 6], "host": HOSTILE[at % 5]} for at, row in enumerate(bad["clients"])]
    bad["events"] = [event(at + 1, 100 - at, f"node {text} is gone", "critical") for at, text in enumerate(HOSTILE)]
    bad["problems"] = list(HOSTILE)
    bad["masters"] = [
        {"channel": HOSTILE[0], "http": "javascript:alert(1)", "leading": False, "self": False},
        *bad["masters"],
    ]
    bad["totals"] = bad["totals"] | {"nodes": nodes, "nodes_active": nodes - 1}
    return finished(copy.deepcopy(bad))
