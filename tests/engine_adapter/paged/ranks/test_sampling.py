"""Sampling: what greedy, top_k and top_p may choose, how often, and that a draw depends on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.model.rows import F32
from kvstrata.engine_adapter.paged.ranks.sampling import log_probabilities, sample, uniform
from kvstrata.engine_adapter.paged.request import SamplingParams

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


def logits(*values: float) -> F32:
    return np.asarray(values, np.float32)


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample(logits(1, 3, 3, 2), SamplingParams(), 0) == 1
    assert sample(logits(np.nan, -1, -2), SamplingParams(), 0) == 1
    assert sample(logits(0, np.inf, np.inf), SamplingParams(), 0) == 1


def test_draws_follow_the_softmax() -> None:
    row = logits(0.0, 1.0, 2.0, -30.0)
    params = SamplingParams(temperature=2.0, seed=5)
    counts = np.bincount([sample(row, params, position) for position in range(4000)], minlength=4)
    expected = np.exp(row / 2.0) / np.exp(row / 2.0).sum() * 4000
    assert counts[3] == 0
    assert (np.abs(counts[:3] - expected[:3]) < 5 * np.sqrt(expected[:3])).all(), (counts, expected)


@settings(deadline=None)
@given(values=LOGITS, temperature=st.floats(1e-6, 100), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**24))
def test_top_k_and_top_p_keep_the_likeliest(values: list[float], temperature: float, seed: int, position: int) -> None:
    row = logits(*values)
    order = np.argsort(-row, kind="stable")
    drawn = sample(row, SamplingParams(temperature=temperature, top_k=3, seed=seed), position)
    assert drawn in order[:3]
    assert sample(row, SamplingParams(temperature=temperature, top_k=1, seed=seed), position) == order[0]
    assert sample(row, SamplingParams(temperature=temperature, top_p=1e-9, seed=seed), position) == order[0]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = np.log(np.asarray([0.1, 0.5, 0.4], np.float32))
    for top_p, expected in ((0.45, {1}), (0.7, {1, 2}), (0.95, {0, 1, 2})):
        params = SamplingParams(temperature=1.0, top_p=top_p, seed=2)
        assert {sample(row, params, position) for position in range(300)} == expected
    both = SamplingParams(temperature=1.0, top_p=0.95, top_k=2, seed=2)
    assert {sample(row, both, position) for position in range(300)} == {1, 2}


@settings(deadline=None)
@given(values=LOGITS, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**24))
def test_a_draw_depends_on_seed_position_and_logits_only(values: list[float], seed: int, position: int) -> None:
    row = logits(*values)
    params = SamplingParams(temperature=1.0, seed=seed)
    first = sample(row, params, position)
    np.random.random()
    sample(row, params, position + 1)
    assert sample(row.copy(), params, position) == first
    assert 0.0 <= uniform(seed, position) < 1.0


def test_seeds_and_positions_give_other_numbers() -> None:
    numbers = {uniform(seed, position) for seed in range(20) for position in range(50)}
    assert len(numbers) == 1000


@settings(deadline=None)
@example(values=[-2.3021548895766377e-35, 0.0], top=1)
@given(values=LOGITS, top=st.integers(0, 20))
def test_log_probabilities(values: list[float], top: int) -> None:
    row = logits(*values)
    token = len(values) - 1
    found = log_probabilities(row, token, top)
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    assert found.sampled == pytest.approx(exact[token], abs=1e-9)
    order = np.argsort(-row, kind="stable")[:top]
    assert [token_id for token_id, _ in found.top] == order.tolist()
    np.testing.assert_allclose([value for _, value in found.top], exact[order], atol=1e-9)
