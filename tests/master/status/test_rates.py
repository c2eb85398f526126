"""Counters over the last minute and hour, and bytes a second of nodes that start anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.master.status.flows import BELIEVED_MAX, RATE_S, Flows, Moved, Told
from kvstrata.master.status.ring import STEP_S, CounterRing

_samples = st.lists(st.tuples(st.floats(0.5, 9.0), st.integers(0, 100), st.integers(0, 5)), min_size=1, max_size=60)


@given(_samples, st.integers(3, 20), st.floats(1, 80))
def test_growth_is_the_difference_to_the_sample_that_was_last_before(
    samples: list[tuple[float, int, int]], bound: int, seconds: float
) -> None:
    ring, now, a, b, kept = CounterRing(("a", "b"), bound), 0.0, 0, 0, []
    for pause, more_a, more_b in samples:
        now, a, b = now + pause, a + more_a, b + more_b
        ring.sample({"a": a, "b": b}, now)
        ring.check()
        kept = [*kept, (now, a, b)][-bound:]
    over, grown = ring.grown(seconds)
    if len(kept) < 2:
        assert (over, grown) == (0.0, {"a": 0, "b": 0})
        return
    first = next(row for row in [*kept[:-1], kept[-2]] if row[0] >= now - seconds - STEP_S / 4 or row is kept[-2])
    assert over == pytest.approx(now - first[0]) and grown == {"a": a - first[1], "b": b - first[2]}
    series = ring.series("a", 5.0, 400)
    assert sum(n or 0 for n in series) == a - kept[0][1]  # every sample is in one bucket
    assert len(series) == 400 and series[0] is None


def test_a_minute_and_an_hour_of_steady_counting() -> None:
    ring = CounterRing(("n",))
    for at in range(1900):
        ring.sample({"n": 10 * at}, at * STEP_S)
    assert ring.grown(60.0) == (60.0, {"n": 300})
    assert ring.grown(3600.0) == (3600.0, {"n": 18_000})
    assert ring.series("n", 60.0, 60) == [300] * 60


def test_no_samples_is_nothing_and_not_a_rate() -> None:
    ring = CounterRing(("n",))
    assert ring.grown(60.0) == (0.0, {"n": 0}) and ring.series("n", 60.0, 3) == [None] * 3
    ring.sample({"n": 5_000}, 0.0)
    assert ring.grown(60.0) == (0.0, {"n": 0})


def _told(node: str, incarnation: int, out: int) -> Told:
    return Told(node, incarnation, Moved(out, 2 * out, 0))


def test_a_node_that_starts_anew_counts_from_its_start() -> None:
    flows = Flows()
    flows.turn([_told("n", 1, 1000)], 0.0)
    assert flows.total == Moved()  # it moved that before this master knew it
    flows.turn([_told("n", 1, 1500)], 2.0)
    assert flows.total == Moved(500, 1000, 0) and flows.rates("n") == (250.0, 500.0, 0.0)
    flows.turn([_told("n", 2, 40)], 4.0)
    assert flows.total == Moved(540, 1080, 0) and flows.rates("n") == (0.0, 0.0, 0.0)
    flows.turn([_told("n", 3, 100)], 5.0)  # more than before, and another start all the same
    assert flows.total == Moved(640, 1280, 0) and flows.rates("n") == (0.0, 0.0, 0.0)
    flows.turn([], 6.0)
    assert flows.total == Moved(640, 1280, 0) and flows.rates("n") == (0.0, 0.0, 0.0)
    flows.check()


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 1000), st.floats(0.1, 2 * RATE_S)),
        max_size=40,
    )
)
def test_the_total_never_falls_whatever_nodes_say(said: list[tuple[str, int, int, float]]) -> None:
    flows, now, before = Flows(), 0.0, Moved()
    for node, incarnation, out, pause in said:
        now += pause
        flows.turn([_told(node, incarnation, out)], now)
        flows.check()
        assert min(flows.total - before) >= 0
        before = flows.total


@pytest.mark.parametrize("incarnation", [1, 2])
def test_what_no_node_can_have_moved_is_not_counted(incarnation: int) -> None:
    flows = Flows()
    flows.turn([_told("n", 1, 1000), _told("m", 1, 0)], 0.0)
    flows.turn([_told("n", incarnation, BELIEVED_MAX), _told("m", 1, 70)], 2.0)
    assert flows.total == Moved(70, 140, 0) and flows.rates("n") == (0.0, 0.0, 0.0)
    flows.turn([_told("n", incarnation, BELIEVED_MAX + 10), _told("m", 1, 70)], 4.0)
    assert flows.total == Moved(80, 160, 0), "what follows counts again"
    flows.check()


def test_a_counter_past_what_a_sample_holds_stays_there() -> None:
    ring = CounterRing(("n", "m"))
    for at, n in enumerate((1 << 62, (1 << 63) - 1, 1 << 63, 1 << 70)):
        ring.sample({"n": n, "m": at}, at * STEP_S)
        ring.check()
    assert ring.grown(STEP_S) == (STEP_S, {"n": 0, "m": 1})
