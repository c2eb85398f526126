"""Tenants against their quotas, for the status document: those at a limit first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvstrata.master.hub import Hub
from kvstrata.master.messages import TenantPolicy, TenantUsage
from kvstrata.master.state import MasterState
from kvstrata.master.status.salts import shown
from kvstrata.master.tenants.tenancy import denied

#: Rows of the document.
SHOWN_MAX: Final = 200
#: Salts that are looked at, of a node and in all; beyond it (many end users with a salt each) those without a policy
#: are left out.
LOOKED_MAX: Final = 20_000
NEAR: Final = 0.9
FULL: Final = 0.98
_ORDER: Final = {"full": 0, "near": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class Held:
    """What the state knows of tenants, read in pieces. ``usages``: of each node."""

    usages: list[list[tuple[str, TenantUsage]]]
    policies: dict[str, TenantPolicy]
    refused: dict[str, int]
    fallback: TenantPolicy
    denies: bool


def held(hub: Hub) -> Held | None:
    """None on a master that does not lead: the leader alone knows. Others have the lock between nodes."""
    begun = hub.read(lambda state, _: _begin(state) if state.leading else None)
    if begun is None:
        return None
    found, nodes = begun
    for node in nodes:
        found.usages.append(hub.read(lambda state, _, node=node: _usage(state, node)))  # type: ignore[misc]
    return found


def _begin(state: MasterState) -> tuple[Held, list[str]]:
    quotas = state.quotas
    refused = {salt: tenant.refused for salt, tenant in quotas.tenants() if tenant.refused}
    found = Held([], quotas.policies, refused, denied(quotas.fallback, quotas.denies), quotas.denies)
    return found, [node for node, member in quotas.nodes.items() if member.session is not None]


def _usage(state: MasterState, node: str) -> list[tuple[str, TenantUsage]]:
    """Of tenants with a policy all that are here, of others as many as are looked at. Bounded by those."""
    member = state.quotas.nodes.get(node)
    if member is None or member.session is None:
        return []
    usage = member.usage
    if len(usage) <= LOOKED_MAX:
        return list(usage.items())
    policies = state.quotas.policies
    named = [(salt, usage[salt]) for salt in policies if salt in usage]
    return named + [(salt, row) for salt, row in islice(usage.items(), LOOKED_MAX) if salt not in policies]


def used(usages: Iterable[Iterable[tuple[str, TenantUsage]]]) -> dict[str, tuple[int, int]]:
    """Bytes of DRAM and SSD by salt, of all nodes; at most ``LOOKED_MAX`` salts."""
    totals: dict[str, tuple[int, int]] = {}
    for usage in usages:
        for salt, row in usage:
            before = totals.get(salt)
            if before is not None:
                totals[salt] = (before[0] + row.dram_bytes, before[1] + row.ssd_bytes)
            elif len(totals) < LOOKED_MAX:
                totals[salt] = (row.dram_bytes, row.ssd_bytes)
    return totals


def rows(held: Held, refused_lately: Mapping[str, int]) -> tuple[list[dict[str, Any]], int]:
    """Rows for JSON and how many were left out: at a limit first, then by what they use."""
    totals = used(held.usages)
    salts = [
        *held.policies,
        *(salt for salt, bytes_used in totals.items() if salt not in held.policies and any(bytes_used)),
    ]
    found = [_row(salt, held, totals.get(salt, (0, 0)), refused_lately.get(salt, 0)) for salt in salts]
    found.sort(key=lambda row: (_ORDER[row["state"]], -row["dram"]["used"] - row["ssd"]["used"], row["name"]))
    return found[:SHOWN_MAX], max(0, len(found) - SHOWN_MAX)


def _row(salt: str, held: Held, bytes_used: tuple[int, int], refused: int) -> dict[str, Any]:
    policy = held.policies.get(salt)
    named = policy is not None
    limits = policy or held.fallback
    tiers = {
        "dram": {"used": bytes_used[0], "limit": limits.dram_limit, "floor": limits.dram_floor if named else 0},
        "ssd": {"used": bytes_used[1], "limit": limits.ssd_limit, "floor": limits.ssd_floor if named else 0},
    }
    fullest = max((_fullness(tier) for tier in tiers.values()), default=0.0)
    state = "full" if fullest >= FULL else "near" if fullest >= NEAR else "ok"
    return {
        "name": shown(salt, named=named),
        "policy": named,
        **tiers,
        "state": state,
        "refused_bytes": held.refused.get(salt, 0),
        "refused_bytes_last_minute": refused,
    }


def _fullness(tier: Mapping[str, int | None]) -> float:
    bytes_used, limit = tier["used"] or 0, tier["limit"]
    if limit is None or not bytes_used:
        return 0.0
    return bytes_used / limit if limit else 1.0
