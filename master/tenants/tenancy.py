"""What quotas know of a tenant and of a node, and how amounts become shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstrata.master import messages as m
from kvstrata.master.tenants.division import least_of
from kvstrata.master.tenants.ledger import UNLIMITED, Ledger, Part
from kvstrata.proto.status import Tier

TIERS: Final = (Tier.DRAM, Tier.SSD)
#: A change that has not been sent yet is confirmed by no revision.
UNSENT: Final = 1 << 63


@dataclass(slots=True)
class Tenant:
    """A salt that has shares of its own, by tier. ``defined``: it has a policy, and is not a guest."""

    policy: m.TenantPolicy
    defined: bool
    ledgers: dict[Tier, Ledger]
    block_bytes: int = 0
    seen_at: float = 0.0
    planned_at: float = -1e9
    waiting: int = 0
    refused: int = 0

    def part(self, tier: Tier, node_id: str) -> Part:
        return self.ledgers[tier].part(node_id)

    def least(self, tier: Tier) -> dict[str, int]:
        """Bytes of DRAM without which a node cannot read what the tenant has on its SSD; none in another tier."""
        if tier != Tier.DRAM:
            return {}
        return {node_id: least_of(self.block_bytes) for node_id, part in self.ledgers[Tier.SSD] if part.used}

    def share(self, node_id: str) -> m.Share:
        dram, ssd = (self.part(tier, node_id) for tier in TIERS)
        return m.Share(
            self.policy.salt,
            limit_or_none(dram.granted),
            limit_or_none(ssd.granted),
            min(dram.floor, dram.granted),
            min(ssd.floor, ssd.granted),
        )


@dataclass(slots=True)
class Member:
    """A node as quotas see it. ``session`` None: no link, and away since ``away_since``."""

    session: int | None = None
    away_since: float = 0.0
    leaves_at: float | None = None  #: it said goodbye; from then on its memory is surely free
    capacity: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    attach_revision: int = 0
    last_revision: int = 0
    said_at: float = 0.0
    linked_before: bool = False  #: since this master knows it
    reported: bool = False  #: in this session
    unconfirmed: set[str | None] = field(default_factory=set)
    usage: dict[str, m.TenantUsage] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)  #: bytes by salt, since its last report
    rising: set[str | None] = field(default_factory=set)  #: tenants whose raise is not in a save yet
    stale_since: float | None = None  #: its saved grants are higher than they need be

    def stale(self, now: float) -> None:
        if self.stale_since is None:
            self.stale_since = now


@dataclass(frozen=True, slots=True)
class Room:
    """What a salt has of a node's DRAM: its share, and how much of that is not used yet. None: no limit."""

    share: int
    free: int


def tenant_of(policy: m.TenantPolicy, *, defined: bool) -> Tenant:
    ledgers = {
        tier: Ledger(UNLIMITED if limit is None else limit, floor, bound=UNLIMITED if limit is None else limit)
        for tier, limit, floor in by_tier(policy)
    }
    return Tenant(policy, defined, ledgers)


def by_tier(policy: m.TenantPolicy | m.Share) -> tuple[tuple[Tier, int | None, int], ...]:
    return (
        (Tier.DRAM, policy.dram_limit, policy.dram_floor),
        (Tier.SSD, policy.ssd_limit, policy.ssd_floor),
    )


def limit_or_none(granted: int) -> int | None:
    return None if granted >= UNLIMITED else granted


def limit_of(share: m.Share, tier: Tier) -> int | None:
    return share.ssd_limit if tier == Tier.SSD else share.dram_limit


def floor_of(share: m.Share, tier: Tier) -> int:
    return share.ssd_floor if tier == Tier.SSD else share.dram_floor


def used_of(usage: m.TenantUsage, tier: Tier) -> int:
    return usage.ssd_bytes if tier == Tier.SSD else usage.dram_bytes


def denied(policy: m.TenantPolicy, deny: bool) -> m.TenantPolicy:
    return m.TenantPolicy("", 0, 0) if deny else m.TenantPolicy("", policy.dram_limit, policy.ssd_limit)


def equal_parts(ledger: Ledger, here: Mapping[str, int]) -> dict[str, int]:
    """The default's parts: alike on all nodes that can be told, beside what the others hold."""
    reserved = sum(part.peak for node_id, part in ledger if node_id not in here)
    return dict.fromkeys(here, max(0, ledger.limit - reserved) // len(here)) if here else {}
