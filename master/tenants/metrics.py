"""Gauges of tenants: those with a policy by name, up to a bound; all others are one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstrata.master.hub import Hub
from kvstrata.master.state import MasterState
from kvstrata.master.tenants.answers import Tenants
from kvstrata.master.tenants.tenancy import TIERS, by_tier, used_of
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import Tier

#: Salts that may be label values. Policies are made by operators, so these are few, and theirs.
NAMED_MAX: Final = 64
OTHERS: Final = "(others)"
EMPTY: Final = "(empty)"


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of a moment: (salt, tier) -> bytes used and limits, salt -> bytes refused. Unnamed tenants are ``None``."""

    used: dict[tuple[str | None, str], int]
    limits: dict[tuple[str, str], int]
    refused: dict[str | None, int]
    outstanding: int
    waiting: int
    unmet: Mapping[Tier, int]


def tenant_metrics(hub: Hub, tenants: Tenants) -> Iterable[Metric]:
    """For a scrape."""
    totals = hub.read(lambda state, _: _totals(state))
    used = GaugeMetricFamily(
        "kvstrata_master_tenant_bytes", "Bytes that tenants use, all nodes", labels=["salt", "tier"]
    )
    for (name, tier), nbytes in totals.used.items():
        used.add_metric([_label(name), tier], nbytes)
    limits = GaugeMetricFamily("kvstrata_master_tenant_limit_bytes", "Limits of tenants", labels=["salt", "tier"])
    for (salt, tier), nbytes in totals.limits.items():
        limits.add_metric([_label(salt), tier], nbytes)
    refused = CounterMetricFamily(
        "kvstrata_master_tenant_wanted_bytes",
        "Bytes that limits refused, or for which own blocks had to leave",
        labels=["salt"],
    )
    for name, nbytes in totals.refused.items():
        refused.add_metric([_label(name)], nbytes)
    yield from (used, limits, refused)
    yield CounterMetricFamily(
        "kvstrata_master_what_if_unheard",
        "Lookups and placements that predictions of hit rates missed, as too many waited to be heard",
        value=hub.lookup_log.missed,
    )
    yield CounterMetricFamily(
        "kvstrata_master_what_if_turned_away",
        "Lookups and placements of tenants that predictions have no room for",
        value=hub.lookup_log.read(lambda what_if: what_if.turned_away),
    )
    yield GaugeMetricFamily(
        "kvstrata_master_shares_outstanding", "Shares that nodes have not confirmed", value=totals.outstanding
    )
    yield GaugeMetricFamily(
        "kvstrata_master_raises_waiting_bytes",
        "Shares that wait for another node to let go, or for the state store",
        value=totals.waiting,
    )
    unmet = GaugeMetricFamily(
        "kvstrata_master_floor_bytes_unmet",
        "Bytes of tenants' floors for which the nodes that are here have no room",
        labels=["tier"],
    )
    for tier_of, nbytes in totals.unmet.items():
        unmet.add_metric([tier_of.name.lower()], nbytes)
    yield unmet
    yield _what_if(tenants, sorted(name for name in totals.refused if name is not None))


def _what_if(tenants: Tenants, salts: list[str]) -> Metric:
    family = GaugeMetricFamily(
        "kvstrata_master_tenant_what_if_hit_rate",
        "Predicted hit rate of a tenant's lookups, were its quota so many times what it is",
        labels=["salt", "factor"],
    )
    rows = tenants.list(control.TenantQuery(salts=salts, what_if=True)).tenants if salts else []
    for row in rows:
        for prediction in row.what_if:
            family.add_metric([_label(row.policy.salt), f"{prediction.factor:g}"], prediction.hit_rate)
    return family


def _totals(state: MasterState) -> _Totals:
    quotas = state.quotas
    policies = sorted(salt for salt in quotas.policies if salt not in (OTHERS, EMPTY))
    named = {salt: quotas.policy_of(salt) for salt in policies[:NAMED_MAX]}
    used: dict[tuple[str | None, str], int] = {}
    limits: dict[tuple[str, str], int] = {}
    refused: dict[str | None, int] = dict.fromkeys(named, 0)
    for member in quotas.nodes.values():
        for salt, usage in member.usage.items():
            name = salt if salt in named else None
            for tier in TIERS:
                spot = name, tier.name.lower()
                used[spot] = used.get(spot, 0) + used_of(usage, tier)
    for salt, policy in named.items():
        for tier, limit, _ in by_tier(policy):
            if limit is not None:
                limits[salt, tier.name.lower()] = limit
    for salt, tenant in quotas.tenants():
        name = salt if salt in named else None
        refused[name] = refused.get(name, 0) + tenant.refused
    return _Totals(used, limits, refused, quotas.outstanding, quotas.waiting, quotas.floors_missing)


def _label(name: str | None) -> str:
    """Label values. What stands in brackets is no salt: one that looks like it is among the others."""
    return OTHERS if name is None else name or EMPTY
