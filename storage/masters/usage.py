"""What masters are told of tenants: bytes each holds here, and bytes that its share has refused it. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Tenants in one report: more that changed are in the next ones.
TENANTS_MAX: Final = 1 << 14
#: Tenants whose refused bytes are remembered until every master has heard of them.
WANTED_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class TenantBytes:
    """One tenant on this node. ``*_wanted``: refused for its share, or taken from its own, since the last report."""

    salt: str
    dram_bytes: int = 0
    ssd_bytes: int = 0
    dram_wanted: int = 0
    ssd_wanted: int = 0


@dataclass(slots=True)
class Told:
    """What one master has been told in this session: used bytes, and refused bytes ever, by salt and tier."""

    used: dict[str, tuple[int, int]] = field(default_factory=dict)
    wanted: dict[str, tuple[int, int]] = field(default_factory=dict)


class WantedBook:
    """Refused bytes by salt, added up, so that several masters may each hear what is new to them."""

    def __init__(self) -> None:
        self._total: dict[str, tuple[int, int]] = {}

    def add(self, dram: Mapping[str, int], ssd: Mapping[str, int]) -> None:
        """Bytes refused since the last call."""
        for salt in dram.keys() | ssd.keys():
            known = self._total.pop(salt, (0, 0))
            self._total[salt] = known[0] + dram.get(salt, 0), known[1] + ssd.get(salt, 0)
        while len(self._total) > WANTED_MAX:
            del self._total[next(iter(self._total))]  # the one that has been content the longest

    def report(self, dram: Mapping[str, int], ssd: Mapping[str, int], told: Told) -> list[TenantBytes]:
        """Tenants that changed since ``told``, which is brought up to date; used bytes by salt are given.

        O(tenants).
        """
        rows: list[TenantBytes] = []
        for salt in [*told.used.keys() - dram.keys() - ssd.keys(), *dram, *(ssd.keys() - dram.keys())]:
            used = dram.get(salt, 0), ssd.get(salt, 0)
            wanted = self._news(salt, told)
            if used != told.used.get(salt, (0, 0)) or wanted != (0, 0):
                rows.append(TenantBytes(salt, *used, *wanted))
        rows.extend(
            TenantBytes(salt, 0, 0, *wanted)
            for salt in self._total
            if salt not in dram and salt not in ssd and salt not in told.used
            if (wanted := self._news(salt, told)) != (0, 0)
        )
        del rows[TENANTS_MAX:]
        for row in rows:
            self._tell(row, told)
        for salt in told.wanted.keys() - self._total.keys():
            del told.wanted[salt]
        return rows

    def _news(self, salt: str, told: Told) -> tuple[int, int]:
        total, before = self._total.get(salt, (0, 0)), told.wanted.get(salt, (0, 0))
        if total[0] < before[0] or total[1] < before[1]:
            before = (0, 0)  # it was forgotten here, and has come again
        return total[0] - before[0], total[1] - before[1]

    def _tell(self, row: TenantBytes, told: Told) -> None:
        if row.dram_bytes or row.ssd_bytes:
            told.used[row.salt] = row.dram_bytes, row.ssd_bytes
        else:
            told.used.pop(row.salt, None)
        if row.salt in self._total:
            told.wanted[row.salt] = self._total[row.salt]
