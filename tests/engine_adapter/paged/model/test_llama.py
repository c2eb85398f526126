"""A token's KV and logits are the same bits however its step was made. What a pool is judged by rests on this."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.model.collective_base import NoCollective
from kvstrata.engine_adapter.paged.model.llama import Llama
from kvstrata.engine_adapter.paged.model.rows import F32, Batch, GroupBatch
from kvstrata.engine_adapter.paged.model.sizes import SIZES as SIZES_BY_NAME
from kvstrata.engine_adapter.paged.model.weights import load_config, load_weights
from tests.engine_adapter.paged.model_steps import Steps, Tokens, make_model

LENGTHS = (1, 15, 16, 17, 240, 300, 530)
SIZES = ("tiny", "tiny-swa")
DTYPES = ("float32", "float16")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@cache
def model(size: str) -> Llama:
    return make_model(size)


@cache
def prompt(length: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(length).integers(0, 512, length)


@cache
def alone(size: str, dtype: str, length: int) -> tuple[Steps, Tokens]:
    """A prompt computed by itself, in one step."""
    steps = Steps(model(size), dtype=dtype)
    sequence = steps.sequence(prompt(length))
    steps.step([(sequence, length)])
    return steps, sequence


def assert_as_alone(steps: Steps, sequence: Tokens, size: str, dtype: str = "float32") -> None:
    theirs, reference = alone(size, dtype, len(sequence.token_ids))
    steps.assert_same(sequence, reference, theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_gives_the_bits_of_prefill(size: str, dtype: str) -> None:
    steps = Steps(model(size), dtype=dtype)
    sequence = steps.sequence(prompt(300))
    steps.step([(sequence, 200)])
    for _ in range(100):
        steps.step([(sequence, 1)])
    assert_as_alone(steps, sequence, size, dtype)


@pytest.mark.parametrize(
    "shape",
    [
        {
            "hidden_size": 40,
            "intermediate_size": 50,
            "head_dim": 10,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
        {"hidden_size": 33, "intermediate_size": 7, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 6},
        {"tie_word_embeddings": True, "qkv_bias": True, "sliding_windows": (17, 300), "vocab_size": 511},
    ],
)
def test_any_shape(shape: dict[str, object]) -> None:
    config = msgspec.structs.replace(SIZES_BY_NAME["tiny"], **shape).validated()
    llama = Llama(config, load_weights("tiny", config), collective=NoCollective())
    whole, cut = Steps(llama), Steps(llama, seed=1)
    tokens = prompt(400) % config.vocab_size
    reference, sequence = whole.sequence(tokens), cut.sequence(tokens)
    other = cut.sequence(tokens[::-1])
    whole.step([(reference, 400)])
    for count in (3, 250, 1, 1, 29, 100, 16):
        cut.step([(other, 13), (sequence, count)])
    cut.assert_same(sequence, reference, whole)


def test_two_threads_keep_the_promise_too() -> None:
    """With bits of their own: that is why the number of threads is part of a model's identity."""
    llama = make_model("8m")
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        whole, cut = Steps(llama), Steps(llama, seed=1)
        reference, sequence = whole.sequence(prompt(20)), cut.sequence(prompt(20))
        whole.step([(reference, 20)])
        for count in (3, 1, 16):
            cut.step([(sequence, count)])
        cut.assert_same(sequence, reference, whole)


@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from((1, 8, 16, 24, 512)),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=5),
)
def test_any_batch_any_chunks_any_order(
    data: st.DataObject, size: str, dtype: str, block_size: int, lengths: list[int]
) -> None:
    steps = Steps(model(size), dtype=dtype, block_size=block_size, num_blocks=16_000 // block_size)
    running = [steps.sequence(prompt(length)) for length in lengths]
    preemptions = 2
    while any(sequence.computed < len(sequence.token_ids) for sequence in running):
        order = data.draw(st.permutations(running))
        parts = []
        for sequence in order[: data.draw(st.integers(1, len(order)))]:
            left = len(sequence.token_ids) - sequence.computed
            if left:
                parts.append((sequence, data.draw(st.sampled_from(sorted({1, min(left, 33), min(left, 150), left})))))
        if parts:
            steps.step(parts)
        if preemptions and data.draw(st.booleans()):
            preemptions -= 1
            steps.restart(data.draw(st.sampled_from(running)))
    for sequence in running:
        if sequence.computed:
            assert_as_alone(steps, sequence, size, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_a_prefix_that_was_loaded_gives_the_bits_of_one_that_was_computed(size: str) -> None:
    source, computed = alone(size, "float32", 530)
    steps = Steps(model(size), seed=1)
    sequence = steps.sequence(prompt(530))
    for group, table in enumerate(computed.tables):
        for index in range(20):
            block = steps.free_blocks.pop()
            sequence.tables[group].append(block)
            for layer, its in enumerate(steps.layer_group):
                if its == group:
                    steps.kv[layer][:, block] = source.kv[layer][:, table[index]]
    sequence.computed = 320
    sequence.logits = list(computed.logits[:320])
    steps.step([(sequence, 210)])
    assert_as_alone(steps, sequence, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("common", [0, 32, 33])
def test_a_common_prefix_read_once_changes_no_bit(size: str, common: int) -> None:
    """33 blocks are shared: two whole segments and a part."""
    shared = prompt(528)
    tails = [np.random.default_rng(seed).integers(0, 512, 40) for seed in range(3)]
    steps = Steps(model(size))
    parent = steps.sequence(shared)
    steps.step([(parent, 528)])
    children = [steps.fork(parent, 33, np.concatenate([shared, tail])) for tail in tails]
    steps.step([(child, count) for child, count in zip(children, (1, 17, 30), strict=True)], common=common)
    steps.step([(child, 1) for child in children], common=common)
    for child in children:
        lonely = Steps(model(size))
        reference = lonely.sequence(child.token_ids)
        lonely.step([(reference, len(child.token_ids))])
        steps.assert_same(child, reference, lonely)


def test_a_prefix_that_is_computed_in_the_very_step_that_shares_it() -> None:
    steps = Steps(model("tiny"))
    first = steps.sequence(prompt(530))
    steps.step([(first, 100)])
    for table in first.tables:
        while len(table) < 34:
            table.append(steps.free_blocks.pop())
    second = steps.fork(first, 33, np.concatenate([prompt(530)[:528], prompt(17)]))
    steps.step([(second, 17), (first, 430)], common=33)
    assert_as_alone(steps, first, "tiny")
    lonely = Steps(model("tiny"))
    reference = lonely.sequence(second.token_ids)
    lonely.step([(reference, 545)])
    assert np.array_equal(second.logits[-17:], reference.logits[-17:])


def test_blocks_that_a_window_has_left_are_not_read() -> None:
    size = "tiny-swa"
    steps = Steps(model(size))
    sequence = steps.sequence(prompt(530))
    for count in (150, 1, 1, 33, 200, 145):
        steps.step([(sequence, count)])
        steps.slide(sequence)
    assert 0 in sequence.tables[steps.windows.index(64)]
    assert np.array_equal(sequence.logits, alone(size, "float32", 530)[1].logits)


def test_a_wrong_block_changes_what_the_model_says() -> None:
    """Or none of the above would mean much."""
    for size in SIZES:
        steps = Steps(model(size))
        sequence = steps.sequence(prompt(530))
        steps.step([(sequence, 500)])
        for layer, group in enumerate(steps.layer_group):
            table = sequence.tables[group]
            steps.kv[layer][:, table[29]] = steps.kv[layer][:, table[7]]
        steps.step([(sequence, 30)])
        right = np.array(alone(size, "float32", 530)[1].logits[500:])
        assert (np.argmax(sequence.logits[500:], axis=-1) != np.argmax(right, axis=-1)).any()


def test_only_the_rows_asked_for() -> None:
    steps = Steps(model("tiny"))
    positions = np.arange(17)
    table = np.array([5, 9])
    slots = table[positions // 16] * 16 + positions % 16
    for rows in ([], [16], [3, 16], [16, 0, 16]):
        batch = Batch(prompt(17), positions, [(0, 17)], [GroupBatch(slots, [table])], [0, 0], np.array(rows, np.int64))
        logits = steps.model.forward(batch, steps.kv)
        assert logits.shape == (len(rows), 512)
        assert logits.dtype == np.float32
        assert np.array_equal(logits, np.array(alone("tiny", "float32", 17)[1].logits)[rows].reshape(-1, 512))


def test_a_step_that_does_not_fit_together_is_told_so() -> None:
    steps = Steps(model("tiny"))

    def forward(positions: list[int], token: int = 1, spans: tuple[tuple[int, int], ...] = ((0, 2),)) -> None:
        where = np.array(positions)
        group = GroupBatch(where + 16, [np.arange(1, 400)])
        steps.model.forward(Batch(where * 0 + token, where, spans, [group], [0, 0], np.array([1])), steps.kv)

    forward([0, 1])
    for match, call in (
        ("not consecutive", lambda: forward([0, 2])),
        ("the model ends at 4095", lambda: forward([4095, 4096])),
        ("token ids 512", lambda: forward([0, 1], token=512)),
        ("spans cover 1 of 2", lambda: forward([0, 1], spans=((0, 1),))),
    ):
        with pytest.raises(AssertionError, match=match):
            call()


class InTurn:
    """Two ranks that are threads and meet at each sum."""

    size = 2

    def __init__(self, rank: int, meet: Callable[[int, F32], F32]) -> None:
        self.rank, self._meet = rank, meet

    def all_reduce(self, array: F32) -> F32:
        return self._meet(self.rank, array)


def test_two_ranks_say_what_one_says() -> None:
    barrier = threading.Barrier(2, timeout=20)
    parts: list[F32 | None] = [None, None]

    def meet(rank: int, array: F32) -> F32:
        parts[rank] = array
        barrier.wait()
        first, second = parts
        assert first is not None
        assert second is not None
        total = first + second
        barrier.wait()
        return total

    config = load_config("tiny", 512)
    outputs: dict[int, F32] = {}

    def run(rank: int) -> None:
        weights = load_weights("tiny", config, rank=rank, tensor_parallel=2)
        llama = Llama(config, weights, collective=InTurn(rank, meet))
        kv = [np.full((2, 30, 16, 1, 16), np.nan, np.float32) for _ in range(2)]
        positions = np.arange(300)
        group = GroupBatch(positions + 16, [np.arange(1, 30)])
        batch = Batch(prompt(300), positions, [(0, 300)], [group], [0, 0], np.arange(300))
        outputs[rank] = llama.forward(batch, kv)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert np.array_equal(outputs[0], outputs[1])
    np.testing.assert_allclose(outputs[0], alone("tiny", "float32", 300)[1].logits, atol=2e-4)


def test_no_collective_is_a_single_rank() -> None:
    ones = np.ones(3, np.float32)
    assert NoCollective().all_reduce(ones) is ones
    assert (NoCollective().rank, NoCollective().size) == (0, 1)
