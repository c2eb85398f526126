"""What bench/run.py found: medians and quartiles over rounds, and ratios between neighbours of one round."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Case, Round, quantile

#: Systems of peers; all others are ours or rooflines.
ROOFLINES: Final = ("memcpy", "memcpy+xxh3", "socket", "socket+xxh3", "echo", "preadv")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(slots=True)
class Rows:
    """Every round of one case and system. ``cpu``: CPU seconds a GiB by role ("client", "node", "master")."""

    gb_s: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)


class Results:
    """Rounds in the order in which they ran: those with one index ran beside each other."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Case, str], Rows] = {}
        self.repeated: list[str] = []

    def add(self, system: str, found: dict[Case, Round]) -> None:
        for case, one in found.items():
            rows = self._of(case, system)
            if one.nbytes:
                rows.gb_s.append(one.gb_s)
                for role, seconds in {"client": one.cpu_seconds, **one.others}.items():
                    rows.cpu.setdefault(role, []).append(seconds / one.nbytes * (1 << 30))
            rows.p50_us.append(quantile(one.seconds, 0.5) * 1e6)
            rows.p99_us.append(quantile(one.seconds, 0.99) * 1e6)

    def add_medians(self, system: str, case: Case, gb_s: float, p50_us: float, p99_us: float) -> None:
        """A peer's figures of one round, which its own driver has summed up."""
        rows = self._of(case, system)
        if case.block_bytes:
            rows.gb_s.append(gb_s)
        rows.p50_us.append(p50_us)
        rows.p99_us.append(p99_us)

    def _of(self, case: Case, system: str) -> Rows:
        return self._rows.setdefault((case, system), Rows())

    def cases(self, kind: str) -> list[Case]:
        """In the order in which they were first measured."""
        return list(dict.fromkeys(case for case, _ in self._rows if case.kind == kind))

    def systems(self, case: Case) -> list[str]:
        return [system for of, system in self._rows if of == case]

    def find(self, case: Case, system: str) -> Rows | None:
        return self._rows.get((case, system))

    def spread(self, case: Case, system: str, figure: str = "gb_s") -> Spread | None:
        """Of "gb_s", "p50_us", "p99_us" or "cpu of ROLE"; None when it was not measured."""
        values = self._values(case, system, figure)
        return Spread.of(values) if values else None

    def ratio(
        self, case: Case, system: str, to: str, to_case: Case | None = None, figure: str = "gb_s"
    ) -> Spread | None:
        """Of neighbours of one round; above 1 is better than ``to``, for latencies too."""
        ours, theirs = self._values(case, system, figure), self._values(to_case or case, to, figure)
        pairs = list(zip(ours, theirs, strict=False))
        if not pairs:
            return None
        return Spread.of([a / b for a, b in pairs] if figure == "gb_s" else [b / a for a, b in pairs])

    def best(self, case: Case, systems: Callable[[str], bool], figure: str = "gb_s") -> str | None:
        """The one of them with the best median."""
        medians = {
            system: found.median
            for system in self.systems(case)
            if systems(system) and (found := self.spread(case, system, figure))
        }
        return (max if figure == "gb_s" else min)(medians, key=lambda system: medians[system], default=None)

    def _values(self, case: Case, system: str, figure: str) -> list[float]:
        rows = self._rows.get((case, system))
        if rows is None:
            return []
        if figure.startswith("cpu of "):
            return rows.cpu.get(figure.removeprefix("cpu of "), [])
        found: list[float] = getattr(rows, figure)
        return found

    def as_list(self) -> list[dict[str, Any]]:
        """For JSON; :meth:`from_list` reads it."""
        return [
            {
                "case": asdict(case),
                "name": case.name,
                "system": system,
                "rounds": asdict(rows),
                "spread": self._spreads(case, system),
            }
            for (case, system), rows in self._rows.items()
        ]

    def _spreads(self, case: Case, system: str) -> dict[str, Any]:
        roles = self._rows[case, system].cpu
        figures = ("gb_s", "p50_us", "p99_us", *(f"cpu of {role}" for role in roles))
        return {name: asdict(found) for name in figures if (found := self.spread(case, system, name))}

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Results:
        results = cls()
        for row in rows:
            results._rows[Case(**row["case"]), row["system"]] = Rows(**row["rounds"])
        return results


def is_peer(system: str) -> bool:
    return not system.startswith("kvstrata") and system not in ROOFLINES
