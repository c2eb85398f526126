"""The hash table against a dict."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.master.directory import probing
from kvstrata.master.directory import table as table_module
from kvstrata.master.directory.probing import FEW, Keys, Remap, SlotArray, Values
from kvstrata.master.directory.table import BEGIN, CAPACITY_MIN, Cursor, Table
from kvstrata.proto.folding import fold

SMALL_KEYS = st.lists(st.integers(0, 300), max_size=120)


def keys_of(numbers: list[int]) -> Keys:
    """Few distinct keys, zero included, so that batches repeat and collide."""
    array = np.array(numbers, dtype=np.uint64)
    return np.column_stack((array // np.uint64(7), array))


class AgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.oracle: dict[int, int] = {}

    def moves(self, at_once: int, at_least: int, per_key: int) -> None:
        """How eagerly old slots are moved to new ones."""
        for name, value in (("MOVED_AT_ONCE", at_once), ("MOVED_MIN", at_least), ("MOVED_PER_KEY", per_key)):
            setattr(table_module, name, value)

    def teardown(self) -> None:
        self.moves(1 << 16, 1 << 11, 8)

    @rule(numbers=SMALL_KEYS, base=st.integers(1, 1000))
    def put(self, numbers: list[int], base: int) -> None:
        values = np.arange(base, base + len(numbers), dtype=np.uint32)
        self.table.put(keys_of(numbers), values)
        self.oracle.update(zip(numbers, values.tolist(), strict=True))

    @rule(numbers=SMALL_KEYS)
    def discard(self, numbers: list[int]) -> None:
        gone = self.table.discard(keys_of(numbers))
        assert gone == len({number for number in numbers if self.oracle.pop(number, None) is not None})

    @rule(numbers=SMALL_KEYS, bump=st.integers(1, 3))
    def update(self, numbers: list[int], bump: int) -> None:
        def change(values: Values) -> Values:
            return np.where(values % 2 == 0, values + np.uint32(bump), np.uint32(0)).astype(np.uint32)

        before, after = self.table.update(keys_of(numbers), change)
        expected = []
        for number in set(numbers):
            old = self.oracle.pop(number, 0)
            new = old + bump if old % 2 == 0 else 0
            if new:
                self.oracle[number] = new
            if old != new:
                expected.append((old, new))
        assert sorted(zip(before.tolist(), after.tolist(), strict=True)) == sorted(expected)

    @rule(modulus=st.integers(2, 5), step=st.integers(10, 200))
    def remap(self, modulus: int, step: int) -> None:
        top = max(self.oracle.values(), default=0) + 1
        mapping = np.array([value if value % modulus else 0 for value in range(top)], dtype=np.uint32)
        cursor: Cursor | None = BEGIN
        left = 100
        while cursor is not None and left:
            replaced, cursor = self.table.remap(Remap.of(mapping), cursor, step)
            assert not (replaced % modulus).any()
            assert cursor is None or not np.isin(self.table.passed(cursor), np.flatnonzero(mapping == 0)).any()
            self.table.check()
            left -= 1
        if not left:
            while cursor is not None:
                cursor = self.table.remap(Remap.of(mapping), cursor, 1 << 12)[1]
        self.oracle = {key: value for key, value in self.oracle.items() if value % modulus}

    @invariant()
    def same(self) -> None:
        everything = list(range(301))
        assert self.table.find(keys_of(everything)).tolist() == [self.oracle.get(key, 0) for key in everything]
        assert self.table.live == len(self.oracle)
        top = max(self.oracle.values(), default=0) + 1
        assert self.table.histogram(top).sum() == len(self.oracle)
        self.table.check()


class WhileMoving(AgainstDict):
    """The same, with tables that are nearly always between old slots and new."""

    def __init__(self) -> None:
        super().__init__()
        self.moves(0, 3, 0)


TestAgainstDict = AgainstDict.TestCase
TestWhileMoving = WhileMoving.TestCase
TestWhileMoving.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAgainstDict.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def random_keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, size=(count, 2), dtype=np.uint64)


def test_grows_and_keeps_everything() -> None:
    table, keys = Table(), random_keys(200_000)
    for start in range(0, len(keys), 7_001):
        table.put(
            keys[start : start + 7_001], np.arange(start, start + len(keys[start : start + 7_001]), dtype=np.uint32) + 1
        )
    assert np.array_equal(table.find(keys), np.arange(1, len(keys) + 1, dtype=np.uint32))
    assert not table.find(random_keys(10_000, seed=1)).any()
    assert table.nbytes / table.live <= 89
    table.check()


def test_a_large_table_grows_without_moving_everything_at_once() -> None:
    table, keys = Table(), random_keys(600_000)
    moving = 0
    for start in range(0, len(keys), 10_000):
        batch = keys[start : start + 10_000]
        before, ahead = table.capacity, table._next
        table.put(batch, np.ones(len(batch), dtype=np.uint32))
        if table.capacity > before >= 1 << 18:
            assert table._old is not None and table._old.live > 0.5 * start
            assert table._slots is ahead, "the slots that were made ready are the ones taken"
        moving += table._old is not None
        probe = keys[: start + 10_000 : 97]
        assert table.find(probe).all()
    assert 2 < moving < 40, "moves begin, and end"
    table.check()


def test_shrinks_when_emptied() -> None:
    table, keys = Table(), random_keys(50_000)
    table.put(keys, np.ones(len(keys), dtype=np.uint32))
    big = table.capacity
    assert table.discard(keys[100:]) == len(keys) - 100
    for _ in range(80):  # any change goes on with the move
        table.discard(random_keys(1, seed=5))
    assert table.capacity < big / 100 and table._old is None
    assert np.count_nonzero(table.find(keys)) == 100
    table.discard(keys)
    assert table.live == 0 and table.capacity == CAPACITY_MIN


def test_tombstones_do_not_pile_up() -> None:
    table = Table()
    for turn in range(300):
        keys = random_keys(500, seed=turn)
        table.put(keys, np.ones(500, dtype=np.uint32))
        table.discard(keys)
    assert table.capacity <= 4096
    table.check()


def test_equal_keys_in_one_batch_the_last_wins_and_count_once() -> None:
    table, keys = Table(), np.repeat(random_keys(3), 50, axis=0)
    table.put(keys, np.arange(1, 151, dtype=np.uint32))
    assert table.live == 3
    assert table.find(keys[::50]).tolist() == [50, 100, 150]


@pytest.mark.parametrize("left_few", [0, 3, 1000])
@settings(max_examples=15)
@given(batches=st.lists(st.lists(st.integers(0, 90), max_size=70), max_size=5))
def test_what_is_left_of_a_batch_is_found_and_put_key_by_key(left_few: int, batches: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "LEFT_FEW", left_few)
        slots, known = SlotArray(256), dict[int, int]()
        for numbers in batches:
            new = [number for number in numbers if number not in known]
            values = np.arange(len(known) + 1, len(known) + 1 + len(new), dtype=np.uint32)
            added, without = slots.insert(keys_of(new), values)
            known |= zip(new, values.tolist(), strict=True)
            assert added == len(set(new)) and not without.size
            slots.check()
            where = slots.locate(keys_of(numbers))
            assert slots.value[where].tolist() == [known[number] for number in numbers]
            gone = sorted({number for number in numbers if number % 5 == 0})
            slots.set(slots.locate(keys_of(gone)), np.zeros(len(gone), dtype=np.uint32))
            assert all(known.pop(number) for number in gone)
            assert (slots.locate(keys_of(list(range(91)))) >= 0).tolist() == [number in known for number in range(91)]


@pytest.mark.parametrize("batch", [100, FEW])
def test_a_key_that_finds_no_place_within_the_bound_makes_the_table_grow(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(probing, "PROBES_MAX", 2)
    table, keys = Table(), random_keys(5_000)
    for start in range(0, len(keys), batch):
        values = np.full(min(batch, len(keys) - start), start + 1, dtype=np.uint32)
        table.put(keys[start : start + batch], values)
    assert table.live == len(keys)
    table.check()


def test_key_by_key_and_in_batches_is_the_same() -> None:
    """While a large table moves, too: keys are found, changed and taken out wherever they are."""
    table, keys = Table(), random_keys(120_000)
    table.put(keys[:50_000], np.full(50_000, 7, dtype=np.uint32))
    while table._old is None:
        count = table.live
        table.put(keys[count : count + 1_000], np.full(1_000, 7, dtype=np.uint32))
    total, moving = table.live, 0
    for at in range(0, 12 * FEW, FEW):
        few = keys[at : at + FEW]
        moving += table._old is not None
        assert table.find(few).tolist() == [7] * FEW
        before, after = table.update(few, partial(np.add, np.uint32(at + 1)))
        assert (before.tolist(), after.tolist()) == ([7] * FEW, [at + 8] * FEW)
        assert table.discard(few[:3]) == 3 and table.discard(few[:3]) == 0
        table.put(few[2:4], np.array([1, 2], dtype=np.uint32))
        assert table.find(few).tolist() == [0, 0, 1, 2] + [at + 8] * (FEW - 4)
        table.check()
    assert moving and table.live == total - 2 * 12
    found = table.find(keys[:total])
    assert np.count_nonzero(found) == total - 2 * 12 and (found[12 * FEW :] == 7).all()


def test_slots_depend_on_a_secret() -> None:
    keys = random_keys(1000)
    tables = [Table(), Table()]
    for table in tables:
        table.put(keys, np.ones(1000, dtype=np.uint32))
    assert not np.array_equal(tables[0]._slots._lo, tables[1]._slots._lo)


@given(st.integers(16, 32), st.integers(0, 20), st.randoms(use_true_random=False))
def test_fold_keeps_distinct_hashes_distinct(width: int, count: int, random: object) -> None:
    hashes = [random.randbytes(width) for _ in range(count)]  # type: ignore[attr-defined]
    keys = fold(b"".join(hashes), width)
    assert keys.shape == (count, 2)
    assert len({tuple(row) for row in keys.tolist()}) == len(set(hashes))
    if width == 16:
        assert keys.astype("<u8").tobytes() == b"".join(hashes)


@pytest.mark.parametrize("change", ["put", "update"])
def test_a_change_of_few_keys_moves_old_slots_once(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Not once a key: a call must not wait for what others are to do."""
    monkeypatch.setattr(table_module, "MOVED_AT_ONCE", 0)
    monkeypatch.setattr(table_module, "MOVED_MIN", 64)
    table, number = Table(), 0
    while table._old is None or table.capacity < 1 << 14:
        keys = keys_of(list(range(number, number + 100)))
        table.put(keys, np.ones(100, np.uint32))
        number += 100
    before, few = table._moved, keys_of(list(range(number, number + FEW)))
    if change == "put":
        table.put(few, np.ones(FEW, np.uint32))
    else:
        table.update(few, np.ones_like)
    assert table._old is not None and 0 < table._moved - before <= max(64, table_module.MOVED_PER_KEY * FEW)
    table.check()
