"""Tenants against their quotas, for the status document: those at a limit first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstrata.master.hub import Hub
from kvstrata.master.messages import TenantPolicy, TenantUsage
from kvstrata.master.state import MasterState
from kvstrata.master.status.salts import shown
from kvstrata.master.tenants.tenancy import denied

#: Rows of the document.
SHOWN_MAX: Final = 200
#: Salts that are looked at; beyond it (many end users with a salt each) those without a policy are left out.
LOOKED_MAX: Final = 20_000
NEAR: Final = 0.9
FULL: Final = 0.98
_ORDER: Final = {"full": 0, "near": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class Held:
    """What the state knows of tenants, copied in a moment. ``usages``: one mapping a node."""

    usages: list[dict[str, TenantUsage]]
    policies: dict[str, TenantPolicy]
    refused: dict[str, int]
    fallback: TenantPolicy
    denies: bool


def held(hub: Hub) -> Held | None:
    """None on a master that does not lead: the leader alone knows."""
    return hub.read(lambda state, _: _copy(state) if state.leading else None)


def _copy(state: MasterState) -> Held:
    quotas = state.quotas
    return Held(
        [dict(member.usage) for member in quotas.nodes.values() if member.session is not None],
        quotas.policies,
        {salt: tenant.refused for salt, tenant in quotas.tenants() if tenant.refused},
        denied(quotas.fallback, quotas.denies),
        quotas.denies,
    )


def used(usages: Iterable[Mapping[str, TenantUsage]]) -> dict[str, tuple[int, int]]:
    """Bytes of DRAM and SSD by salt, of all nodes; at most ``LOOKED_MAX`` salts."""
    totals: dict[str, tuple[int, int]] = {}
    for usage in usages:
        for salt, row in usage.items():
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
