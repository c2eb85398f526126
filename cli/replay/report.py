"""A replay's result as a terminal table and as JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstrata.cli.replay.result import Case, Floats, ReplayResult

PERCENTILES = (50, 99)
TABLE_COLUMNS = 120


def text_report(result: ReplayResult) -> str:
    """Table and notes, without colours; ends with a newline."""
    out = io.StringIO()
    console = Console(file=out, width=TABLE_COLUMNS, highlight=False, color_system=None)
    console.print(_table(result))
    for line in notes(result):
        console.print(line, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _table(result: ReplayResult) -> Table:
    table = Table(title=title(result), title_justify="left")
    table.add_column("", no_wrap=True)
    for case in result.cases.all():
        table.add_column(case.name, justify="right")
    for label, cells in rows(result):
        table.add_row(label, *cells)
    return table


def title(result: ReplayResult) -> str:
    schedule, options = result.schedule, result.options
    return (
        f"{schedule.trace_name}: {schedule.sessions} sessions, {len(schedule.turns)} requests, "
        f"{options.engines} engines, {options.routing}, seed {options.seed}"
    )


def rows(result: ReplayResult) -> list[tuple[str, list[str]]]:
    """(label, a cell for each case) of the table."""
    cases = result.cases.all()
    measured = [format_pair(result.measured_ttft_s) if case is result.cases.pool else "" for case in cases]
    return [
        ("token hit rate", [_percent(case.hits.rate()) for case in cases]),
        ("  from private caches", [_percent(case.hits.private_rate()) for case in cases]),
        ("  from the pool", [_pool_cell(result, case) for case in cases]),
        ("tokens computed", [f"{int(case.hits.computed.sum()) / 1e6:,.1f} M" for case in cases]),
        ("TTFT p50 / p99 in s", [format_pair(case.latencies.ttft_s) for case in cases]),
        ("  with measured calls", measured),
    ]


def _pool_cell(result: ReplayResult, case: Case) -> str:
    return "" if case in (result.cases.none, result.cases.private) else _percent(case.hits.pool_rate())


def notes(result: ReplayResult) -> list[str]:
    """What the table has no column for, a line each."""
    traffic, options = result.traffic, result.options
    calls_ms = 1e3 * _percentiles(result.pool_calls_s)
    lines = [
        f"moved: loaded {traffic.loaded_bytes / 1e9:.2f} GB at {traffic.load_gb_s:.2f} GB/s, "
        f"stored {traffic.stored_bytes / 1e9:.2f} GB at {traffic.store_gb_s:.2f} GB/s, in {traffic.seconds:.1f} s",
        f"lookup + load of a request: p50 {calls_ms[0]:.2f} ms, p99 {calls_ms[1]:.2f} ms (measured)",
        f"wrong bytes: {traffic.wrong_bytes}; failed requests: {traffic.failed_requests}",
        f"pool against its simulator: {result.oracle_points:+.2f} points; "
        f"against an infinite pool: {result.ceiling_points:+.2f} points",
        f"private {options.private_tokens:,} tokens an engine; pool {result.pool_blocks:,} blocks of "
        f"{options.block_tokens} tokens; payload {options.bytes_per_token} bytes a token, every loaded byte verified",
        "TTFT is queue + load + prefill, modelled with "
        + ", ".join(f"{name} {value:g}" for name, value in result.costs.stated().items()),
    ]
    if set(traffic.tiers) - {"dram"}:
        lines.append(
            "loaded blocks by tier: " + ", ".join(f"{name} {count:,}" for name, count in traffic.tiers.items())
        )
    if traffic.reasons:
        lines.append("not served: " + ", ".join(f"{count} x {name}" for name, count in traffic.reasons.items()))
    if traffic.unsettled:
        lines.append(f"{traffic.unsettled} requests waited in vain for the directory to show blocks just stored")
    lines += [f"fault: {fault}" for fault in result.faults]
    lines += [f"FAILED: {problem}" for problem in result.problems()]
    return lines


def json_report(result: ReplayResult) -> dict[str, object]:
    """Plain data; rates are 0 to 1, times in seconds, sizes in bytes."""
    schedule, options, traffic = result.schedule, result.options, result.traffic
    return {
        "trace": schedule.trace_name,
        "sessions": schedule.sessions,
        "requests": len(schedule.turns),
        "prompt_tokens": schedule.tokens_in,
        "closed_loop": schedule.closed_loop,
        "virtual_s": schedule.turns[-1].at_s if schedule.turns else 0.0,
        "engines": options.engines,
        "nodes": options.nodes,
        "routing": options.routing,
        "private_tokens": options.private_tokens,
        "block_tokens": options.block_tokens,
        "bytes_per_token": options.bytes_per_token,
        "pool_blocks": result.pool_blocks,
        "pool_ssd_bytes": options.pool_ssd_bytes,
        "eviction": options.eviction.value,
        "tenants": options.tenants,
        "think_cap_s": options.think_cap_s,
        "session_start_s": options.session_start_s,
        "seed": options.seed,
        "cost_model": result.costs.stated(),
        "cases": {
            key: _case_json(getattr(result.cases, key)) for key in ("none", "private", "pool", "oracle", "ceiling")
        },
        "measured_ttft_s": _pair_json(result.measured_ttft_s),
        "lookup_load_s": _pair_json(result.pool_calls_s),
        "seconds": traffic.seconds,
        "loaded_bytes": traffic.loaded_bytes,
        "stored_bytes": traffic.stored_bytes,
        "load_gb_s": traffic.load_gb_s,
        "store_gb_s": traffic.store_gb_s,
        "wrong_bytes": traffic.wrong_bytes,
        "failed_requests": traffic.failed_requests,
        "unsettled_lookups": traffic.unsettled,
        "reasons": traffic.reasons,
        "tiers": traffic.tiers,
        "oracle_points": result.oracle_points,
        "ceiling_points": result.ceiling_points,
        "faults": list(result.faults),
        "problems": result.problems(),
        "exit_code": result.exit_code,
    }


def _case_json(case: Case) -> dict[str, object]:
    return {
        "hit_rate": case.hits.rate(),
        "private_rate": case.hits.private_rate(),
        "pool_rate": case.hits.pool_rate(),
        "computed_tokens": int(case.hits.computed.sum()),
        "ttft_s": _pair_json(case.latencies.ttft_s),
    }


def _pair_json(values: Floats) -> dict[str, float]:
    return dict(zip(("p50", "p99"), _percentiles(values).tolist(), strict=True))


def _percentiles(values: Floats) -> Floats:
    return np.percentile(values, PERCENTILES) if len(values) else np.zeros(len(PERCENTILES))


def format_pair(values: Floats) -> str:
    """The two percentiles, three significant digits each."""
    return " / ".join(_seconds(value) for value in _percentiles(values).tolist())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    digits: Sequence[int] = (3, 2, 1, 0)
    return f"{value:,.{digits[sum(value >= bound for bound in (1, 10, 100))]}f}"
