"""A paged replay's result as plain data: rates are 0 to 1, times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict

from kvstrata.cli.paged_replay.case_result import CaseResult
from kvstrata.cli.paged_replay.report import pair_s
from kvstrata.cli.paged_replay.result import PagedResult


def json_report(result: PagedResult) -> dict[str, object]:
    """Totals, every case, and every request of every case."""
    options, plan, gain = result.options, result.plan, result.gain
    ready = result.cases[0].run.ready
    return {
        "engine": "paged",
        "trace": plan.trace_name,
        "agent": options.agent,
        "sessions": len(plan.sessions),
        "requests": len(plan.turns),
        "skipped": plan.skipped,
        "prompt_tokens": plan.prompt_tokens,
        "model": options.model,
        "tokenizer": options.tokenizer,
        "engines": options.engines,
        "nodes": options.nodes,
        "routing": options.routing,
        "concurrency": options.concurrency,
        "think_cap_s": options.think_cap_s,
        "block_tokens": options.block_tokens,
        "block_bytes": ready.block_bytes,
        "engine_blocks": ready.num_blocks,
        "engine_kv_bytes": options.kv_bytes,
        "pool_bytes": options.pool_bytes_all,
        "max_prompt_tokens": options.max_prompt_tokens,
        "output_tokens": options.output_tokens,
        "faults": options.faults,
        "seed": options.seed,
        "cases": {case.name: _case_json(case) for case in result.cases},
        "ceiling_hit_rate": result.ceiling_rate,
        "private_ceiling_hit_rate": result.private_ceiling_rate,
        "gain": None
        if gain is None
        else {
            **asdict(gain),
            "reached_mean": gain.reached_mean,
            "reached_p50": gain.reached_p50,
            "reached_each": gain.reached_each,
        },
        "differences": result.differences(),
        "problems": result.problems(),
        "exit_code": result.exit_code,
    }


def _case_json(case: CaseResult) -> dict[str, object]:
    return {
        "hit_rate": case.hit_rate,
        "local_tokens": int(case.local_tokens.sum()),
        "external_tokens": int(case.external_tokens.sum()),
        "computed_tokens": int(case.computed_tokens.sum()),
        "output_tokens": case.output_tokens,
        "ttft_s": pair_s(case.ttft_s),
        "total_s": pair_s(case.total_s),
        "ttft_parts_s": case.breakdown_s(),
        "seconds": case.run.seconds,
        "requests_a_second": case.requests_a_second,
        "tokens_a_second": case.tokens_a_second,
        "failed_requests": sum(bool(outcome.error) for outcome in case.run.outcomes),
        "counters": case.run.counters,
        "lost": list(case.run.faults),
        "outcomes": [asdict(outcome) for outcome in case.run.outcomes],
    }
