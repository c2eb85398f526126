"""The token bucket of copies, with a clock in hand."""

from __future__ import annotations

import pytest

from kvstrata.storage.copying.bandwidth import BURST_S, Bandwidth, Pace


def test_what_moves_is_bounded_over_any_stretch() -> None:
    bandwidth, now, moved = Bandwidth(1000, 0.0), 0.0, 0
    while now < 10.0:
        moved += 100 if bandwidth.take(100, now) else 0
        now += 0.01
    assert 1000 * 10 - 100 <= moved <= 1000 * (10 + BURST_S)


def test_it_says_how_long_to_wait() -> None:
    bandwidth = Bandwidth(1000, 0.0)
    assert bandwidth.take(250, 0.0) and not bandwidth.take(100, 0.0)
    assert bandwidth.wait_s(100, 0.0) == pytest.approx(0.1)
    assert not bandwidth.take(100, 0.09) and bandwidth.take(100, 0.1)


def test_a_piece_larger_than_the_bucket_goes_through_and_the_next_one_pays() -> None:
    bandwidth = Bandwidth(1000, 0.0)
    assert bandwidth.take(5000, 0.0)
    assert bandwidth.wait_s(1, 0.0) == pytest.approx(4.75, abs=0.01)


def test_bytes_that_did_not_move_are_given_back() -> None:
    bandwidth = Bandwidth(1000, 0.0)
    assert bandwidth.take(250, 0.0)
    bandwidth.give_back(250)
    assert bandwidth.take(250, 0.0)
    bandwidth.give_back(10**9)
    assert not bandwidth.take(251, 0.0) or bandwidth.wait_s(1, 0.0) > 0.0, "no more than the bucket holds"


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bandwidth = Bandwidth(1000, 100.0)
    assert bandwidth.take(250, 100.0)
    assert not bandwidth.take(1, 99.0) and not bandwidth.take(1, 100.0)


def test_without_a_bound_nobody_waits() -> None:
    bandwidth = Bandwidth(0, 0.0)
    assert all(bandwidth.take(1 << 40, 0.0) for _ in range(10))


def test_a_wait_that_cannot_end_in_time_ends_at_once() -> None:
    now = [0.0]
    pace = Pace(1000, lambda: now[0])
    assert pace.take(1000, 0.0)
    assert not pace.take(250, 0.5), "it would be 1.0"
    assert not pace.take(1, 100.0, lambda: False), "told not to go on"
    now[0] = 2.0
    assert pace.take(250, 2.0)
