"""Predictions against exact caches: chains, sizes, samples that are too many, polls, tenants that come and go."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master.directory.probing import Keys
from kvstrata.master.reuse.distances import ReuseDistances
from kvstrata.master.reuse.lookup_log import CALL_BYTES, HASH_BYTES, WAITING_BYTES_MAX, Call, LookupLog, bytes_of
from kvstrata.master.reuse.what_if import FACTORS, IDLE_S, POLL_S, WhatIf

BYTES = 4096


class ExactCache:
    """An LRU of chains, by bytes: all of a call at one moment, the deeper the colder."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.held: OrderedDict[int, int] = OrderedDict()

    def call(self, chain: list[int], block_bytes: int = BYTES) -> int:
        """Hits of a lookup whose misses are then stored."""
        hits = next((at for at, block in enumerate(chain) if block not in self.held), len(chain))
        for block in reversed(chain):
            self.held[block] = block_bytes
            self.held.move_to_end(block)
        while sum(self.held.values()) > self.nbytes:
            self.held.popitem(last=False)
        return hits


def mixed(chain: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Small numbers as hashes: spread, distinct."""
    return np.array(chain, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(0x5851F42D4C957F2D)


def keys(chain: list[int]) -> Keys:
    return np.stack((mixed(chain), mixed(chain)), axis=1)


def absent(chain: list[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.zeros(len(chain), dtype=np.bool_)


@st.composite
def calls(draw: st.DrawFn) -> list[list[int]]:
    """Chains out of a tree: a prefix of some branch, so that equal numbers have equal parents."""
    branches = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
    numbers: dict[tuple[int, ...], int] = {}
    chains = [
        [numbers.setdefault(tuple(branch[: depth + 1]), len(numbers) + 1) for depth in range(len(branch))]
        for branch in branches
    ]
    picks = draw(st.lists(st.tuples(st.integers(0, len(chains) - 1), st.integers(1, 6)), min_size=1, max_size=40))
    return [chains[which][:length] for which, length in picks]


@settings(max_examples=60, deadline=None)
@given(calls(), st.integers(1, 20))
def test_while_all_blocks_are_samples_predictions_are_exact(chains: list[list[int]], blocks: int) -> None:
    """Prefixes and branches included; the greatest error is that of a cell of the histogram."""
    distances, cache = ReuseDistances(0.0), ExactCache(blocks * BYTES)
    hits = 0
    for chain in chains:
        hits += cache.call(chain)
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0)
        distances.stored(mixed(chain), BYTES, 0.0)
        distances.check()
    asked = sum(len(chain) for chain in chains)
    # A size amid two blocks', so that the cell in which a distance lies is wholly on one side of it.
    (predicted,) = distances.predict([blocks * BYTES + BYTES // 2])
    assert predicted == pytest.approx(hits / asked, abs=1e-9)


def test_a_long_history_is_sampled_and_stays_close() -> None:
    """Sessions that grow, many more blocks than samples."""
    rng = random.Random(5)
    sessions = [[number * 1000 + depth for depth in range(200)] for number in range(60)]
    lengths = [20] * len(sessions)
    distances = ReuseDistances(0.0, samples_max=1500)
    sizes = [blocks * BYTES for blocks in (500, 1500, 4000, 12_000)]
    caches = [ExactFast(size // BYTES) for size in sizes]
    hits, asked = [0] * len(sizes), 0
    for _ in range(600):
        number = min(int(rng.expovariate(1 / 12)), len(sessions) - 1)
        lengths[number] = min(lengths[number] + rng.randrange(4), 200)
        chain = sessions[number][: lengths[number]]
        asked += len(chain)
        for at, cache in enumerate(caches):
            hits[at] += cache.call(chain)
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0)
        distances.stored(mixed(chain), BYTES, 0.0)
    distances.check()
    assert distances.rate < 0.9 and distances.samples <= 1500
    for predicted, exact in zip(distances.predict(sizes), hits, strict=True):
        assert predicted == pytest.approx(exact / asked, abs=0.02)


class ExactFast(ExactCache):
    """Blocks of one size: no sums."""

    def call(self, chain: list[int], block_bytes: int = 1) -> int:
        hits = next((at for at, block in enumerate(chain) if block not in self.held), len(chain))
        for block in reversed(chain):
            self.held[block] = 1
            self.held.move_to_end(block)
        while len(self.held) > self.nbytes:
            self.held.popitem(last=False)
        return hits


def test_distances_are_bytes_not_blocks() -> None:
    """A large namespace of the same tenant pushes a small one out."""
    distances = ReuseDistances(0.0)
    small, large = [1], [2]
    for _ in range(50):
        for chain, nbytes in ((small, 1000), (large, 9000)):
            distances.asked(mixed(chain), absent(chain), nbytes, 0.0)
            distances.stored(mixed(chain), nbytes, 0.0)
    below, above = distances.predict([9000, 11_000])
    assert below == 0 and above == pytest.approx(98 / 100)


def test_what_was_never_stored_is_no_hit_at_any_size() -> None:
    distances = ReuseDistances(0.0)
    for _ in range(10):
        distances.asked(mixed([1, 2, 3]), absent([1, 2, 3]), BYTES, 0.0)
    assert distances.predict([1 << 40]) == [0.0]
    distances.stored(mixed([1, 2, 3]), BYTES, 0.0)
    for _ in range(10):
        distances.asked(mixed([1, 2, 3]), absent([1, 2, 3]), BYTES, 0.0)
    assert distances.predict([1 << 40]) == [0.5]
    distances.check()


def test_a_block_stays_as_long_as_one_that_follows_it() -> None:
    """An engine that has the head of a chain itself asks for the tail alone: the pool keeps both."""
    distances = ReuseDistances(0.0)
    for chain in ([1, 2, 3], [10, 11, 12, 13], [3], [1, 2, 3]):
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0)
        distances.stored(mixed(chain), BYTES, 0.0)
    assert distances.predict([4 * BYTES]) == [pytest.approx(3 / 11)]


def test_stores_are_no_references() -> None:
    distances = ReuseDistances(0.0)
    for block in range(100):
        distances.stored(mixed([block]), BYTES, 0.0)
    assert distances.references == 0 and distances.samples == 100
    distances.asked(mixed([99]), absent([99]), BYTES, 0.0)
    assert distances.predict([2 * BYTES]) == [1.0]


def test_blocks_from_before_the_start_say_nothing() -> None:
    """The pool had them when this began to look: neither a hit nor a miss of any size."""
    distances = ReuseDistances(0.0)
    distances.asked(mixed([1, 2]), ~absent([1, 2]), BYTES, 0.0)
    distances.asked(mixed([3]), absent([3]), BYTES, 0.0)
    assert distances.predict([1 << 40]) == [0.0]
    distances.asked(mixed([1, 2]), ~absent([1, 2]), BYTES, 0.0)
    assert distances.predict([1 << 40]) == [pytest.approx(2 / 3)]


def test_a_block_twice_in_a_call_is_taken_once() -> None:
    distances = ReuseDistances(0.0)
    for _ in range(3):
        distances.asked(mixed([7, 8, 7, 9, 8]), absent([0] * 5), BYTES, 0.0)
        distances.stored(mixed([7, 8, 7, 9, 8]), BYTES, 0.0)
        distances.check()
    assert distances.samples == 3


def test_one_very_long_chain_takes_no_more_samples_than_a_call_may() -> None:
    distances = ReuseDistances(0.0)
    chain = list(range(50_000))
    for _ in range(4):
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0)
        distances.stored(mixed(chain), BYTES, 0.0)
    distances.check()
    assert distances.samples <= 512
    whole, half = distances.predict([51_000 * BYTES, 25_000 * BYTES])
    assert whole == pytest.approx(0.75, abs=0.02) and half == pytest.approx(0.375, abs=0.05)


def test_old_counts_fade() -> None:
    distances = ReuseDistances(0.0, half_life_s=100.0)
    for _ in range(100):
        distances.asked(mixed([1]), absent([1]), BYTES, 0.0)
    for block in range(100):
        distances.asked(mixed([1000 + block]), absent([1]), BYTES, 1000.0)
        distances.stored(mixed([1]), BYTES, 1000.0)
    for _ in range(100):
        distances.asked(mixed([1]), absent([1]), BYTES, 1000.0)
    assert distances.predict([1 << 40]) == [pytest.approx(0.5, abs=0.01)]


def test_samples_beyond_what_anyone_asks_about_are_forgotten_first() -> None:
    """Endless new blocks must not thin out the samples of what is in use."""
    distances = ReuseDistances(0.0, samples_max=400)
    distances.predict([20 * BYTES])
    for start in range(0, 10_000, 10):
        chain = list(range(start, start + 10))
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0)
        distances.stored(mixed(chain), BYTES, 0.0)
    distances.check()
    assert distances.rate == 1.0 and distances.samples >= 20


def test_small_counts_of_nothing() -> None:
    distances = ReuseDistances(0.0)
    assert distances.predict([0, 1, 1 << 60]) == [0.0, 0.0, 0.0] and distances.predict([]) == []
    distances.asked(mixed([1]), absent([1]), BYTES, 0.0)
    assert distances.predict([0]) == [0.0]


# ---------------------------------------------------------------------- tenants


def loop(what_if: WhatIf, salt: str, blocks: int, rounds: int, *, group: int = 0, at: float = 0.0) -> float:
    """A tenant that goes through its blocks, one a lookup, round and round. Returns the time after."""
    for _ in range(rounds):
        for block in range(blocks):
            at += 1.0
            chain = [block]
            what_if.asked(group, salt, keys(chain), absent(chain), BYTES, at)
            what_if.stored(group, salt, keys(chain), BYTES, at)
    return at


def test_a_row_tells_of_each_multiple_of_the_quota() -> None:
    what_if = WhatIf(random.Random(0), half_life_s=math.inf)
    loop(what_if, "tenant", blocks=40, rounds=10)
    row = what_if.predict_row("tenant", 21 * BYTES)
    assert [prediction.factor for prediction in row] == list(FACTORS)
    assert [prediction.nbytes for prediction in row] == [int(factor * 21 * BYTES) for factor in FACTORS]
    assert [prediction.hit_rate for prediction in row] == [0.0, 0.0, pytest.approx(0.9), pytest.approx(0.9)]
    assert what_if.predict_row("nobody", BYTES) == []
    what_if.check()


def test_tenants_and_groups_are_apart() -> None:
    what_if = WhatIf(random.Random(0), half_life_s=math.inf)
    at = loop(what_if, "a", blocks=10, rounds=2)
    at = loop(what_if, "b", blocks=10, rounds=1, at=at)
    assert what_if.predict("a", [1 << 30]) == [0.5] and what_if.predict("b", [1 << 30]) == [0.0]
    loop(what_if, "a", blocks=10, rounds=1, group=1, at=at)
    assert what_if.predict("a", [1 << 30]) == [pytest.approx(1 / 3)]


def test_polling_is_one_lookup_and_asking_again_later_is_another() -> None:
    what_if = WhatIf(random.Random(0), half_life_s=math.inf)
    chain, at = list(range(20)), 0.0
    for number in range(30):  # goes on for much longer than POLL_S, but no pause is as long
        at += POLL_S / 3
        what_if.asked(0, "tenant", keys(chain), absent(chain), BYTES, at)
        other = [5, 1000 + number]
        what_if.asked(0, "tenant", keys(other), absent(other), BYTES, at)
    assert what_if.asked_by("tenant").blocks_asked == 20 + 30 * 2
    what_if.stored(0, "tenant", keys(chain), BYTES, at)
    what_if.asked(0, "tenant", keys(chain), ~absent(chain), BYTES, at + 1 + POLL_S)
    counts = what_if.asked_by("tenant")
    assert counts.blocks_asked == 40 + 30 * 2 and counts.blocks_hit == 20
    what_if.check()


def test_the_least_active_tenant_goes_and_a_flood_of_new_ones_drives_nobody_out() -> None:
    what_if = WhatIf(random.Random(0), salts_max=4)
    for number in range(4):
        loop(what_if, f"old {number}", blocks=2, rounds=2, at=float(number))
    for number in range(1000):
        loop(what_if, f"flood {number}", blocks=1, rounds=1, at=20.0)
    assert len(what_if) == 4 and all(what_if.asked_by(f"old {number}").blocks_asked for number in range(4))
    assert what_if.turned_away == 2000
    later = 20.0 + IDLE_S
    loop(what_if, "old 3", blocks=1, rounds=1, at=later)
    loop(what_if, "new", blocks=1, rounds=1, at=later)
    assert what_if.asked_by("new").blocks_asked == 1
    assert what_if.asked_by("old 0").blocks_asked == 0 and what_if.asked_by("old 3").blocks_asked == 5
    what_if.check()


@pytest.mark.parametrize(("ends", "expected"), [(False, [0, 5]), (True, [2, 2])])
def test_a_group_that_is_gone_fills_no_cache_and_its_next_use_is_a_first_one(ends: bool, expected: list[int]) -> None:
    distances = ReuseDistances(0.0)
    chains = {1: [1, 2], 2: [3, 4, 5]}
    for group, chain in chains.items():
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0, group)
        distances.stored(mixed(chain), BYTES, 0.0, group)
    if ends:
        distances.forget(2)
    distances.check()
    for group, chain in chains.items():
        distances.asked(mixed(chain), absent(chain), BYTES, 0.0, group)
    distances.check()
    hits = [10 * rate for rate in distances.predict([int(2.5 * BYTES), int(5.5 * BYTES)])]
    assert hits == pytest.approx(expected)


@pytest.mark.parametrize(
    ("salt", "group", "hits"),
    [
        ("nobody", None, {"a": 4, "b": 4}),
        ("a", 1, {"a": 2, "b": 4}),
        ("a", None, {"a": 0, "b": 4}),
        (None, 2, {"a": 2, "b": 2}),
        (None, None, {"a": 0, "b": 0}),
    ],
)
def test_what_is_gone_concerns_its_tenant_and_group_only(
    salt: str | None, group: int | None, hits: dict[str, int]
) -> None:
    what_if = WhatIf(random.Random(1))
    chain = [1, 2]

    def used(now: float) -> None:
        for name in ("a", "b"):
            for number in (1, 2):
                what_if.asked(number, name, keys(chain), absent(chain), BYTES, now)
                what_if.stored(number, name, keys(chain), BYTES, now)

    used(0.0)
    what_if.forget(salt, group)
    what_if.check()
    used(2 * POLL_S)
    found = {name: what_if.predict(name, [1 << 30])[0] * what_if.asked_by(name).blocks_asked for name in ("a", "b")}
    assert found == pytest.approx(hits)


def test_a_forgotten_tenant_starts_anew() -> None:
    what_if = WhatIf(random.Random(0))
    loop(what_if, "tenant", blocks=3, rounds=3)
    what_if.forget("tenant")
    what_if.forget("nobody")
    assert what_if.asked_by("tenant").blocks_asked == 0 and what_if.predict_row("tenant", BYTES) == []


def test_keys_that_are_alike_are_sampled_evenly() -> None:
    """Hashes come from clients: consecutive numbers must not be all in, or all out."""
    what_if = WhatIf(random.Random(3), half_life_s=math.inf)
    raw = np.stack((np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.uint64)), axis=1)
    for start in range(0, len(raw), 100):
        what_if.stored(0, "tenant", raw[start : start + 100], BYTES, 0.0)
    what_if.check()
    sampled = what_if._tenants["tenant"].distances
    assert sampled.samples / 100_000 == pytest.approx(sampled.rate, rel=0.1)


# ---------------------------------------------------------------------- the way there


def call(block: int, present: bool | None, hashes: int = 1) -> Call:
    chain = [block] * hashes
    mask = None if present is None else np.full(hashes, present)
    return Call(0, "tenant", keys(chain), mask, BYTES, float(block))


def test_calls_are_heard_in_their_order() -> None:
    log = LookupLog(WhatIf(random.Random(0)))
    for number, present in enumerate((False, None, True)):
        log.put(call(7, present))
        assert log.read(lambda what_if: what_if.asked_by("tenant").blocks_asked) == 0, f"heard early: {number}"
    log.put(call(8, False))
    assert log.hear() == 4 and log.hear() == 0
    assert log.read(lambda what_if: what_if.asked_by("tenant").blocks_asked) == 2  # the third repeats the first
    assert log.missed == 0


def test_placements_heard_together_are_as_if_heard_one_by_one() -> None:
    rng, chains = random.Random(3), itertools.count()
    at_once, one_by_one = (LookupLog(WhatIf(random.Random(0), half_life_s=math.inf)) for _ in range(2))
    stored: list[Call] = []
    for number in range(400):
        tenant, present = f"tenant {rng.randrange(2)}", None
        chain = keys([next(chains) for _ in range(rng.randrange(1, 40))])
        if stored and rng.random() < 0.3:
            tenant, chain = stored[-1].salt, rng.choice(stored[-20:]).keys
            present = np.full(len(chain), True)
        said = Call(0, tenant, chain, present, BYTES, float(number))
        if present is None:
            stored.append(said)
        at_once.put(said)
        one_by_one.put(said)
        assert one_by_one.hear() == 1
    calls, heard = 0, []
    while part := at_once._next():
        calls += 1
        heard += part
        at_once._take(part)
    assert len(heard) == 400 and calls < 350, "most go together"
    sizes = [BYTES * blocks for blocks in (10, 100, 1000, 5000)]
    for tenant in ("tenant 0", "tenant 1"):
        together = at_once.read(lambda what_if, tenant=tenant: what_if.predict(tenant, sizes))
        assert together == one_by_one.read(lambda what_if, tenant=tenant: what_if.predict(tenant, sizes))
        assert 0 < together[0] < together[-1]
    at_once.read(lambda what_if: what_if.check())


def test_a_full_log_misses_calls_and_takes_more_once_heard() -> None:
    log = LookupLog(WhatIf(random.Random(0)))
    hashes = 1 << 16
    for number in range(WAITING_BYTES_MAX // bytes_of(call(0, False, hashes)) + 3):
        log.put(call(number, False, hashes))
    assert log.missed == 3
    while log.hear():
        pass
    log.put(call(99, False))
    assert log.missed == 3 and log.hear() == 1


def test_small_calls_count_for_the_memory_that_they_take() -> None:
    log = LookupLog(WhatIf(random.Random(0)))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        while not log.missed:
            log.put(call(7, False, 24))
        assert tracemalloc.get_traced_memory()[0] - before < 1.5 * WAITING_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_what_is_gone_is_heard_in_its_order_and_never_lost() -> None:
    log = LookupLog(WhatIf(random.Random(0)))
    log.put(call(7, False))
    log.put(call(8, False, (WAITING_BYTES_MAX - 2 * CALL_BYTES) // HASH_BYTES - 1))
    log.gone(None, "tenant")
    log.put(call(9, False))
    assert log.missed == 1, "it is full"
    while log.hear():
        pass
    assert log.read(lambda what_if: what_if.asked_by("tenant").blocks_asked) == 0
    log.put(call(9, False))
    assert log.hear() == 1
    assert log.read(lambda what_if: what_if.asked_by("tenant").blocks_asked) == 1
