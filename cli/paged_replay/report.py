"""A paged replay's result as a terminal table with notes."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console
from rich.table import Table

from kvstrata.cli.paged_replay.case_result import CaseResult, Floats, Gain
from kvstrata.cli.paged_replay.result import PagedResult
from kvstrata.cli.sizes import format_size

TABLE_COLUMNS = 110
PERCENTILES = (50, 90)
VERDICT = "every request has the same greedy tokens in all cases, none failed."

#: Of what connectors count, what a reader of the table wants to know.
_COUNTED = (
    "loads", "loads_partial", "loads_failed", "load_tokens", "store_blocks_stored", "store_blocks_already_present",
    "store_blocks_failed", "store_blocks_skipped", "pool_lost",
)  # fmt: skip
_TITLES = {"none": "no cache", "private": "private only", "pool": "pool"}


def text_report(result: PagedResult) -> str:
    """Table and notes, without colours; ends with a newline."""
    out = io.StringIO()
    console = Console(file=out, width=TABLE_COLUMNS, highlight=False, color_system=None)
    console.print(title(result), markup=False)
    table = Table()
    table.add_column("", no_wrap=True)
    for name in columns(result):
        table.add_column(name, justify="right")
    for label, cells in rows(result):
        table.add_row(label, *cells)
    console.print(table)
    for line in notes(result):
        console.print(line, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def title(result: PagedResult) -> str:
    options, plan = result.options, result.plan
    return (
        f"{plan.trace_name}: {len(plan.sessions)} sessions, {len(plan.turns)} requests, "
        f"{options.engines} engines, {options.routing}, {options.concurrency} at once, model {options.model}"
    )


def columns(result: PagedResult) -> list[str]:
    """The cases that ran, and the cache of infinite size that all would share."""
    return [*(_TITLES[case.name] for case in result.cases), "ceiling"]


def rows(result: PagedResult) -> list[tuple[str, list[str]]]:
    """(label, a cell for each column) of the table."""
    cases, prompts = result.cases, result.plan.prompt_tokens
    ceiling = int(result.ceiling.sum())
    shares = [case.breakdown_s() for case in cases]
    return [
        ("token hit rate", [*(_percent(case.hit_rate) for case in cases), _percent(result.ceiling_rate)]),
        ("  from the engine's own cache", [*(_percent(case.local_tokens.sum() / prompts) for case in cases), ""]),
        ("  from the pool", [*(_percent(case.external_tokens.sum() / prompts) for case in cases), ""]),
        ("tokens computed", [*(f"{case.computed_tokens.sum():,}" for case in cases), f"{prompts - ceiling:,}"]),
        ("TTFT mean", [*(_ms(float(np.mean(case.ttft_s))) if len(case.ttft_s) else "-" for case in cases), ""]),
        *((f"TTFT p{p}", [*(_percentile(case, p) for case in cases), ""]) for p in PERCENTILES),
        *((f"  mean TTFT in {part}", [*(_ms(share[part]) for share in shares), ""]) for part in shares[0]),
        ("requests a second", [*(f"{case.requests_a_second:.2f}" for case in cases), ""]),
        ("tokens a second", [*(f"{case.tokens_a_second:,.0f}" for case in cases), ""]),
    ]


def notes(result: PagedResult) -> list[str]:
    """What the table has no column for, a line each."""
    options, plan, ready = result.options, result.plan, result.cases[0].run.ready
    lines = [
        f"prompts: {plan.prompt_tokens:,} tokens ({_tokenizer(result)}), "
        f"{plan.skipped} skipped: empty, or more than {options.max_prompt_tokens:,} tokens; "
        f"{options.output_tokens} tokens generated at most, recorded replies are not fed back",
        f"each engine's own cache: {ready.num_blocks:,} blocks, {format_size(options.kv_bytes)}; hits are multiples of "
        f"{ready.aligned_tokens} tokens; without bounds such caches would hit {_percent(result.private_ceiling_rate)}",
        "measured: all of it. TTFT from before a request is sent to its first token; the ceiling is a simulator's",
    ]
    if options.faults:
        lines.append(f"faults: {_percent(options.faults)} of blocks loaded from the pool were made to fail")
    if result.gain is not None:
        lines += _gains(result.gain)
    for case in result.cases:
        failed = sum(bool(outcome.error) for outcome in case.run.outcomes)
        lines.append(f"{_TITLES[case.name]}: {failed} failed requests, {case.run.seconds:.1f} s{_counters(case)}")
        lines += [f"fault: {fault}" for fault in case.run.faults]
    lines.append(f"requests with other tokens than in the first case: {len(result.differences())}")
    lines += [f"FAILED: {problem}" for problem in result.problems()]
    return lines


def _gains(gain: Gain) -> list[str]:
    return [
        f"private against pool, mean: {gain.computed_mean:.2f}x tokens computed, {gain.ttft_mean:.2f}x TTFT "
        f"({_percent(gain.reached_mean)} of it)",
        f"private against pool, p50: {gain.computed_p50:.2f}x tokens computed, {gain.ttft_p50:.2f}x TTFT "
        f"({_percent(gain.reached_p50)} of it)",
        f"private against pool, request by request, p50: {gain.computed_each:.2f}x tokens computed, "
        f"{gain.ttft_each:.2f}x TTFT ({_percent(gain.reached_each)} of it)",
    ]


def _counters(case: CaseResult) -> str:
    """What the engines' connectors counted, in so far as there is any."""
    counts = {name: case.run.counted(f"connector.{name}") for name in _COUNTED}
    return "".join(f", {name.replace('_', ' ')} {count:,.0f}" for name, count in counts.items() if count)


def _tokenizer(result: PagedResult) -> str:
    options = result.options
    return f"BPE of {options.bpe_tokens} trained on this text" if options.bpe_tokens else options.tokenizer


def _percentile(case: CaseResult, percent: int) -> str:
    return _ms(float(np.percentile(case.ttft_s, percent))) if len(case.ttft_s) else "-"


def pair_s(values: Floats) -> dict[str, float]:
    """Mean and percentiles by name; zeros for no values."""
    if not len(values):
        return dict.fromkeys(("mean", *(f"p{p}" for p in PERCENTILES)), 0.0)
    return {"mean": float(np.mean(values))} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
