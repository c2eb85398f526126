"""From outcomes to verdict and reports, without an engine."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.cli.paged_replay import CaseName, PagedOptions, PagedResult
from kvstrata.cli.paged_replay.case import CaseRun, Outcome
from kvstrata.cli.paged_replay.messages import Ready
from kvstrata.cli.paged_replay.plan import Plan

PROMPTS = [[list(range(40)), list(range(80))], [list(range(40)), list(range(60))]]
OPTIONS = PagedOptions(engines=2)


@pytest.fixture
def plan(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan(PROMPTS)


def run_of(name: CaseName, plan: Plan, local: list[int], external: list[int], ttft_s: list[float]) -> CaseRun:
    outcomes = [
        Outcome(
            index=turn.index,
            ttft_s=ttft_s[turn.index],
            total_s=2 * ttft_s[turn.index],
            prompt_tokens=len(turn.tokens),
            local_tokens=local[turn.index],
            external_tokens=external[turn.index],
            lookup_s=0.1 * ttft_s[turn.index],
            load_s=0.2 * ttft_s[turn.index],
            compute_s=0.4 * ttft_s[turn.index],
            engine_s=0.9 * ttft_s[turn.index],
            output=(7, turn.index),
        )
        for turn in plan.turns
    ]
    counters = [{"connector.loads": 2.0}, {"connector.loads": 1.0}]
    return CaseRun(name, outcomes, 10.0, Ready(0, num_blocks=9, block_bytes=64, aligned_tokens=16), counters)


def changed(run: CaseRun, index: int, **values: object) -> CaseRun:
    outcomes = list(run.outcomes)
    outcomes[index] = dataclasses.replace(outcomes[index], **values)  # type: ignore[arg-type]
    return dataclasses.replace(run, outcomes=outcomes)


@pytest.fixture
def private(plan: Plan) -> CaseRun:
    return run_of("private", plan, [0, 0, 0, 32], [0, 0, 0, 0], [4.0, 8.0, 4.0, 4.0])


@pytest.fixture
def pool(plan: Plan) -> CaseRun:
    return run_of("pool", plan, [0, 0, 0, 32], [0, 32, 32, 16], [4.0, 2.0, 1.0, 1.0])


def test_rates_gains_and_the_ceiling(plan: Plan, private: CaseRun, pool: CaseRun) -> None:
    result = PagedResult.of(OPTIONS, plan, [private, pool])
    assert result.ceiling.tolist() == [0, 32, 32, 48]
    # Engine 0 serves the first and the last prompt, engine 1 the two between them.
    assert result.private_ceiling.tolist() == [0, 0, 32, 32]
    assert [round(case.hit_rate * 220) for case in result.cases] == [32, 112]
    gain = result.gain
    assert gain is not None
    assert gain.computed_mean == pytest.approx(188 / 108)
    assert gain.computed_p50 == pytest.approx(40 / 26)
    assert gain.ttft_mean == pytest.approx(20 / 8)
    assert gain.ttft_p50 == pytest.approx(4 / 1.5)
    assert gain.ttft_each == pytest.approx(4.0), "of 1, 4, 4 and 4 times"
    assert gain.reached_mean == pytest.approx((20 / 8) / (188 / 108))
    assert (result.problems(), result.exit_code) == ([], 0)


def test_the_parts_of_ttft_add_up(plan: Plan, pool: CaseRun) -> None:
    case = PagedResult.of(OPTIONS, plan, [pool]).cases[0]
    parts = case.breakdown_s()
    assert parts == pytest.approx({"queue": 0.4, "lookup": 0.2, "load": 0.4, "compute": 0.8, "other": 0.2})
    assert sum(parts.values()) == pytest.approx(float(np.mean(case.ttft_s)))
    assert (case.requests_a_second, case.tokens_a_second) == (0.4, 22.8)


def test_other_tokens_fail_the_run_and_the_first_difference_is_named(
    plan: Plan, private: CaseRun, pool: CaseRun
) -> None:
    result = PagedResult.of(OPTIONS, plan, [private, changed(pool, 2, output=(7, 9))])
    assert result.exit_code == 1
    assert result.problems() == [
        "1 requests have other tokens, the first: request 2 differs at token 1: private (2,), pool (9,)"
    ]
    assert "FAILED: 1 requests have other tokens" in result.table()


def test_failed_missing_and_cut_requests_fail_the_run(plan: Plan, private: CaseRun, pool: CaseRun) -> None:
    failed = PagedResult.of(OPTIONS, plan, [private, changed(pool, 1, error="engine 1 was lost")])
    assert failed.problems() == ["pool: 1 failed requests, the first: engine 1 was lost"]
    short = PagedResult.of(OPTIONS, plan, [changed(private, 3, output=(7,)), changed(pool, 3, output=(7,))])
    assert short.problems() == [f"{name}: 1 requests are not whole, the first: 3" for name in ("private", "pool")]
    cut = PagedResult.of(OPTIONS, plan, [changed(private, 0, prompt_tokens=39)])
    assert cut.problems() == ["private: 1 requests are not whole, the first: 0"]


def test_all_failed_is_a_report_too(plan: Plan) -> None:
    none = CaseRun("pool", [Outcome(turn.index, error="no engine is left") for turn in plan.turns], 1.0, Ready(0))
    none.ready = Ready(0, aligned_tokens=16)
    result = PagedResult.of(OPTIONS, plan, [none])
    assert result.exit_code == 1
    assert "FAILED: pool: 4 failed requests" in result.table()
    json.dumps(result.to_json())


def test_the_json_report_has_what_the_table_shows(plan: Plan, private: CaseRun, pool: CaseRun) -> None:
    report = json.loads(json.dumps(PagedResult.of(OPTIONS, plan, [private, pool]).to_json()))
    assert report["ceiling_hit_rate"] == pytest.approx(112 / 220)
    assert report["gain"]["reached_mean"] > 1
    case = report["cases"]["pool"]
    assert (case["local_tokens"], case["external_tokens"], case["computed_tokens"]) == (32, 80, 108)
    assert (case["failed_requests"], case["output_tokens"]) == (0, 8)
    assert case["ttft_s"] == pytest.approx({"mean": 2.0, "p50": 1.5, "p90": 3.4})
    assert case["outcomes"][3]["output"] == [7, 3]
    assert (report["differences"], report["problems"], report["exit_code"]) == ([], [], 0)


def test_the_page_is_whole_with_and_without_plots(
    plan: Plan, private: CaseRun, pool: CaseRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = PagedResult.of(OPTIONS, plan, [private, pool])
    page = result.html()
    assert page.count("<svg") == 3 and "Passed: every request has the same greedy tokens" in page
    assert "<script" not in page and not re.search(r"(src|href)=['\"]https?:", page)
    monkeypatch.setattr("kvstrata.cli.paged_replay.page.drawn", lambda plots: [])
    assert "kvstrata[report]" in result.html()
    failed = PagedResult.of(OPTIONS, plan, [private, changed(pool, 2, output=(1, 1))])
    assert "class='verdict bad'" in failed.html()
