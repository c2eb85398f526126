"""No client gets more than its bounds, whatever it does; and none gets less."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import Busy, ConfigError
from kvstrata.transfer.security.rates import (
    CLIENTS_OF_A_SUBJECT,
    CONNECTIONS_OF_A_SUBJECT,
    NO_BOUND,
    USUAL,
    Account,
    AccountBook,
    Bounds,
    bounds_of,
)

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


WHO = st.tuples(st.sampled_from(("", "a", "b")), st.sampled_from((b"1", b"2", b"3")))


@given(steps=st.lists(st.tuples(WHO, st.booleans()), max_size=60), bound=st.integers(1, 4), together=st.integers(1, 6))
def test_accounts_are_of_those_that_are_connected(
    steps: list[tuple[tuple[str, bytes], bool]], bound: int, together: int
) -> None:
    book, model = AccountBook(Bounds(connections=bound)), Counter[tuple[str, bytes]]()
    book.together = Bounds(connections=together)
    for who, comes in steps:
        of_subject = sum(count for (subject, _), count in model.items() if subject == who[0])
        if not comes:
            if model[who]:
                book.leave(*who)
                model[who] -= 1
        elif model[who] == bound or (who[0] and of_subject == together):
            with pytest.raises(Busy):
                book.enter(*who, 0.0)
        else:
            book.enter(*who, 0.0)
            model[who] += 1
        book.check()
        assert len(book) == sum(count > 0 for count in model.values())


def test_connections_of_one_client_share_its_account_and_others_of_its_subject_have_their_own() -> None:
    book = AccountBook(USUAL)
    mine = book.enter("a", b"1", 0.0)
    assert book.enter("a", b"1", 0.0) is mine
    assert book.enter("a", b"2", 0.0) is not mine and book.enter("b", b"1", 0.0) is not mine


def test_a_fleet_of_one_token_is_bounded_together_and_far_wider() -> None:
    book = AccountBook(Bounds(requests_s=0.001, burst=2))
    fleet = [book.enter("fleet", bytes([each]) * 16, 0.0) for each in range(80) for _ in range(16)]
    assert sum(account.take(0.0) for account in fleet for _ in range(3)) == 2 * CLIENTS_OF_A_SUBJECT
    assert book.enter("another", b"x", 0.0).take(0.0)
    with pytest.raises(Busy, match="fleet have at most"):
        for each in range(CONNECTIONS_OF_A_SUBJECT):
            book.enter("fleet", each.to_bytes(16, "big"), 0.0)
    book.check()


def test_without_a_bound_there_is_none_together() -> None:
    free = bounds_of(0, 0).together()
    assert free.connections >= NO_BOUND and free.requests_s >= NO_BOUND


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
