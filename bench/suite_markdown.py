"""What bench/run.py found, as the sections of docs/performance.md: between its two marks, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import FIRST_LOADS, Case, size_name
from suite_budgets import BUDGETS, Verdict, judge, unit
from suite_results import Results, Spread

BEGIN: Final = "<!-- what bench/run.py wrote: begin -->"
END: Final = "<!-- what bench/run.py wrote: end -->"
#: Column -> system; memcpy's is another for stores.
COLUMNS: Final = {
    "ours shm": "kvstrata-shm",
    "ours shm, allocated": "kvstrata-shm, allocated",
    "ours tcp": "kvstrata-tcp",
    "memcpy (store: + xxh3)": "memcpy",
    "socket": "socket",
    "socket + xxh3": "socket+xxh3",
    "Mooncake tcp": "mooncake-tcp",
    "Mooncake shm": "mooncake-shm",
    "OpenLake": "openlake",
    "Redis unix": "redis-unix",
}
OURS: Final = ("kvstrata-shm", "kvstrata-shm, allocated", "kvstrata-tcp")
ROLES: Final = ("client", "node", "master")


def sections(results: Results, told: dict[str, Any]) -> str:
    """Everything between the marks; tables of which nothing was measured are left out."""
    parts = [
        _intro(told),
        "## Against the budgets\n\n" + _budgets(results),
        _titled("## All cases, GB/s", _blocks(results)),
        _titled("## Scattered pages", _plain(results, "paged", list(COLUMNS.values())[:6])),
        _titled("## Lookups", _lookups(results)),
        _titled("## Several clients at once", _clients(results)),
        _titled("## Reads and writes at 90 % full", _plain(results, "mixed", [*OURS, "memcpy", "memcpy+xxh3"])),
        _titled("## From SSD", _plain(results, "ssd", [*OURS, "preadv"])),
        _titled("## One block beside a stream", _latency(results)),
        _titled("## CPU seconds a GiB", _cpu(results)),
    ]
    return "\n\n".join(part for part in parts if part)


def write(path: Path, text: str) -> None:
    """Put ``text`` between the marks of a page. Raises ``SystemExit`` when it has none."""
    page = path.read_text()
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{path} has no place for the figures: put these two lines there:\n{BEGIN}\n{END}")
    before, _, rest = page.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if text else ""


def _intro(told: dict[str, Any]) -> str:
    machine, versions = told["machine"], told["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    loads = f"{machine['load_before']} before the run, {told.get('load_after', '?')} after it"
    text = (
        f"{told['rounds']} rounds in turns on {machine['cpus']} cores ({machine['cpu']}, "
        f"{machine['memory_gib']:g} GiB), {machine['system']}, Python {machine['python']}.\n"
        "Medians over rounds; in brackets quartiles; a ratio is between neighbours of one round.\n"
        f"Versions: {named}.\nLoad average: {loads}."
    )
    return text + (f" **{told['busy'].capitalize()}.**" if told.get("busy") else "")


def _budgets(results: Results) -> str:
    verdicts = [judge(results, budget) for budget in BUDGETS]
    head = ("what", "goal", "ours", "roofline or other", "ratio", "best peer", "")
    return "A ratio above 1 is better than the other.\n\n" + table(head, [_budget(one) for one in verdicts])


def _budget(verdict: Verdict) -> list[str]:
    figure = verdict.budget.figure
    whom = verdict.against + (f", {verdict.budget.against_case.note}" if verdict.budget.against_case else "")
    return [
        verdict.budget.what,
        verdict.goal,
        _figure(verdict.ours, figure),
        f"{_figure(verdict.theirs, figure)} ({whom})" if verdict.theirs else "-",
        _ratio(verdict.ratio),
        f"{_figure(verdict.peers, figure)} ({verdict.best_peer})" if verdict.peers else "-",
        verdict.word,
    ]


def _figure(spread: Spread | None, figure: str) -> str:
    return "-" if spread is None else f"{_digits(spread.median)} {unit(figure)}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _cell(spread: Spread | None, form: str = ".3f") -> str:
    return "-" if spread is None else f"{spread.median:{form}}"


def _named(case: Case, column: str) -> str:
    system = COLUMNS[column]
    return "memcpy+xxh3" if system == "memcpy" and case.op == "store" else system


def _blocks(results: Results) -> str:
    cases = sorted(results.cases("blocks"), key=lambda case: (case.op, case.block_bytes, case.blocks))
    rows = [
        [
            case.op,
            size_name(case.block_bytes),
            str(case.blocks),
            *(_cell(results.spread(case, _named(case, name))) for name in COLUMNS),
        ]
        for case in cases
    ]
    return table(("op", "block", "blocks a call", *COLUMNS), rows) if rows else ""


def _plain(results: Results, kind: str, systems: Sequence[str]) -> str:
    """GB/s with quartiles, p50 and p99 of calls by system."""
    rows = []
    for case in sorted(results.cases(kind), key=lambda case: case.name):
        for system in systems:
            found = results.spread(case, system)
            if found is not None:
                latency = [_cell(results.spread(case, system, figure), ",.0f") for figure in ("p50_us", "p99_us")]
                spread = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
                rows.append([case.name, system, spread, *latency, *_costs(results, case, system)])
    return (
        table(("case", "system", "GB/s", "p50 us", "p99 us", *(f"CPU s/GiB, {role}" for role in ROLES)), rows)
        if rows
        else ""
    )


def _costs(results: Results, case: Case, system: str) -> list[str]:
    return [_cell(results.spread(case, system, f"cpu of {role}"), ".3f") for role in ROLES]


def _lookups(results: Results) -> str:
    rows = []
    for case in sorted(results.cases("lookup"), key=lambda case: (case.blocks, case.note)):
        for system in sorted(results.systems(case)):
            p50, p99 = (results.spread(case, system, figure) for figure in ("p50_us", "p99_us"))
            rows.append([f"{case.blocks:,}", case.note, system, _cell(p50, ",.0f"), _cell(p99, ",.0f")])
    text = "`echo`: a question and an answer as long, between two Python processes over a unix socket.\n\n"
    return text + table(("hashes", "which", "system", "p50 us", "p99 us"), rows) if rows else ""


def _clients(results: Results) -> str:
    cases = sorted(results.cases("clients"), key=lambda case: (case.op, int(case.note.split()[0])))
    rows, warm = [], [case for case in cases if not case.note.endswith(FIRST_LOADS)]
    for case in cases:
        fewest = next((one for one in warm if one.op == case.op), None)
        for system in results.systems(case):
            of_one = results.ratio(case, system, system, fewest) if fewest else None
            rows.append(
                [
                    case.name,
                    system,
                    _cell(results.spread(case, system), ".2f"),
                    _ratio(of_one),
                    *_costs(results, case, system),
                ]
            )
    head = (
        "case",
        "system",
        "GB/s together",
        f"to {warm[0].note if warm else 'warm ones'}",
        *(f"CPU s/GiB, {role}" for role in ROLES),
    )
    return table(head, rows) if rows else ""


def _latency(results: Results) -> str:
    rows = []
    for case in results.cases("latency"):
        quiet = Case("blocks", case.op, case.blocks, case.block_bytes)
        for system in results.systems(case):
            figures = [
                _cell(results.spread(of, system, figure), ",.0f")
                for of in (case, quiet)
                for figure in ("p50_us", "p99_us")
            ]
            rows.append([case.name, system, *figures])
    head = ("case", "system", "p50 us", "p99 us", "alone, p50 us", "alone, p99 us")
    return table(head, rows) if rows else ""


def _cpu(results: Results) -> str:
    rows = []
    for case in sorted(results.cases("blocks"), key=lambda case: (case.op, case.block_bytes, case.blocks)):
        for system in (*OURS, "memcpy", "memcpy+xxh3", "socket", "socket+xxh3"):
            if results.find(case, system) is not None:
                rows.append([case.name, system, *_costs(results, case, system)])
    text = "Of a socket's roofline, `node` is the process at its other end.\n\n"
    return text + table(("case", "system", *ROLES), rows) if rows else ""
