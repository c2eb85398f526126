"""Paged attention against the textbook's, in float64, over tables, windows, rubbish and shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.model.attention import PagedAttention, write_kv
from kvstrata.engine_adapter.paged.model.attention_plan import MEETINGS_MAX, SEGMENT, plan_attention
from kvstrata.engine_adapter.paged.model.rows import TILE, Batch, GroupBatch

HEADS, KV_HEADS, HEAD = 4, 2, 8


def dense(
    queries: npt.NDArray[np.float64], keys: npt.NDArray[np.float64], values: npt.NDArray[np.float64], window: int
) -> npt.NDArray[np.float64]:
    """Causal attention of the last positions: [n, heads, d] over [context, kv_heads, d]."""
    n, context = len(queries), len(keys)
    where = np.arange(context - n, context)[:, None] - np.arange(context)
    seen = (where >= 0) & ((where < window) | (window == 0))
    out = np.empty_like(queries)
    for head in range(HEADS):
        its = head // (HEADS // KV_HEADS)
        scores = np.where(seen, queries[:, head] @ keys[:, its].T / np.sqrt(HEAD), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ values[:, its] / weights.sum(axis=1, keepdims=True)
    return out


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), min_size=1, max_size=4),
    block_size=st.sampled_from((1, 16, 24, 512)),
    window=st.sampled_from((0, 1, 2, 63, 256, 300)),
    half=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_against_dense(requests: list[tuple[int, int]], block_size: int, window: int, half: bool, seed: int) -> None:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        check_against_dense(requests, block_size, window, half, np.random.default_rng(seed))


def check_against_dense(
    requests: list[tuple[int, int]], block_size: int, window: int, half: bool, rng: np.random.Generator
) -> None:
    blocks = [-(-(before + count) // block_size) for before, count in requests]
    ids = rng.permutation(sum(blocks)) + 1
    kv: npt.NDArray[np.float32] | npt.NDArray[np.float16]
    kv = np.full((2, sum(blocks) + 1, block_size, KV_HEADS, HEAD), np.nan, np.float16 if half else np.float32)
    tables, positions, slots, spans, expected, queries = [], [], [], [], [], []
    for index, (before, count) in enumerate(requests):
        table = ids[sum(blocks[:index]) : sum(blocks[: index + 1])]
        q = rng.standard_normal((count, HEADS, HEAD), dtype=np.float32)
        k, v = rng.standard_normal((2, before + count, KV_HEADS, HEAD), dtype=np.float32).astype(kv.dtype)
        where = np.arange(before + count)
        write_kv(kv, table[where // block_size] * block_size + where % block_size, k, v)
        expected.append(dense(*(np.asarray(part, np.float64) for part in (q, k, v)), window))
        if window:  # what the window has left may be anything: the null block here, which is NaN
            table = table.copy()
            table[: max(0, before - window + 1) // block_size] = 0
        tables.append(table)
        positions.append(where[before:])
        slots.append(where[before:] * 0)
        spans.append((sum(map(len, queries)), sum(map(len, queries)) + count))
        queries.append(q)
    flat = np.concatenate(positions)
    batch = Batch(flat * 0, flat, spans, [GroupBatch(np.concatenate(slots), tables)], [0], np.empty(0, np.int64))
    plan = plan_attention(batch, 0, block_size, window)
    out = PagedAttention(HEADS, KV_HEADS, HEAD)(np.concatenate(queries).reshape(len(flat), -1), kv, plan)
    np.testing.assert_allclose(out.reshape(-1, HEADS, HEAD), np.concatenate(expected), atol=3e-6)


def batch_of(*requests: tuple[int, int], common: int = 0) -> Batch:
    positions = np.concatenate([np.arange(start, end) for start, end in requests])
    ends = np.cumsum([end - start for start, end in requests]).tolist()
    tables = [np.arange(1, 2000)] * len(requests)
    return Batch(
        positions * 0,
        positions,
        list(zip([0, *ends[:-1]], ends, strict=True)),
        [GroupBatch(positions + 16, tables, common)],
        [0],
        np.empty(0, np.int64),
    )


def met(batch: Batch, window: int = 0) -> int:
    plan = plan_attention(batch, 0, 16, window)
    for gather in plan.gathers:
        for meeting in gather.meetings:
            assert 0 <= meeting.first < meeting.end <= plan.num_tiles
            assert (meeting.end - meeting.first) * gather.segments <= MEETINGS_MAX
    return sum((m.end - m.first) * gather.segments for gather in plan.gathers for m in gather.meetings)


def test_nothing_needless_is_computed() -> None:
    per_segment = SEGMENT // TILE
    assert met(batch_of((0, 1024))) == per_segment * (1 + 2 + 3 + 4)
    assert met(batch_of((4095, 4096))) == 16
    assert met(batch_of((16_000, 16_001)), window=64) == 1
    assert met(batch_of((0, 4096)), window=256) <= 2 * 4096 // TILE
    assert len(plan_attention(batch_of((4095, 4096)), 0, 16, 0).gathers) == 1


def test_a_common_prefix_is_gathered_once() -> None:
    requests = [(1030 + index, 1031 + index) for index in range(8)]
    apart = plan_attention(batch_of(*requests), 0, 16, 0)
    shared = plan_attention(batch_of(*requests, common=64), 0, 16, 0)
    assert sum(gather.segments for gather in apart.gathers) == 8 * 5
    assert sum(gather.segments for gather in shared.gathers) == 4 + 8
    assert met(batch_of(*requests, common=64)) == met(batch_of(*requests))


def test_only_rows_on_an_edge_are_masked() -> None:
    plan = plan_attention(batch_of((1024, 1280)), 0, 16, 0)
    masked = [bool(meeting.hidden) for gather in plan.gathers for meeting in gather.meetings]
    assert masked == [False] * 4 + [True]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_write_kv(dtype: str) -> None:
    kv = np.zeros((2, 5, 4, KV_HEADS, HEAD), dtype)
    keys, values = np.random.default_rng(0).random((2, 3, KV_HEADS, HEAD), dtype=np.float32)
    write_kv(kv, np.array([6, 19, 8]), keys, values)
    for index, (block, offset) in enumerate([(1, 2), (4, 3), (2, 0)]):
        assert np.array_equal(kv[0, block, offset], keys[index].astype(dtype))
        assert np.array_equal(kv[1, block, offset], values[index].astype(dtype))
    assert np.count_nonzero(kv.any(axis=(3, 4))) == 6


def test_what_float16_cannot_hold_stays_finite() -> None:
    kv = np.zeros((2, 2, 4, KV_HEADS, HEAD), np.float16)
    huge = np.full((1, KV_HEADS, HEAD), 1e9, np.float32)
    write_kv(kv, np.array([5]), huge, -huge)
    assert kv[0, 1, 1].max() == np.finfo(np.float16).max
    assert kv[1, 1, 1].min() == np.finfo(np.float16).min
