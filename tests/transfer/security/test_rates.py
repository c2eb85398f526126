"""No client gets more than its bounds, whatever it does; and none gets less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import Busy, ConfigError
from kvstrata.transfer.security.rates import NO_BOUND, USUAL, Account, AccountBook, Bounds, bounds_of

GAPS = st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=200)


@given(gaps=GAPS, rate=st.floats(0.1, 50), burst=st.integers(1, 30))
def test_in_no_window_is_more_taken_than_a_burst_and_what_has_come_back(
    gaps: list[float], rate: float, burst: int
) -> None:
    account, now, taken = Account(Bounds(requests_s=rate, burst=burst), 0.0), 0.0, []
    for gap in gaps:
        now += gap
        if account.take(now):
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - taken[first]) + 1e-6


@given(gaps=GAPS, rate=st.floats(0.1, 50), burst=st.integers(1, 30))
def test_who_keeps_to_the_rate_is_never_refused(gaps: list[float], rate: float, burst: int) -> None:
    account, now = Account(Bounds(requests_s=rate, burst=burst), 0.0), 0.0
    for gap in gaps:
        now += gap + 1.0001 / rate
        assert account.take(now)


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60), bound=st.integers(1, 4))
def test_accounts_are_of_those_that_are_connected(steps: list[tuple[str, bool]], bound: int) -> None:
    book, model = AccountBook(Bounds(connections=bound)), {}
    for who, comes in steps:
        have = model.get(who, 0)
        if not comes:
            if have:
                book.leave(who)
                model[who] = have - 1
        elif have == bound:
            with pytest.raises(Busy):
                book.enter(who, 0.0)
        else:
            book.enter(who, 0.0)
            model[who] = have + 1
        book.check()
        assert len(book) == sum(count > 0 for count in model.values())


def test_connections_of_one_client_share_its_account() -> None:
    book = AccountBook(USUAL)
    assert book.enter("a", 0.0) is book.enter("a", 0.0) is not book.enter("b", 0.0)


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"requests_s": 0.0}, {"burst": 0}, {"unproved": 0}])
def test_bounds_that_let_nobody_in_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Bounds(**wrong)  # type: ignore[arg-type]


def test_bounds_of_an_operator() -> None:
    assert bounds_of(20_000, 1024) == USUAL
    assert bounds_of(5, 2) == Bounds(connections=2, requests_s=5.0, burst=5)
    free = bounds_of(0, 0)
    account = Account(free, 0.0)
    assert free.connections == NO_BOUND and all(account.take(0.0) for _ in range(3 * USUAL.burst))
    for wrong in ((-1, 1), (1, -1)):
        with pytest.raises(ConfigError, match="0 is no bound"):
            bounds_of(*wrong)
