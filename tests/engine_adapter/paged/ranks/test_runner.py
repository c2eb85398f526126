"""The runner against a dense recompute, against itself under every schedule, and against steps that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.cache.capacity import plan_kv_cache
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import F32, Batch
from kvstrata.engine_adapter.paged.model.sizes import named_config
from kvstrata.engine_adapter.paged.model.weights import load_weights
from kvstrata.engine_adapter.paged.outputs import CachedRequest, NewRequest, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.kv_memory import KVMemory
from kvstrata.engine_adapter.paged.ranks.runner import ModelRunner
from kvstrata.engine_adapter.paged.request import SamplingParams
from tests.engine_adapter.paged.dense_reference import logits as dense_logits
from tests.engine_adapter.paged.played_steps import Steps

VOCAB = 512
MODELS = ("tiny", "tiny-swa")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@cache
def model(name: str) -> Llama:
    config = named_config(name, VOCAB)
    return Llama(config, load_weights(name, config, seed=3), collective=NoCollective())


class Listening:
    """The model, and the logits it gave: token history -> logits of the next."""

    def __init__(self, inner: Llama) -> None:
        self.inner = inner
        self.batches: list[Batch] = []
        self.logits: list[F32] = []

    def forward(self, batch: Batch, kv: Sequence[KV]) -> F32:
        self.batches.append(batch)
        self.logits.append(self.inner.forward(batch, kv))
        return self.logits[-1]


class Rank:
    """A runner with its memory, full of NaN so that nothing may be read that was not written."""

    def __init__(self, name: str, num_blocks: int = 80, kv_dtype: str = "float32", block_size: int = 16) -> None:
        self.model = Listening(model(name))
        specs = self.model.inner.config.layer_specs(block_size, kv_dtype)
        self.config: KVCacheConfig = plan_kv_cache(
            specs, num_blocks=num_blocks, max_model_len=400, max_num_batched_tokens=256
        )
        self.kv = KVMemory(self.config)
        for tensor in self.kv.layers:
            tensor[:, 1:] = np.nan
        self.runner = ModelRunner(self.model, self.config, self.kv.layers, max_num_seqs=8)

    def steps(self, seed: int = 0) -> Steps:
        return Steps(self.runner.execute, self.config, seed)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_mixed_batches_give_what_a_dense_recompute_gives(name: str, kv_dtype: str) -> None:
    rank = Rank(name, kv_dtype=kv_dtype)
    steps = rank.steps(seed=1)
    lengths = {"a": 1, "b": 15, "c": 16, "d": 17, "e": 130}
    for request_id, length in lengths.items():
        steps.add(request_id, prompt(length, length), SamplingParams(max_tokens=5))
    outputs = steps.run(chunk_max=70)
    given_logits = {}
    for result, rows in zip(steps.results, rank.model.logits, strict=True):
        for request_id, row in zip(result.sampled, rows, strict=True):
            given_logits.setdefault(request_id, []).append(row)
    tolerance = 1e-3 if kv_dtype == "float32" else 5e-2
    for request_id, length in lengths.items():
        whole = prompt(length, length) + outputs[request_id]
        expected = dense_logits(rank.model.inner.config, rank.model.inner.weights, whole)
        np.testing.assert_allclose(np.stack(given_logits[request_id]), expected[length - 1 : -1], atol=tolerance)
        np.testing.assert_array_equal(outputs[request_id], np.argmax(given_logits[request_id], axis=1))


REQUESTS = {
    "greedy": (prompt(90, 1), SamplingParams(max_tokens=4)),
    "drawn": (prompt(33, 2), SamplingParams(max_tokens=4, temperature=1.0, seed=9)),
    "filtered": (prompt(16, 3), SamplingParams(max_tokens=4, temperature=0.8, top_k=20, top_p=0.9, seed=1)),
}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 32), chunk_max=st.sampled_from([3, 16, 64]), preemptions=st.integers(0, 3))
def test_no_schedule_changes_a_token(name: str, seed: int, chunk_max: int, preemptions: int) -> None:
    rank = Rank(name)
    steps = rank.steps(seed)
    for request_id, (tokens, sampling) in REQUESTS.items():
        steps.add(request_id, tokens, sampling)
    outputs = steps.run(chunk_max=chunk_max, preemptions=preemptions)
    rank.runner.check()
    assert outputs == alone(name)
    assert outputs.keys() == REQUESTS.keys()
    steps.execute(SchedulerOutput(step_id=0, finished=list(REQUESTS)))
    assert rank.runner.num_requests == 0


@cache
def alone(name: str) -> dict[str, list[int]]:
    """Each request by itself, its whole prompt in one step."""
    outputs = {}
    for request_id, (tokens, sampling) in REQUESTS.items():
        steps = Rank(name).steps()
        steps.add(request_id, tokens, sampling)
        while steps.live:
            steps.step({request_id: steps.live[request_id].todo})
        outputs[request_id] = steps.outputs[request_id]
    return outputs


def test_blocks_behind_a_window_are_not_read_any_more() -> None:
    """The scheduler gives them to others, whose load may leave anything in them meanwhile."""
    rank = Rank("tiny-swa")
    steps = rank.steps()
    steps.add("a", prompt(120), SamplingParams(max_tokens=4))
    steps.step({"a": 120})
    before = list(steps.live["a"].token_ids)
    windowed = next(
        i for i, group in enumerate(rank.config.groups) if group.spec.__class__.__name__ == "SlidingWindowSpec"
    )
    gone = steps.live["a"].blocks[windowed][: (120 - 64 + 1) // 16]
    assert len(gone) == 3
    for layer in rank.config.groups[windowed].layers:
        rank.kv.layers[layer][:, gone] = np.nan
    while steps.live:
        steps.step({"a": 1})
    assert len(before) == 121
    assert np.isfinite(np.concatenate(rank.model.logits)).all()
    assert all(0 in table for table in rank.model.batches[-1].groups[windowed].block_tables)


def test_logprobs_are_reported_for_those_who_ask() -> None:
    steps = Rank("tiny").steps()
    steps.add("with", prompt(8, 1), SamplingParams(max_tokens=1, logprobs=3))
    steps.add("without", prompt(8, 2), SamplingParams(max_tokens=1))
    result = steps.step({"with": 8, "without": 8})
    assert result.logprobs.keys() == {"with"}
    logprobs = result.logprobs["with"]
    assert logprobs.top[0] == (result.sampled["with"], logprobs.sampled)
    assert len(logprobs.top) == 3 and result.compute_s > 0


def test_an_empty_step_computes_nothing() -> None:
    rank = Rank("tiny")
    result = rank.runner.execute(SchedulerOutput(step_id=7))
    assert (result.step_id, result.sampled, rank.model.batches) == (7, {}, [])


def test_common_blocks_are_passed_on_where_all_tables_keep_them() -> None:
    rank = Rank("tiny-swa")
    new = NewRequest(
        request_id="a",
        token_ids=prompt(20),
        num_prompt_tokens=20,
        sampling=SamplingParams(),
        block_ids=tuple([2 * index + 1, 2 * index + 2] for index in range(len(rank.config.groups))),
        num_computed_tokens=0,
    )
    rank.runner.execute(
        SchedulerOutput(
            step_id=1, new=[new], num_scheduled_tokens={"a": 20}, num_common_prefix_blocks=[1] * len(rank.config.groups)
        )
    )
    given_on = [group.num_common_prefix_blocks for group in rank.model.batches[0].groups]
    kinds = [group.spec.__class__.__name__ for group in rank.config.groups]
    assert given_on == [0 if kind == "SlidingWindowSpec" else 1 for kind in kinds]


def new_request(**changes: object) -> NewRequest:
    fields: dict[str, object] = {
        "request_id": "a",
        "token_ids": prompt(20),
        "num_prompt_tokens": 20,
        "sampling": SamplingParams(),
        "block_ids": ([1, 2],),
        "num_computed_tokens": 0,
    }
    return NewRequest(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (SchedulerOutput(step_id=1, num_scheduled_tokens={"x": 1}), "'x' is not known: 0 are"),
        (SchedulerOutput(step_id=1, new=[new_request(), new_request()]), "new and already known"),
        (SchedulerOutput(step_id=1, new=[new_request()], num_scheduled_tokens={"a": 21}), "21 tokens after 0"),
        (SchedulerOutput(step_id=1, new=[new_request()], num_scheduled_tokens={"a": 0}), "0 tokens after 0"),
        (
            SchedulerOutput(step_id=1, new=[new_request(block_ids=([1],))], num_scheduled_tokens={"a": 20}),
            "position 16 is beyond its 1 blocks",
        ),
        (
            SchedulerOutput(step_id=1, new=[new_request(block_ids=([1, 0],))], num_scheduled_tokens={"a": 20}),
            "position 16 would be written to block 0",
        ),
        (SchedulerOutput(step_id=1, new=[new_request(block_ids=([1], [2]))]), "blocks of 2 of 1 groups"),
        (
            SchedulerOutput(step_id=1, new=[new_request(block_ids=(list(range(1, 27)),))]),
            "0 \\+ 26 blocks in a table of 25",
        ),
        (
            SchedulerOutput(
                step_id=1,
                new=[new_request()],
                cached=[CachedRequest(request_id="a", new_token_ids=[], new_block_ids=([],), num_computed_tokens=3)],
            ),
            "3 tokens computed, 0 known here",
        ),
        (
            SchedulerOutput(step_id=1, new=[new_request(request_id=str(index), block_ids=([],)) for index in range(9)]),
            "all 8 rows are taken",
        ),
    ],
)
def test_a_step_that_does_not_fit_is_said_with_its_numbers(output: SchedulerOutput, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        Rank("tiny").runner.execute(output)
