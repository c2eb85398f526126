"""Requests that are computed while their load is under way: what a step counts for, by how the load ends."""

from __future__ import annotations

import pytest

from kvstrata.engine_adapter.connector.base import Job
from tests.engine_adapter.paged.simulated import BLOCK, FULL, SLIDING, Pool, World, kv_config

PROMPT = list(range(4 * BLOCK + 2))
STORED = 3 * BLOCK


def stored_by_nobody_else(tokens: list[int]) -> dict[bytes, list[int]]:
    """Blocks of these tokens, as an engine stores them that loads nothing: the last token's KV is never computed."""
    pool = Pool()
    pool.put(tokens[:-1])
    return pool.blocks


def world(*, max_tokens: int = 3, real_side: bool = False, **more: object) -> World:
    made = World(kv_config(30, FULL), layered=True, real_side=real_side, **more)  # type: ignore[arg-type]
    made.pool.put(PROMPT[:STORED])
    made.add("a", PROMPT, max_tokens=max_tokens)
    return made


@pytest.mark.parametrize("real_side", [False, True])
def test_a_load_that_comes_beside_the_step_costs_no_step(real_side: bool) -> None:
    made = world(real_side=real_side)
    made.step()
    assert made["a"].outputs[0].new_token_ids and made["a"].outputs[0].num_external_cached_tokens == STORED
    made.run()
    made.check_outcome("a")
    made.settle()
    made.check_empty()


@pytest.mark.parametrize("good", [0, 1, 2])
def test_of_a_load_that_fails_the_step_did_nothing(good: int) -> None:
    made = world()
    made.ranks.end_layered = lambda job: [row < good for row in range(3)]
    output = made.step()
    assert output.num_scheduled_tokens == {"a": len(PROMPT) - STORED} and not made["a"].tokens
    output = made.step()
    assert output.preempted == ["a"] and [new.num_computed_tokens for new in output.new] == [good * BLOCK]
    made.run()
    made.check_outcome("a")
    assert made["a"].outputs[0].num_external_cached_tokens == good * BLOCK
    made.settle()
    made.check_empty()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("good", [2, 3])
def test_of_a_load_that_came_after_it_was_read_the_step_did_nothing(good: int, ranks: int) -> None:
    """Though it ends within the step, whole: on any rank what was computed is of pages that were not there."""
    made = world(ranks=ranks)
    made.ranks.end_layered = lambda job: [row < good for row in range(3)]
    made.ranks.misses_layer = lambda job: True
    assert made.step().num_scheduled_tokens == {"a": len(PROMPT) - STORED} and not made["a"].tokens
    output = made.step()
    assert output.preempted == ["a"] and [new.num_computed_tokens for new in output.new] == [good * BLOCK]
    made.run()
    made.check_outcome("a")
    assert made["a"].outputs[0].num_external_cached_tokens == good * BLOCK
    made.settle()
    assert made.pool.blocks == stored_by_nobody_else(PROMPT + made["a"].tokens)
    made.check_empty()


def test_one_of_a_prompt_in_chunks_is_read_too_early() -> None:
    """The chunk beside the load ends before the prompt does: there is no token to drop, but there is KV."""
    long = list(range(9 * BLOCK + 1))
    made = World(kv_config(30, FULL), layered=True, real_side=True)
    made.pool.put(long[:STORED])
    made.add("a", long)
    made.ranks.misses_layer = lambda job: True
    made.step()
    output = made.step()
    assert output.preempted == ["a"] and [new.num_computed_tokens for new in output.new] == [STORED]
    made.run()
    made.check_outcome("a")
    made.settle()
    assert made.pool.blocks.items() <= stored_by_nobody_else(long + made["a"].tokens).items()
    made.check_empty()


def test_a_load_that_is_late_is_waited_for_as_any_other() -> None:
    made = world()
    made.ranks.end_layered = lambda job: None
    made.step()
    assert made.scheduler.num_loading == 1 and not made["a"].tokens
    assert not made.step().num_scheduled_tokens
    made.end_jobs()
    made.step()
    made.run()
    made.check_outcome("a")
    assert made["a"].outputs[0].num_external_cached_tokens == STORED
    made.settle()
    made.check_empty()


@pytest.mark.parametrize("how", ["whole", "none", "late"])
def test_one_that_is_aborted_beside_its_load(how: str) -> None:
    made = world()
    made.ranks.end_layered = lambda job: {"whole": [True] * 3, "none": [False] * 3}.get(how)
    made.step(between=lambda: made.scheduler.abort("a"))
    made.step()
    assert made["a"].reason == "abort" and not made["a"].tokens
    made.settle()
    made.check_empty()


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_is_stored_of_a_step_beside_a_load(whole: bool) -> None:
    """If the load fails, what hangs on it is garbage; if not, it is stored with the next step."""
    made = world(real_side=True)
    made.ranks.end_layered = lambda job: [whole] * 3
    offered: list[list[Job]] = []
    for _ in range(3):
        meta = made.step().connector_meta
        offered.append(meta.stores if meta is not None else [])
        made.end_jobs()
    assert not offered[0] and offered[1]


def test_a_request_that_ends_with_the_step_loads_first() -> None:
    """Or its blocks would never be stored."""
    made = world(max_tokens=1)
    assert not made.step().num_scheduled_tokens and made.scheduler.num_loading == 1
    made.run()
    made.check_outcome("a")


def test_others_in_the_step_are_none_the_worse() -> None:
    made = World(kv_config(40, FULL), layered=True)
    made.add("b", [200, 201, 202], max_tokens=6)
    made.step()
    made.pool.put(PROMPT[:STORED])
    made.add("a", PROMPT)
    made.ranks.end_layered = lambda job: [False] * 3
    before = len(made["b"].tokens)
    made.step()
    assert len(made["b"].tokens) == before + 1 and not made["a"].tokens
    made.run()
    for request_id in ("a", "b"):
        made.check_outcome(request_id)


def test_one_load_at_a_time_runs_beside_a_step() -> None:
    made = World(kv_config(40, FULL), layered=True)
    made.pool.put(PROMPT[:STORED])
    made.add("a", PROMPT)
    made.add("b", PROMPT)
    meta = made.step().connector_meta
    assert meta is not None and [job.layered for job in meta.loads] == [True, False]
    made.run()
    for request_id in ("a", "b"):
        made.check_outcome(request_id)


def test_several_groups_load_first() -> None:
    made = World(kv_config(40, FULL, SLIDING), layered=True, real_side=True)
    made.pool.put(PROMPT[:STORED])
    made.add("a", PROMPT)
    for _ in range(3):
        meta = made.step().connector_meta
        assert meta is None or not any(job.layered for job in meta.loads)
    made.run()
    made.check_outcome("a")
