"""The engine: what a step and a wait do, over simulated ranks; and one real model through it."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator

import pytest

from kvstrata.engine_adapter.paged import engine as engine_module
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import LOOKUP_POLL_S, TRANSFER_POLL_S, Engine
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.paged.text.tokenizer import ByteTokenizer
from kvstrata.proto.errors import InvalidArgument, Unavailable
from tests.engine_adapter.paged.simulated import VOCAB, Pool, ScriptedConnector, SimulatedRanks, expected, kv_config

GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
STEP = StepConfig(max_num_batched_tokens=16, max_num_seqs=4)


class Rig:
    """An engine on simulated ranks, with or without a pool, and what it was made of."""

    def __init__(self, *, pool: bool = True) -> None:
        self.pool = Pool()
        config = kv_config(40)
        self.ranks = SimulatedRanks(config, STEP, lambda _: "", self.pool)
        self.connectors: list[ScriptedConnector] = []
        self.now = 0.0
        self.engine = Engine(
            EngineConfig(step=STEP),
            self.ranks,
            ByteTokenizer(),
            (lambda holder: self._connect(ScriptedConnector(holder, self.pool, store=False))) if pool else None,
            clock=lambda: self.now,
        )

    def _connect(self, connector: ScriptedConnector) -> ScriptedConnector:
        self.connectors.append(connector)
        return connector

    def end_jobs(self) -> None:
        for job_id in list(self.ranks.jobs):
            self.ranks.end_job(job_id, [True] * self.ranks.num_rows(job_id))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close()


class Polls:
    """Stands in for ``select.poll``: says what was waited for, and how long; nothing ever comes."""

    def __init__(self) -> None:
        self.waits: list[tuple[set[int], float]] = []
        self._registered: set[int] = set()

    def __call__(self) -> Polls:
        self._registered = set()
        return self

    def register(self, descriptor: int, events: int) -> None:
        assert events == select.POLLIN
        self._registered.add(descriptor)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.waits.append((set(self._registered), timeout_ms / 1000))
        return []


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    stand_in = Polls()
    monkeypatch.setattr(engine_module.select, "poll", stand_in)
    return stand_in


def text(length: int) -> list[int]:
    return [token % VOCAB for token in range(length)]


def test_generate_gives_each_prompt_its_tokens(rig: Rig) -> None:
    prompts = [text(n) for n in (1, 4, 17, 30)]
    tokens = rig.engine.generate(prompts, GREEDY)
    assert tokens == [expected(prompt, GREEDY, 40)[0] for prompt in prompts]
    assert not rig.engine.has_work and rig.engine.stats().generation_tokens == 12
    rig.engine.scheduler.check()


def test_generate_says_why_a_prompt_is_refused_and_leaves_nothing_behind(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="at most 39 fit"):
        rig.engine.generate([text(5), text(40)], GREEDY)
    rig.engine.step()
    assert not rig.engine.has_work and rig.engine.stats().finished == {"error": 1, "abort": 1}
    assert rig.engine.generate([text(5)], GREEDY) == [expected(text(5), GREEDY, 40)[0]]


def test_generate_ends_by_its_deadline(rig: Rig, polls: Polls) -> None:
    rig.pool.answers = False
    clock = iter(range(100))
    rig.engine._clock = lambda: float(next(clock))
    with pytest.raises(Unavailable, match="1 of 1 prompts have no end after 3"):
        rig.engine.generate([text(5)], GREEDY, deadline_s=3.0)
    rig.engine.step()
    assert not rig.engine.has_work


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_that_the_model_does_not_have_is_refused(rig: Rig, token: int) -> None:
    with pytest.raises(InvalidArgument, match=f"the model has 0 to {VOCAB - 1}"):
        rig.engine.add_request("a", [1, token], GREEDY)
    with pytest.raises(InvalidArgument, match="no tokens"):
        rig.engine.add_request("a", [], GREEDY)
    assert not rig.engine.has_work


def test_a_wait_returns_at_once_while_steps_may_do_something(rig: Rig, polls: Polls) -> None:
    rig.engine.add_request("a", text(5), GREEDY)
    rig.engine.wait(60.0)
    rig.engine.step()
    rig.engine.wait(60.0)
    assert polls.waits == []
    rig.engine.abort("a")
    rig.engine.wait(60.0)
    assert polls.waits == [], "its end is to be reported"
    rig.engine.step()
    rig.engine.wait(60.0)
    assert [timeout for _, timeout in polls.waits] == [60.0], "idle: only a wake-up matters"


def test_a_step_that_waits_for_a_load_sleeps_until_a_rank_has_its_outcome(rig: Rig, polls: Polls) -> None:
    rig.ranks.descriptors = [12345]
    rig.pool.put(text(12))
    rig.engine.add_request("a", text(13), GREEDY)
    rig.engine.step()
    rig.engine.wait(60.0)
    assert polls.waits == [], "the load began: others may go on"
    rig.engine.step()
    rig.engine.wait(60.0)
    ((descriptors, timeout),) = polls.waits
    assert 12345 in descriptors and timeout == TRANSFER_POLL_S
    rig.end_jobs()
    rig.engine.step()
    rig.engine.wait(60.0)
    assert len(polls.waits) == 1, "the load ended: the next step computes"
    assert rig.engine.step()[0].num_external_cached_tokens == 12


def test_a_step_that_waits_for_an_answer_tries_again_soon(
    rig: Rig, polls: Polls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.connectors[0], "fileno_or_none", lambda: 54321)
    rig.pool.answers = False
    rig.engine.add_request("a", text(13), GREEDY)
    rig.engine.step()
    rig.engine.wait(60.0)
    ((descriptors, timeout),) = polls.waits
    assert 54321 in descriptors and timeout == LOOKUP_POLL_S
    rig.pool.answers = True
    rig.engine.step()
    rig.engine.wait(60.0)
    assert len(polls.waits) == 1


def test_transfers_under_way_are_work_even_when_no_request_is_left(rig: Rig) -> None:
    rig.pool.put(text(12))
    rig.engine.add_request("a", text(13), GREEDY)
    rig.engine.step()
    rig.engine.abort("a")
    assert [output.finish_reason for output in rig.engine.step()] == ["abort"]
    assert rig.engine.has_work
    rig.end_jobs()
    rig.engine.step()
    assert not rig.engine.has_work and rig.engine.reset_prefix_cache()


def test_a_wake_up_ends_the_wait_it_comes_before(rig: Rig) -> None:
    """Were it lost, these waits would outlast the test."""
    for _ in range(3):
        rig.engine.wake()
        rig.engine.wait(3_600.0)


def test_a_descriptor_that_is_ready_ends_the_wait(rig: Rig) -> None:
    descriptor = os.eventfd(1)
    rig.ranks.descriptors = [descriptor]
    rig.pool.put(text(12))
    rig.engine.add_request("a", text(13), GREEDY)
    rig.engine.step()
    rig.engine.step()
    rig.engine.wait(3_600.0)
    os.close(descriptor)
    rig.ranks.descriptors = []


def test_close_ends_the_parts_and_may_come_twice_or_before_a_wake_up() -> None:
    rig = Rig()
    rig.engine.close()
    rig.engine.close()
    rig.engine.wake()
    assert rig.ranks.closed and rig.connectors[0].closed


def test_prefix_cache_is_not_reset_under_a_request(rig: Rig) -> None:
    rig.engine.add_request("a", text(9), GREEDY)
    rig.engine.step()
    assert not rig.engine.reset_prefix_cache()
    rig.engine.generate([text(9)], GREEDY)
    assert rig.engine.reset_prefix_cache()
    rig.engine.generate([text(9)], GREEDY)
    assert rig.engine.story("a")[-1][1] == "finished: length"


def tiny(*, num_blocks: int, budget: int, caching: bool = True) -> Engine:
    return Engine.create(
        EngineConfig(
            model=ModelConfig(model="tiny", max_model_len=160),
            cache=CacheConfig(block_size=16, num_blocks=num_blocks, enable_prefix_caching=caching),
            step=StepConfig(max_num_batched_tokens=budget, max_num_seqs=4),
        )
    )


def test_a_real_model_gives_the_same_tokens_alone_batched_chunked_and_preempted() -> None:
    draw = random.Random(5)
    shared = [draw.randrange(256) for _ in range(40)]
    prompts = [shared[:n] for n in (40, 17, 1)] + [shared + [draw.randrange(256) for _ in range(n)] for n in (9, 50)]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    bare = tiny(num_blocks=64, budget=256, caching=False)
    alone = [bare.generate([prompt], sampling)[0] for prompt in prompts]
    bare.close()
    small = tiny(num_blocks=11, budget=24)
    assert small.generate(prompts, sampling) == alone
    assert small.stats().preemptions > 0
    small.scheduler.check()
    small.close()
