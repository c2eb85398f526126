"""What bench/transfer.py found: medians over rounds, ratios of ours to a roofline in the same round, their spread."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Round
from transfer_shapes import SHAPES, Shape

Key = tuple[str, Shape, str]

#: What a system is held against, by how its name begins; the first one is its budget's.
ROOFLINES: Final = {
    ("kvstrata-shm", "load"): ("memcpy",),
    ("kvstrata-shm", "store"): ("memcpy+xxh3", "memcpy"),
    ("kvstrata-tcp", "load"): ("socket",),
    ("kvstrata-tcp", "store"): ("socket",),
    ("kvstrata-rdma", "load"): ("nixl", "vm_readv"),
    ("kvstrata-rdma", "store"): ("nixl", "vm_readv"),
    ("kvstrata-engine", "load"): ("nixl",),
    ("kvstrata-engine", "store"): ("nixl",),
    ("nixl", "load"): ("vm_readv",),
    ("nixl", "store"): ("vm_readv",),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and quartiles over rounds."""

    to: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} x {self.to} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One system, shape and operation. ``gb_s``: 10^9 bytes a second: median and quartiles over rounds."""

    system: str
    shape: str
    op: str
    gb_s: float
    gb_s_low: float
    gb_s_high: float
    p50_us: float
    p99_us: float
    cpu_s_per_gib: float
    rounds: int
    ratios: tuple[Ratio, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Results:
    """Rounds in the order in which they ran: those with one index ran beside each other."""

    def __init__(self) -> None:
        self._rounds: dict[Key, list[Round]] = defaultdict(list)
        self.repeated = 0  #: turns that were thrown away, as a call missed blocks

    def add(self, system: str, shape: Shape, op: str, one: Round) -> None:
        self._rounds[(system, shape, op)].append(one)

    def rows(self) -> list[Row]:
        order = {shape: index for index, shape in enumerate(SHAPES)}
        keys = sorted(self._rounds, key=lambda key: (key[2], order[key[1]], key[0].startswith("kvstrata"), key[0]))
        return [self._row(key) for key in keys]

    def _row(self, key: Key) -> Row:
        system, shape, op = key
        rounds = self._rounds[key]
        speeds = [_gb_s(one) for one in rounds]
        calls = sorted(seconds for one in rounds for seconds in one.seconds)
        gib = rounds[0].nbytes / (1 << 30)
        return Row(
            system=system,
            shape=shape.name,
            op=op,
            gb_s=round(statistics.median(speeds), 3),
            gb_s_low=round(_quartiles(speeds)[0], 3),
            gb_s_high=round(_quartiles(speeds)[1], 3),
            p50_us=round(statistics.median(calls) * 1e6, 1),
            p99_us=round(calls[min(len(calls) - 1, int(len(calls) * 0.99))] * 1e6, 1),
            cpu_s_per_gib=round(statistics.median(one.cpu_seconds for one in rounds) / gib, 4),
            rounds=len(rounds),
            ratios=tuple(self._ratios(key)),
        )

    def _ratios(self, key: Key) -> list[Ratio]:
        system, shape, op = key
        found = []
        for (prefix, of), rooflines in ROOFLINES.items():
            if of != op or not system.startswith(prefix):
                continue
            for roofline in rooflines:
                theirs = self._rounds.get((roofline, shape, op), [])
                ratios = [_gb_s(ours) / _gb_s(best) for ours, best in zip(self._rounds[key], theirs, strict=False)]
                if ratios:
                    low, high = _quartiles(ratios)
                    found.append(Ratio(roofline, *(round(x, 3) for x in (statistics.median(ratios), low, high))))
        return found


def _gb_s(one: Round) -> float:
    return one.nbytes / sum(one.seconds) / 1e9


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def say(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "shape", "system", "GB/s", "quartiles", "p50 us", "p99 us", "CPU s/GiB", "ratios")
    for row in rows:
        spread = f"{row.gb_s_low:.2f} to {row.gb_s_high:.2f}"
        ratios = "\n".join(map(str, row.ratios))
        figures = (f"{row.gb_s:.2f}", spread, f"{row.p50_us:.0f}", f"{row.p99_us:.0f}", f"{row.cpu_s_per_gib:.2f}")
        table.add_row(row.op, row.shape, row.system, *figures, ratios)
    Console(width=170).print(table)


def plot(rows: list[Row], path: Path) -> bool:
    """An SVG of bars by shape, one row of axes an operation; lines are quartiles. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib.figure import Figure

    systems = list(dict.fromkeys(row.system for row in rows))
    colours = matplotlib.colormaps["tab20"]
    figure = Figure(figsize=(13, 8), layout="constrained")
    for axes, op in zip(figure.subplots(2, 1), ("load", "store"), strict=True):
        of_op = {(row.system, row.shape): row for row in rows if row.op == op}
        shapes = list(dict.fromkeys(row.shape for row in rows if row.op == op))
        width = 0.85 / max(1, len(systems))
        for index, system in enumerate(systems):
            there = [(x, of_op[system, shape]) for x, shape in enumerate(shapes) if (system, shape) in of_op]
            heights = [row.gb_s for _, row in there]
            spread = [
                [row.gb_s - row.gb_s_low for _, row in there],
                [row.gb_s_high - row.gb_s for _, row in there],
            ]
            at = [x + (index - len(systems) / 2) * width for x, _ in there]
            colour = colours(index % 20)
            axes.bar(at, heights, width, yerr=spread, label=system, color=colour, error_kw={"lw": 0.7})
        axes.set(title=op, ylabel="GB/s", xticks=range(len(shapes)), xticklabels=shapes)
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return True
