"""The scheduler's rules, one by one, in a simulated world."""

from __future__ import annotations

import pytest

from kvstrata.engine_adapter.connector.base import JobKind
from kvstrata.engine_adapter.paged.config import StepConfig
from kvstrata.engine_adapter.paged.outputs import SchedulerOutput
from kvstrata.engine_adapter.paged.request import Request, RequestStatus, SamplingParams
from kvstrata.engine_adapter.paged.scheduling.scheduler import NOT_YET_MAX
from kvstrata.proto.errors import Busy, InvalidArgument
from tests.engine_adapter.paged.simulated import BLOCK, EOS, HASHER, SLIDING, World, expected, kv_config, next_token


def text(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def world(num_blocks: int = 40, *, budget: int = 16, seats: int = 4, pool: bool = False, store: bool = False) -> World:
    return World(
        kv_config(num_blocks, budget=budget),
        step=StepConfig(max_num_batched_tokens=budget, max_num_seqs=seats, max_waiting=NOT_YET_MAX + 2),
        pool=pool,
        store=store,
    )


def counts(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


# -- a step


def test_a_prompt_is_computed_in_chunks_beside_decodes() -> None:
    w = world(budget=10)
    w.add("a", text(5), max_tokens=6)
    w.add("b", text(24, 500), max_tokens=1)
    assert counts(w.step()) == {"a": 5, "b": 5}
    assert counts(w.step()) == {"a": 1, "b": 9}
    assert counts(w.step()) == {"a": 1, "b": 9}
    assert counts(w.step()) == {"a": 1, "b": 1}
    w.run()
    for request_id in "ab":
        w.check_outcome(request_id)
    w.check_empty()


def test_requests_come_in_order_and_no_more_than_there_are_seats() -> None:
    w = world(seats=2)
    for request_id in "abc":
        w.add(request_id, text(3), max_tokens=2)
    assert list(counts(w.step())) == ["a", "b"]
    assert (w.scheduler.num_running, w.scheduler.num_waiting) == (2, 1)
    assert list(counts(w.step())) == ["a", "b"]
    output = w.step()
    assert list(counts(output)) == ["c"] and sorted(output.finished) == ["a", "b"]
    w.run()
    assert [step.finished for step in w.ranks.steps[3:]] == [[]], "each is told once"


def test_workers_are_told_what_is_new_to_them_and_no_more() -> None:
    w = world()
    w.add("a", text(BLOCK), max_tokens=3)
    first, second, third = w.step(), w.step(), w.step()
    assert [new.token_ids for new in first.new] == [text(BLOCK)] and not first.cached
    assert not second.new and not third.new
    assert [cached.new_token_ids for cached in (*second.cached, *third.cached)] == [[t] for t in w["a"].tokens[:2]]
    assert [len(cached.new_block_ids[0]) for cached in (*second.cached, *third.cached)] == [1, 0]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_prompts_around_the_edges_of_a_block(length: int) -> None:
    w = world(pool=True, store=True)
    w.pool.put(text(length))
    for request_id in ("first", "again"):
        w.add(request_id, text(length), max_tokens=BLOCK + 1)
        w.run()
        w.check_outcome(request_id)
    most = (length - 1) // BLOCK * BLOCK
    assert [o.num_external_cached_tokens for o in w["first"].outputs] == [most] * (BLOCK + 1)
    assert [o.num_local_cached_tokens for o in w["again"].outputs] == [most] * (BLOCK + 1)
    w.settle()
    w.check_empty()


def test_requests_that_begin_alike_share_the_blocks_they_share() -> None:
    w = world()
    w.add("a", text(3 * BLOCK), max_tokens=8)
    w.step()
    w.add("b", text(2 * BLOCK) + text(3, 700), max_tokens=2)
    output = w.step()
    assert counts(output) == {"a": 1, "b": 3} and output.num_common_prefix_blocks == [2]
    assert w["b"].request.num_local_cached_tokens == 2 * BLOCK


def test_a_request_does_not_hit_what_the_same_step_computes() -> None:
    w = world()
    w.add("a", text(2 * BLOCK + 1))
    w.add("b", text(2 * BLOCK + 1))
    assert counts(w.step()) == {"a": 9, "b": 7}
    w.run()
    assert w["b"].request.num_local_cached_tokens == 0
    w.check_outcome("b")


def test_salts_share_nothing() -> None:
    w = world()
    for request_id, salt in (("a", ""), ("b", "tenant")):
        w.add(request_id, text(9), salt=salt)
        w.run()
        w.check_outcome(request_id)
    assert w["b"].request.num_local_cached_tokens == 0 and w["a"].tokens != w["b"].tokens


# -- ends


def end_of(sampling: SamplingParams, prompt: list[int], *, max_model_len: int = 40) -> tuple[list[int], str]:
    w = World(kv_config(40, max_model_len=max_model_len), pool=False)
    w.add(
        "a",
        prompt,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
    )
    w.run()
    w.check_outcome("a")
    return w["a"].tokens, w["a"].reason


def prompt_before(token: int) -> list[int]:
    """A prompt whose next token is this one."""
    return next([start] for start in range(10_000) if next_token([start]) == token)


def test_the_end_of_sequence_token_ends_unless_it_is_ignored() -> None:
    prompt = prompt_before(EOS)
    assert end_of(SamplingParams(max_tokens=4), prompt) == ([EOS], "stop")
    tokens, reason = end_of(SamplingParams(max_tokens=4, ignore_eos=True), prompt)
    assert tokens[0] == EOS and len(tokens) == 4 and reason == "length"


def test_a_stop_token_ends_even_with_the_last_token_allowed() -> None:
    stop = next_token(text(3))
    assert end_of(SamplingParams(max_tokens=1, stop_token_ids=(stop,)), text(3)) == ([stop], "stop")
    tokens, reason = end_of(SamplingParams(max_tokens=1, stop_token_ids=(stop + 1,)), text(3))
    assert (tokens, reason) == ([stop], "length")


def test_the_models_length_ends_what_max_tokens_would_not() -> None:
    tokens, reason = end_of(SamplingParams(max_tokens=1000, ignore_eos=True), text(15), max_model_len=20)
    assert (len(tokens), reason) == (5, "length")


# -- refusals


def test_a_prompt_beyond_the_models_length_is_refused_with_the_numbers() -> None:
    w = world()
    assert w.add("long", text(40)).status is RequestStatus.REJECTED
    w.add("fits", text(39), max_tokens=50)
    assert w.scheduler.has_unfinished
    w.run()
    (output,) = w["long"].outputs
    assert output.finish_reason == "error" and "40 tokens" in output.error and "39" in output.error
    w.check_outcome("fits")
    stats = w.scheduler.stats()
    assert stats.rejected == 1 and stats.finished == {"error": 1, "length": 1}


def test_a_request_beyond_the_cache_is_refused_with_the_numbers_and_the_engine_lives() -> None:
    w = world(num_blocks=6)  # 5 blocks of 4: the KV of 20 tokens, and one more token that is never computed
    w.add("long", text(15), max_tokens=7)
    w.add("fits", text(15), max_tokens=6)
    w.run()
    assert "15 prompt tokens" in w["long"].outputs[0].error and "6 cache blocks" in w["long"].outputs[0].error
    w.check_outcome("fits")
    w.check_empty()


def test_an_empty_prompt_and_an_id_in_use_are_refused_by_name() -> None:
    w = world()
    with pytest.raises(InvalidArgument, match="no tokens"):
        w.add("empty", [])
    w.add("a", text(3))
    with pytest.raises(InvalidArgument, match="'a' is in use"):
        w.add("a", text(3))
    w.run()
    w.add("a", text(5))
    w.run()
    w.check_outcome("a")


def test_the_queue_has_a_bound() -> None:
    w = world()
    for number in range(w.step_config.max_waiting):
        w.add(f"r{number}", text(1))
    with pytest.raises(Busy, match="max_waiting"):
        w.add("late", text(1))
    w.run()
    w.check_empty()


# -- too few blocks


def two_that_do_not_fit() -> World:
    """Seven blocks; each request grows to five. Nobody else has a seat."""
    w = world(num_blocks=8, seats=2)
    w.add("a", text(10), max_tokens=9)
    w.add("b", text(6, 300), max_tokens=12)
    return w


def test_the_last_admitted_gives_way_and_ends_with_the_same_tokens() -> None:
    w = two_that_do_not_fit()
    w.run()
    assert w["b"].request.num_preemptions >= 1 and w["a"].request.num_preemptions == 0
    for request_id in "ab":
        w.check_outcome(request_id)
    stats = w.scheduler.stats()
    assert stats.preemptions == w["b"].request.num_preemptions and stats.preempted_tokens > 0
    assert any("preempted" in event for _, event in w.scheduler.story("b"))
    w.check_empty()


def test_a_preempted_request_is_new_to_the_workers_with_its_output_so_far() -> None:
    w = two_that_do_not_fit()
    w.add("c", text(2, 800), max_tokens=1)
    w.run()
    steps = w.ranks.steps
    gone = next(i for i, step in enumerate(steps) if step.preempted)
    assert steps[gone].preempted == ["b"] and "b" not in steps[gone].num_scheduled_tokens
    back = next(i for i in range(gone, len(steps)) if any(new.request_id == "b" for new in steps[i].new))
    (again,) = (new for new in steps[back].new if new.request_id == "b")
    assert again.num_prompt_tokens == 6 and len(again.token_ids) > 6
    assert again.token_ids[6:] == w["b"].tokens[: len(again.token_ids) - 6]
    assert not any(new.request_id == "c" for step in steps[:back] for new in step.new), "b was before it, and still is"
    assert w["b"].request.num_local_cached_tokens == 0, "what it found of its own is no hit"


def test_a_waiting_request_takes_no_blocks_from_a_running_one_and_nobody_passes_it() -> None:
    w = world(num_blocks=8)
    w.add("a", text(16), max_tokens=8)
    w.step()
    w.add("large", text(15, 300), max_tokens=2)
    w.add("small", text(1, 800), max_tokens=1)
    for _ in range(7):
        assert "a" in counts(w.step()) and w.scheduler.num_waiting == 2
    w.run()
    assert w.scheduler.stats().preemptions == 0
    for request_id in ("a", "large", "small"):
        w.check_outcome(request_id)


def test_blocks_that_stores_hold_are_waited_for_and_nobody_loses_work_for_them() -> None:
    w = world(num_blocks=8, pool=True, store=True)
    w.add("gone", text(15, 900), max_tokens=1)
    w.step()
    assert w["gone"].reason == "length"
    assert w.kv.pool.num_free_blocks == 4, "three full blocks are being stored"
    w.add("a", text(7), max_tokens=12)
    w.add("b", text(6, 300), max_tokens=9)
    for _ in range(4):
        w.step()
    # Both need a block, none is free, and b's are held by its own store: taking them from it would free one at most.
    while w.step().num_scheduled_tokens:
        pass
    assert not w.scheduler.progressed and w.scheduler.has_unfinished
    assert w.step().total_tokens == 0, "it waits, and does not fail"
    preemptions = w.scheduler.stats().preemptions
    w.end_jobs()
    w.step()
    assert w.scheduler.progressed, "the end of a store lets others go on"
    assert w.step().total_tokens > 0
    w.run()
    assert preemptions <= 1
    for request_id in "ab":
        w.check_outcome(request_id)
    w.settle()
    w.check_empty()


def test_nobody_else_gives_way_when_the_first_victims_blocks_are_held_by_a_transfer() -> None:
    w = world(num_blocks=4, pool=True, store=True)
    for number, request_id in enumerate("abc"):
        w.add(request_id, text(BLOCK, 100 * number), max_tokens=5)
    w.step()
    assert w.step().total_tokens == 0, "each needs a second block, and all three are being stored"
    assert w.scheduler.stats().preemptions == 1 and w.scheduler.num_running == 2
    w.run()
    for request_id in "abc":
        w.check_outcome(request_id)
    w.settle()
    w.check_empty()


def test_nobody_is_let_in_by_a_step_that_is_short_of_blocks() -> None:
    step = StepConfig(max_num_batched_tokens=6, max_num_seqs=4)
    w = World(kv_config(8), step=step, pool=False, enable_prefix_caching=False)
    w.add("a", text(10), max_tokens=9)
    w.add("b", text(6, 300), max_tokens=12)
    w.run()
    short = [step for step in w.ranks.steps if step.preempted]
    assert short and not any(step.new for step in short), "it would take what was just given up"


def test_windows_give_their_blocks_back() -> None:
    w = World(kv_config(12, SLIDING), pool=False)
    w.add("a", text(30), max_tokens=9)
    w.run()
    w.check_outcome("a")
    w.check_empty()


# -- loads


def loading(tokens: int = 13, *, num_blocks: int = 40, seats: int = 4) -> World:
    """One request, 13 tokens, whose first three blocks are in the pool, after its first step."""
    w = world(num_blocks, pool=True, seats=seats)
    w.pool.put(text(40))
    w.add("a", text(tokens), max_tokens=3)
    w.step()
    return w


def test_local_hits_are_taken_first_then_external_ones_then_slots() -> None:
    w = world(pool=True)
    w.add("warm", text(BLOCK + 1))
    w.run()
    w.pool.put(text(40))
    w.add("a", text(13))
    w.scripted.calls.clear()
    output = w.step()
    assert w.scripted.calls == [("match", "a"), ("alloc", "a")]
    (job,) = w.ranks.jobs.values()
    assert len(job.groups[0].block_ids) == 2, "the first block is here already"
    assert output.total_tokens == 0 and w["a"].request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    w.run()
    assert w["a"].request.num_local_cached_tokens == BLOCK and w["a"].request.num_external_cached_tokens == 2 * BLOCK
    stats = w.scheduler.stats()
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits) == (5 + 9, 8)
    assert stats.prompt_tokens_by_source == {"computed": 5 + 1, "local_cache_hit": 4, "external_kv_transfer": 8}


def test_a_load_takes_blocks_but_no_tokens_and_others_go_on() -> None:
    w = loading()
    w.add("b", text(16, 500), max_tokens=2)
    assert counts(w.step()) == {"b": 16}
    assert (w.scheduler.num_loading, w.scheduler.num_running) == (1, 1) and w.scheduler.stats().loading == 1
    w.end_jobs()
    assert counts(w.step()) == {"b": 1}, "the outcome comes with this step"
    assert counts(w.step()) == {"a": 1}
    w.run()
    w.check_outcome("a")
    w.check_outcome("b")


@pytest.mark.parametrize(
    ("done", "loaded"), [([1, 1, 1], 3), ([1, 1, 0], 2), ([1, 0, 1], 1), ([0, 1, 1], 0), ([0, 0, 0], 0)]
)
def test_what_a_load_did_not_bring_is_computed_in_the_slots_it_has(done: list[int], loaded: int) -> None:
    w = loading()
    held = w.kv.block_ids("a")
    (job_id,) = w.ranks.jobs
    w.ranks.end_job(job_id, [bool(row) for row in done])
    w.step()
    assert w["a"].request.num_computed_tokens == loaded * BLOCK
    output = w.step()
    assert counts(output) == {"a": 13 - loaded * BLOCK}
    assert output.new[0].block_ids[0][:3] == held[0]
    w.run()
    w.check_outcome("a")
    assert w["a"].outputs[-1].num_external_cached_tokens == loaded * BLOCK
    w.add("next", text(13))
    w.run()
    assert w["next"].request.num_local_cached_tokens == 3 * BLOCK, "loaded or computed, it is cached here now"


def test_a_late_answer_keeps_a_requests_place_and_holds_nobody_up() -> None:
    w = world(pool=True, seats=2)
    w.scripted.late = {"a"}
    for request_id in "abc":
        w.add(request_id, text(3), max_tokens=2)
    assert list(counts(w.step())) == ["b", "c"] and w.scheduler.num_not_yet == 1
    w.scripted.late = set()
    w.add("d", text(3), max_tokens=2)
    w.step()
    assert list(counts(w.step())) == ["a", "d"], "it was first in the queue all the time"
    w.run()


def test_lookups_without_an_answer_are_bounded_a_step() -> None:
    w = world(pool=True)
    for number in range(NOT_YET_MAX + 2):
        w.add(f"r{number}", text(1))
    w.pool.answers = False
    assert w.step().total_tokens == 0
    assert sum(call == "match" for call, _ in w.scripted.calls) == NOT_YET_MAX
    assert not w.scheduler.progressed


def test_a_load_that_ends_with_every_seat_taken_waits_for_one() -> None:
    w = loading(seats=1)
    w.add("b", text(3, 500), max_tokens=3)
    w.step()
    w.end_jobs()
    w.step()
    assert (w.scheduler.num_running, w.scheduler.num_loading) == (1, 1)
    w.run()
    w.check_outcome("a")
    w.check_outcome("b")


def test_who_has_no_seat_yet_gives_way_to_who_has_one() -> None:
    w = loading(num_blocks=8, seats=1)
    w.add("b", text(3, 500), max_tokens=15)  # five blocks in the end, and a has three of seven
    w.step()
    w.end_jobs()
    w.run()
    assert w["a"].request.num_preemptions == 1 and w["b"].request.num_preemptions == 0
    assert w["a"].outputs[-1].num_external_cached_tokens == 12, "where its prompt came from at first"
    for request_id in "ab":
        w.check_outcome(request_id)
    w.check_empty()


def test_loads_that_hold_all_blocks_end_and_then_somebody_moves() -> None:
    w = world(num_blocks=8, pool=True)
    w.pool.put(text(40))
    w.pool.put(text(40, 300))
    w.add("a", text(14), max_tokens=9)
    w.add("b", text(17, 300), max_tokens=9)
    w.step()
    assert w.scheduler.num_loading == 2 and w.kv.pool.num_free_blocks == 0
    assert w.step().total_tokens == 0
    w.run()
    for request_id in "ab":
        w.check_outcome(request_id)
    w.check_empty()


def test_what_was_loaded_can_be_shared_before_its_request_runs_again() -> None:
    w = loading()
    w.end_jobs()
    w.step()
    w.add("b", text(13), max_tokens=3)
    assert counts(w.step()) == {"a": 1, "b": 1} and w["b"].request.num_local_cached_tokens == 12
    w.run()
    w.check_outcome("b")


# -- aborts


def test_an_abort_while_waiting_running_and_unknown() -> None:
    w = world(seats=1)
    w.add("running", text(3), max_tokens=9)
    w.add("waiting", text(3))
    w.step()
    for request_id in ("running", "waiting", "unknown", "running"):
        w.scheduler.abort(request_id)
    assert w.scheduler.has_unfinished, "their ends are to be reported"
    output = w.step()
    assert output.finished == ["running"] and (w["running"].reason, w["waiting"].reason) == ("abort", "abort")
    assert w.scheduler.stats().finished == {"abort": 2}
    w.check_empty()


def test_an_abort_while_the_ranks_compute_drops_the_steps_result() -> None:
    w = world()
    w.add("a", text(3), max_tokens=9)
    w.step(between=lambda: w.scheduler.abort("a"))
    assert w["a"].reason == "abort" and w["a"].tokens == []
    w.step()
    w.check_empty()


def test_an_aborted_loads_blocks_are_nobodys_until_the_load_is_over() -> None:
    w = loading(num_blocks=8)
    w.scheduler.abort("a")
    w.step()
    assert w["a"].reason == "abort" and w.kv.pool.num_free_blocks == 4
    w.add("b", text(14, 600), max_tokens=10)  # needs six blocks in the end, and there are four
    while w.step().total_tokens:
        pass
    assert w.scheduler.has_unfinished and not w.scheduler.progressed
    w.run()
    w.check_outcome("b")
    assert not w.scripted.ends, "nobody waits for the load's end"
    w.check_empty()


def test_one_id_comes_and_goes_while_its_loads_are_under_way() -> None:
    w = world(pool=True)
    w.pool.put(text(40))
    for _ in range(5):
        w.add("a", text(13))
        w.step()
        w.scheduler.abort("a")
    w.add("a", text(13))
    w.step()
    assert len(w.ranks.jobs) == 6
    for job_id in sorted(w.ranks.jobs):
        w.ranks.end_job(job_id, [True] * 3)
        w.step()
    assert [end.job_id for end in w.scripted.ends] == [6]
    w.run()
    w.check_outcome("a")
    w.check_empty()


def test_a_store_keeps_its_bytes_when_its_request_is_preempted_and_its_blocks_are_wanted() -> None:
    w = world(num_blocks=8, pool=True, store=True)
    w.add("a", text(10), max_tokens=9)
    w.add("b", text(6, 300), max_tokens=12)
    for _ in range(30):
        w.step()
        w.end_jobs(JobKind.LOAD)
        if w["b"].request.num_preemptions:
            break
    assert any(job.request_id == "b" for job in w.ranks.jobs.values())
    w.run()  # the end of a store compares what it read with what is there
    for request_id in "ab":
        w.check_outcome(request_id)
    w.settle()
    w.check_empty()


# -- what is told


def test_the_prefill_rate_is_of_prompt_tokens_only() -> None:
    w = world(pool=True)
    w.ranks.compute_s = 2.0
    w.add("a", text(12), max_tokens=3)
    w.step()
    w.step()
    w.add("b", text(3, 500), max_tokens=1)
    w.step()
    assert w.scripted.prefill == [(12, 2.0), (3, 2.0 * 3 / 4)]


def test_a_story_has_times_and_survives_its_request() -> None:
    w = loading()
    w.now = 1.5
    w.end_jobs()
    w.run()
    story = w.scheduler.story("a")
    assert [at for at, _ in story] == sorted(at for at, _ in story) and story[0] == (0.0, "queued: 13 tokens")
    words = " | ".join(event for _, event in story)
    assert "loads 12 tokens" in words and "loaded 12 of 12" in words and story[-1][1] == "finished: length"
    assert w.scheduler.story("nobody") == []


def test_steps_alternate_with_updates() -> None:
    w = world()
    w.add("a", text(3))
    output = w.scheduler.schedule()
    with pytest.raises(AssertionError, match="not updated"):
        w.scheduler.schedule()
    ranks = w.ranks.execute(output)
    w.scheduler.update(output, ranks)
    with pytest.raises(AssertionError, match="not under way"):
        w.scheduler.update(output, ranks)


def test_the_output_of_the_simulated_model_is_what_the_oracle_says() -> None:
    """The oracle and the ranks agree on a case done by hand."""
    request = Request("a", text(2), SamplingParams(max_tokens=2, ignore_eos=True), HASHER)
    first = next_token(text(2))
    assert expected(text(2), request.sampling, 40) == ([first, next_token([*text(2), first])], "length")
