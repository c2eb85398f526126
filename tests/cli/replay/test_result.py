"""From schedule to report without a process: the engine stand-ins run here, over a pool that is a dict."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstrata.cli.replay import ReplayOptions
from kvstrata.cli.replay import plots as plots_module
from kvstrata.cli.replay.coordinator import Measured
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.engine import Engine
from kvstrata.cli.replay.generator import generate_trace
from kvstrata.cli.replay.messages import Outcome, Setup, Work
from kvstrata.cli.replay.result import ReplayResult, assemble
from kvstrata.cli.replay.schedule import Schedule, build_schedule
from kvstrata.storage.eviction.setting import EvictionOrder

if TYPE_CHECKING:
    from kvstrata.client import Client

OPTIONS = ReplayOptions(engines=2, sessions=5, scale=1.0, bytes_per_token=1, tenants=2, private_tokens=100_000, seed=4)


@pytest.fixture
def schedule() -> Schedule:
    return build_schedule(generate_trace(5, 4), OPTIONS, CostModel())


@pytest.fixture
def measured(schedule: Schedule, setup: Setup, pool: Any) -> Measured:
    sized = dataclasses.replace(
        setup,
        block_bytes=OPTIONS.block_bytes,
        block_tokens=OPTIONS.block_tokens,
        private_blocks=OPTIONS.private_blocks,
        staging_blocks=64,
    )
    engines = [Engine(sized, cast("Client", pool)) for _ in range(OPTIONS.engines)]
    outcomes = []
    for turn in schedule.turns:
        body = turn.blocks.tobytes() + schedule.hashes[turn.blocks].tobytes()
        outcome = engines[turn.engine].serve(Work(turn.index, turn.salt, turn.hit_limit, 0, body))
        outcomes.append(dataclasses.replace(outcome, index=turn.index))
    return Measured(outcomes, 1.0)


def result_of(schedule: Schedule, measured: Measured, losses: tuple[str, ...] = ()) -> ReplayResult:
    return assemble(OPTIONS, CostModel(), schedule, OPTIONS.pool_blocks, measured, losses)


def with_outcome(measured: Measured, **changes: object) -> Measured:
    changed = dataclasses.replace(measured.outcomes[-1], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(measured, outcomes=[*measured.outcomes[:-1], changed])


def test_the_engines_do_what_the_simulator_says(schedule: Schedule, measured: Measured) -> None:
    result = result_of(schedule, measured)
    cases = result.cases
    assert (cases.pool.hits.private == cases.oracle.hits.private).all()
    assert (cases.pool.hits.pool == cases.oracle.hits.pool).all()
    assert result.ceiling_points == 0
    assert 0 < cases.private.hits.rate() < cases.pool.hits.rate()
    assert (result.problems(), result.exit_code) == ([], 0)


def test_wrong_bytes_and_failed_requests_fail_the_run(schedule: Schedule, measured: Measured) -> None:
    wrong = result_of(schedule, with_outcome(measured, wrong_bytes=3))
    assert (wrong.problems(), wrong.exit_code) == (["3 wrong bytes"], 1)
    failed = result_of(schedule, with_outcome(measured, error="ValueError: no"))
    assert failed.exit_code == 1
    assert "1 failed requests, the first: ValueError: no" in failed.table()


def test_a_gap_to_the_simulator_fails_the_run_unless_there_was_a_fault(schedule: Schedule, measured: Measured) -> None:
    missed = [dataclasses.replace(outcome, pool_blocks=0) for outcome in measured.outcomes]
    gap = dataclasses.replace(measured, outcomes=missed)
    assert "points from its simulator" in result_of(schedule, gap).problems()[0]
    assert result_of(schedule, gap, losses=("master was ended by SIGKILL",)).exit_code == 0
    seen = [dataclasses.replace(outcome, reasons={"node_lost": 2}) for outcome in missed]
    assert result_of(schedule, dataclasses.replace(gap, outcomes=seen)).exit_code == 1


def test_hitting_more_than_lru_is_an_error_only_where_the_pool_is_lru(schedule: Schedule, measured: Measured) -> None:
    def judged(order: EvictionOrder) -> list[str]:
        options = dataclasses.replace(OPTIONS, eviction=order)
        return assemble(options, CostModel(), schedule, 1, measured, ()).problems()

    assert judged(EvictionOrder.SEGMENTED) == []
    assert "points from its simulator" in judged(EvictionOrder.LRU)[0]


def test_the_table_has_all_cases_side_by_side(schedule: Schedule, measured: Measured) -> None:
    table = result_of(schedule, measured).table()
    for case in ("no cache", "private only", "pool (measured)", "pool (simulator)", "infinite pool"):
        assert case in table
    assert re.search(r"token hit rate +│? +0\.0 % ", table)
    assert "wrong bytes: 0; failed requests: 0" in table
    assert "\x1b" not in table
    assert max(map(len, table.splitlines())) <= 120


def test_json_is_plain_and_complete(schedule: Schedule, measured: Measured) -> None:
    data = json.loads(json.dumps(result_of(schedule, measured).to_json()))
    assert data["exit_code"] == 0
    assert data["requests"] == len(schedule.turns)
    assert set(data["cases"]) == {"none", "private", "pool", "oracle", "ceiling"}
    assert data["cases"]["none"]["computed_tokens"] == schedule.tokens_in
    assert data["loaded_bytes"] > 0
    for pair in (data["measured_ttft_s"], data["lookup_load_s"], data["cases"]["pool"]["ttft_s"]):
        assert 0 <= pair["p50"] <= pair["p99"]


def test_the_page_is_self_contained_and_follows_the_readers_colours(schedule: Schedule, measured: Measured) -> None:
    page = result_of(schedule, measured).html()
    assert page.count("<svg") == 3
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert plots_module._INK not in page
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=[\"']http", page)
    assert len(page) < 400_000


def test_names_are_escaped_in_the_page(schedule: Schedule, measured: Measured) -> None:
    odd = dataclasses.replace(schedule, trace_name="<b>&")
    assert "<b>" not in result_of(odd, measured).html()


def test_a_page_without_matplotlib_says_so(
    schedule: Schedule, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.cli.replay.page.svg_plots", lambda _result: [])
    assert "kvstrata[report]" in result_of(schedule, measured).html()


def test_a_failed_outcome_hits_nothing(schedule: Schedule) -> None:
    failed = Measured([Outcome(index=turn.index, error="gone") for turn in schedule.turns])
    result = result_of(schedule, failed)
    assert result.cases.pool.hits.rate() == 0
    assert result.traffic.failed_requests == len(schedule.turns)
    json.dumps(result.to_json())
