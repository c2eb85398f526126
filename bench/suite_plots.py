"""What bench/run.py found, drawn: GB/s by size of block, lookups, and what more clients bring. Needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import Case, size_name
from suite_results import Results


def plot(results: Results, folder: Path) -> list[Path]:
    """SVGs, one a kind of case; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in (("blocks", _blocks), ("lookups", _lookups), ("clients", _clients)):
        figure = draw(results)
        if figure is not None:
            drawn.append(folder / f"{name}.svg")
            figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * columns, 4.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _bars(axes: Any, results: Results, cases: list[Case], labels: list[str], figure: str) -> None:
    """Medians by case and system; lines are quartiles."""
    import matplotlib

    colours = matplotlib.colormaps["tab20"]
    systems = list(dict.fromkeys(system for case in cases for system in results.systems(case)))
    width = 0.85 / max(1, len(systems))
    for index, system in enumerate(systems):
        there = [(x, spread) for x, case in enumerate(cases) if (spread := results.spread(case, system, figure))]
        at = [x + (index - (len(systems) - 1) / 2) * width for x, _ in there]
        spread = [[one.median - one.low for _, one in there], [one.high - one.median for _, one in there]]
        heights = [one.median for _, one in there]
        axes.bar(at, heights, width, yerr=spread, label=system, color=colours(index % 20), error_kw={"lw": 0.7})
    axes.set(xticks=range(len(cases)), xticklabels=labels)
    axes.grid(axis="y", alpha=0.25)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right upper")


def _blocks(results: Results) -> Any:
    found = results.cases("blocks")
    if not found:
        return None
    batches = sorted({case.blocks for case in found})
    figure, grid = _figure(2, len(batches))
    for row, op in enumerate(("load", "store")):
        for column, batch in enumerate(batches):
            cases = sorted((c for c in found if c.op == op and c.blocks == batch), key=lambda case: case.block_bytes)
            _bars(grid[row][column], results, cases, [size_name(case.block_bytes) for case in cases], "gb_s")
            grid[row][column].set(title=f"{op}, {batch} a call", ylabel="GB/s")
    _legend(figure, grid[0][0])
    return figure


def _lookups(results: Results) -> Any:
    cases = sorted(results.cases("lookup"), key=lambda case: (case.note, case.blocks))
    if not cases:
        return None
    figure, grid = _figure(1, 2)
    _bars(grid[0][0], results, cases, [f"{case.blocks:,}\n{case.note}" for case in cases], "p50_us")
    grid[0][0].set(title="lookup, p50", ylabel="us", yscale="log")
    grid[0][0].tick_params(axis="x", labelsize=5)
    _bars(grid[0][1], results, cases, [f"{case.blocks:,}\n{case.note}" for case in cases], "p99_us")
    grid[0][1].set(title="lookup, p99", ylabel="us", yscale="log")
    grid[0][1].tick_params(axis="x", labelsize=5)
    _legend(figure, grid[0][0])
    return figure


def _clients(results: Results) -> Any:
    found = results.cases("clients")
    if not found:
        return None
    ops = [op for op in ("load", "store") if any(case.op == op for case in found)]  # first loads may be alone
    figure, grid = _figure(1, len(ops))
    for column, op in enumerate(ops):
        cases = sorted((case for case in found if case.op == op), key=lambda case: int(case.note.split()[0]))
        _bars(grid[0][column], results, cases, [case.note for case in cases], "gb_s")
        grid[0][column].set(
            title=f"{op}, {cases[0].blocks} x {size_name(cases[0].block_bytes)} a call", ylabel="GB/s together"
        )
    _legend(figure, grid[0][0])
    return figure
