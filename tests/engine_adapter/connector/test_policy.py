"""Load or recompute, on measured numbers and an injected time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector.policy import (
    EXPLORE_DECISIONS,
    Decision,
    LoadOrCompute,
    LoadSeconds,
)

MB = 1 << 20
#: 1,000 tokens are 100 MB, loads run at 1 GB/s after 10 ms; 16 tokens a block.
ALIGNED = 16


def policy(name: str = "auto", deadline_s: float = 5.0) -> LoadOrCompute:
    return LoadOrCompute(name, deadline_s, ALIGNED)  # type: ignore[arg-type]


def load(
    at: LoadOrCompute, tokens: int, *, latency_s: float = 0.01, bytes_s: float = 1000 * MB, **more: object
) -> None:
    nbytes = tokens * MB // 10
    values = {
        "asked_tokens": tokens,
        "loaded_tokens": tokens,
        "nbytes": nbytes,
        "seconds": latency_s + nbytes / bytes_s,
        "explored": False,
        "now": 0.0,
    }
    at.load_ended(**(values | more))  # type: ignore[arg-type]
    at.check()


def choose(at: LoadOrCompute, tokens: int, now: float = 0.0) -> tuple[int, Decision]:
    choice = at.choose(tokens, tokens * MB // 10, now)
    at.check()
    return choice.tokens, choice.decision


def test_what_is_not_known_is_loaded_so_that_it_becomes_known() -> None:
    at = policy()
    assert choose(at, 1600) == (1600, Decision.ALL)
    at.forward_done(100, 0.01)
    assert choose(at, 1600) == (1600, Decision.ALL)  # prefill alone says nothing
    loads_only = policy()
    load(loads_only, 1600, latency_s=1.0)
    assert choose(loads_only, 1600) == (1600, Decision.ALL)


def test_the_line_separates_latency_from_bandwidth() -> None:
    seconds = LoadSeconds()
    assert seconds.line() == (0.0, 0.0) and not seconds.known
    for megabytes in (1, 50, 100, 7, 300):
        seconds.add(megabytes * MB, 0.02 + megabytes * MB / 2e9)
    latency, per_byte = seconds.line()
    assert latency == pytest.approx(0.02) and 1 / per_byte == pytest.approx(2e9)


def test_loads_of_one_size_are_all_bandwidth_and_loads_of_nothing_all_latency() -> None:
    same = LoadSeconds()
    for _ in range(5):
        same.add(10 * MB, 0.1)
    assert same.line() == (0.0, pytest.approx(0.01 / MB))
    nothing = LoadSeconds()
    nothing.add(0, 5.0)
    assert nothing.line() == (5.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 100)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_the_line_is_never_negative(samples: list[tuple[int, float]]) -> None:
    seconds = LoadSeconds()
    for nbytes, took in samples:
        seconds.add(nbytes, took)
    latency, per_byte = seconds.line()
    assert latency >= 0.0 and per_byte >= 0.0


def test_the_faster_of_the_two_wins() -> None:
    at = policy()
    for tokens in (160, 1600, 800):
        load(at, tokens)
    at.forward_done(1000, 1.0)  # 1,000 tokens: 1 s to compute, 0.11 s to load
    assert choose(at, 1600) == (1600, Decision.ALL)
    at.forward_done(10_000_000, 10.0)  # the last seconds count: 1,000,000 tokens/s
    assert choose(at, 1600) == (0, Decision.COMPUTE)


def test_latency_makes_short_loads_lose_and_long_ones_win() -> None:
    at = policy()
    for tokens in (160, 1600, 800, 3200):
        load(at, tokens, latency_s=0.1)
    at.forward_done(4000, 1.0)  # 0.25 ms a token, against 0.1 ms and 100 ms once
    assert choose(at, 320) == (0, Decision.COMPUTE)
    assert choose(at, 3200) == (3200, Decision.ALL)


def test_a_load_is_cut_to_what_the_deadline_allows() -> None:
    at = policy(deadline_s=0.5)
    for tokens in (160, 1600, 800):
        load(at, tokens, latency_s=0.0)
    at.forward_done(100, 1.0)
    tokens, decision = choose(at, 16_000)  # 1.6 s to load; 0.4 s are allowed
    assert decision is Decision.PART and tokens % ALIGNED == 0 and 3900 <= tokens <= 4000
    assert choose(at, 1600) == (1600, Decision.ALL)


def test_always_and_never_do_not_measure() -> None:
    always, never = policy("always"), policy("never")
    for at in (always, never):
        load(at, 1600, latency_s=100.0)
        at.forward_done(10_000, 0.1)
    assert choose(always, 1600) == (1600, Decision.ALL) and choose(never, 1600) == (0, Decision.OFF)


@pytest.mark.parametrize("name", ["auto", "always"])
def test_an_absent_pool_is_not_loaded_from_until_it_is_ready(name: str) -> None:
    at = policy(name)
    at.pool_ready = False
    assert choose(at, 1600) == (0, Decision.OFF)
    at.pool_ready = True
    assert choose(at, 1600) == (1600, Decision.ALL)


def slow_pool() -> LoadOrCompute:
    """One slow load after quick ones; computing is faster since."""
    at = policy()
    load(at, 1600)
    load(at, 160, latency_s=4.0)
    at.forward_done(10_000, 1.0)
    assert choose(at, 1600)[1] is Decision.COMPUTE
    return at


def test_after_a_slow_moment_a_good_exploration_brings_loading_back() -> None:
    at = slow_pool()
    decisions = [choose(at, 3200, now=float(n))[1] for n in range(2, 2 + EXPLORE_DECISIONS)]
    assert decisions.count(Decision.EXPLORE) == 1
    load(at, 3200, latency_s=0.0, bytes_s=10_000 * MB, explored=True, now=20.0)
    assert choose(at, 3200, now=20.0) == (3200, Decision.ALL)


def test_explorations_are_a_bounded_share_of_decisions_and_of_time() -> None:
    at = slow_pool()
    explored, now = 0, 0.0
    for _ in range(1000):
        now += 0.1
        if choose(at, 1600, now)[1] is Decision.EXPLORE:
            explored += 1
            now += 3.0
            load(at, 1600, latency_s=3.0, explored=True, now=now)
    assert explored >= 3  # it does not give up
    assert 3.0 * explored <= 0.1 * now + 3.0
    busy = slow_pool()
    many = [choose(busy, 1600, now=1000.0 * n)[1] for n in range(900)]
    assert 900 // (EXPLORE_DECISIONS + 2) <= many.count(Decision.EXPLORE) <= 900 // EXPLORE_DECISIONS


def test_loads_that_bring_nothing_stop_being_worth_it() -> None:
    at = policy()
    at.forward_done(10_000, 1.0)
    load(at, 1600)
    load(at, 160, latency_s=0.01)
    assert choose(at, 1600)[0] == 0  # 0.17 s against 0.16 s
    at = policy()
    at.forward_done(5_000, 1.0)
    load(at, 1600)
    assert choose(at, 1600)[1] is Decision.ALL
    for _ in range(20):
        load(at, 1600, loaded_tokens=0)
    assert choose(at, 1600) == (0, Decision.COMPUTE)


@given(
    tokens=st.integers(0, 1000).map(lambda n: n * ALIGNED),
    samples=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 10), st.floats(0, 1)), max_size=8),
    prefill=st.lists(st.tuples(st.integers(-1, 5000), st.floats(-1, 20)), max_size=4),
    deadline_s=st.floats(0.001, 10),
)
@settings(max_examples=150, deadline=None)
def test_any_history_chooses_an_aligned_part(
    tokens: int, samples: list[tuple[int, float, float]], prefill: list[tuple[int, float]], deadline_s: float
) -> None:
    at = policy(deadline_s=deadline_s)
    for asked, seconds, share in samples:
        load(at, asked, seconds=seconds, loaded_tokens=int(asked * share))
    for computed, seconds in prefill:
        at.forward_done(computed, seconds)
    chosen, _ = choose(at, tokens, now=5.0)
    assert 0 <= chosen <= tokens and chosen % ALIGNED == 0
