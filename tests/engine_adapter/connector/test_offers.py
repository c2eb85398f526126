"""Blocks offered lately: never two jobs for one, failed ones again, and what the pool has lost."""

from __future__ import annotations

from kvstrata.engine_adapter.connector.offers import STORE_TRIES_MAX, OfferedBlocks, OfferKey


def key(number: int, group: int = 0) -> OfferKey:
    return OfferKey(group, bytes([number]) * 16)


def stored(offers: OfferedBlocks, *keys: OfferKey, done: int = 1, blame: bool = True) -> None:
    offers.offered(keys)
    offers.ended(keys, bytes([done] * len(keys)), blame=blame)
    offers.check()


def test_a_block_is_offered_once() -> None:
    offers = OfferedBlocks()
    assert offers.wanted(key(1), 0)
    offers.offered([key(1)])
    assert not offers.wanted(key(1), 0) and not offers.wanted(key(1), offers.moment())  # in flight
    assert offers.wanted(key(1, group=1), 0) and offers.in_flight() == 1
    offers.ended([key(1)], b"\1")
    assert not offers.wanted(key(1), 0) and offers.in_flight() == 0


def test_a_lookup_knows_only_what_was_stored_before_it() -> None:
    offers = OfferedBlocks()
    before = offers.moment()
    offers.offered([key(1)])
    meanwhile = offers.moment()
    offers.ended([key(1)], b"\1")
    assert not offers.wanted(key(1), before) and not offers.wanted(key(1), meanwhile)
    assert offers.wanted(key(1), offers.moment())  # asked after it was stored, and not there: evicted


def test_a_failed_store_is_tried_again_a_few_times_and_then_when_somebody_else_asks() -> None:
    offers = OfferedBlocks()
    for _ in range(STORE_TRIES_MAX):
        assert offers.wanted(key(1), 0)
        stored(offers, key(1), done=0)
    assert not offers.wanted(key(1), 0)
    assert offers.wanted(key(1), offers.moment())
    stored(offers, key(1), done=1)
    assert not offers.wanted(key(1), 0)


def test_an_absent_pool_is_no_failure_of_the_block() -> None:
    offers = OfferedBlocks()
    for _ in range(3 * STORE_TRIES_MAX):
        stored(offers, key(1), done=0, blame=False)
    assert offers.wanted(key(1), 0)


def test_what_a_load_missed_or_a_pool_lost_is_wanted() -> None:
    offers = OfferedBlocks()
    stored(offers, key(1), key(2))
    offers.offered([key(3)])
    offers.missing([key(1), key(3), key(9)])
    assert offers.wanted(key(1), 0) and not offers.wanted(key(2), 0) and not offers.wanted(key(3), 0)
    offers.pool_returned()
    assert offers.wanted(key(2), 0) and not offers.wanted(key(3), 0)
    offers.check()


def test_memory_is_bounded_and_the_oldest_goes_first_but_nothing_in_flight() -> None:
    offers = OfferedBlocks(limit=3)
    offers.offered([key(0)])
    for number in range(1, 8):
        stored(offers, key(number))
    assert len(offers) == 4 and offers.in_flight() == 1
    assert [number for number in range(8) if not offers.wanted(key(number), 0)] == [0, 5, 6, 7]
