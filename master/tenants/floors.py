"""Floors as they lie on nodes: how much of each node they take, and how much of them has no room."""

from __future__ import annotations

from collections.abc import Mapping

from kvstrata.master.tenants.ledger import Part
from kvstrata.master.tenants.tenancy import TIERS, Tenant
from kvstrata.proto.status import Tier


class Floors:
    """Every change of a part's floor goes through :meth:`give`, so that sums are there without adding up. O(1)."""

    def __init__(self) -> None:
        #: Bytes of tenants' floors that the nodes which are here cannot hold, where there are any.
        self.unmet: dict[tuple[Tier, str | None], int] = {}
        self._totals: dict[tuple[Tier, str], int] = {}

    def give(self, tier: Tier, node_id: str, part: Part, floor: int) -> None:
        """A node's part has this floor from now on; 0 before the part is forgotten."""
        if floor == part.floor:
            return
        total = self._totals.pop((tier, node_id), 0) + floor - part.floor
        part.floor = floor
        if total:
            self._totals[tier, node_id] = total

    def beside(self, tier: Tier, node_id: str, part: Part) -> int:
        """What the floors of all others take of a node."""
        return self._totals.get((tier, node_id), 0) - part.floor

    def note(self, tier: Tier, key: str | None, missing: int) -> None:
        """So much of a tenant's floor found no room."""
        self.unmet.pop((tier, key), None)
        if missing > 0:
            self.unmet[tier, key] = missing

    def missing(self) -> dict[Tier, int]:
        """Bytes without room, by tier."""
        return {tier: sum(nbytes for (of, _), nbytes in self.unmet.items() if of == tier) for tier in TIERS}

    def check(self, tenants: Mapping[str | None, Tenant]) -> None:
        """Assert that sums are those of the parts. O(parts)."""
        totals: dict[tuple[Tier, str], int] = {}
        for tenant in tenants.values():
            for tier, ledger in tenant.ledgers.items():
                for node_id, part in ledger:
                    if part.floor:
                        totals[tier, node_id] = totals.get((tier, node_id), 0) + part.floor
        assert totals == self._totals, f"floors are {totals}, counted as {self._totals}"
        for (tier, key), missing in self.unmet.items():
            assert key in tenants and missing > 0, (tier, key, missing)
