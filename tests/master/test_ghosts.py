"""Ghosts and graves: reasons of blocks that left, bounded in number and in age."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master.content.misses import LEFT_REASONS, MissReason, departed
from kvstrata.master.directory import directory as directory_module
from kvstrata.master.directory import ghosts as ghosts_module
from kvstrata.master.directory import graves as graves_module
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys, Remap
from kvstrata.master.directory.table import BEGIN, Table
from kvstrata.proto.status import Departure

TABLE = TableKey(0, 0, "tenant")
OTHER = TableKey(0, 0, "other")


def keys_of(numbers: list[int] | range) -> Keys:
    array = np.array(numbers, dtype=np.uint64).reshape(-1)
    return np.column_stack((array * np.uint64(1 << 40), array))


def reasons(directory: Directory, numbers: list[int] | range, table: TableKey = TABLE) -> list[MissReason]:
    ids = directory.known_ids(table, keys_of(numbers))
    return [MissReason(reason) for reason in directory.reasons(ids).tolist()]


def test_every_departure_has_a_reason_of_its_own() -> None:
    known = [departed(departure) for departure in Departure]
    assert len(set(known)) == len(known) and max(known) < LEFT_REASONS
    assert departed(Departure.QUOTA) is MissReason.EVICTED_QUOTA and departed(200) is MissReason.EVICTED


def test_the_last_holder_leaves_the_reason_and_others_none() -> None:
    directory = Directory()
    one, two = directory.take_slot(), directory.take_slot()
    directory.add(one, TABLE, 0, keys_of([1, 2]))
    directory.add(one, TABLE, 1, keys_of([2]))
    directory.add(two, TABLE, 0, keys_of([3]))
    directory.remove(one, TABLE, 0, keys_of([1, 2, 9]), MissReason.EVICTED_QUOTA)
    assert reasons(directory, [1, 2, 3, 9]) == [
        MissReason.EVICTED_QUOTA,
        MissReason.UNROUTABLE,
        MissReason.UNROUTABLE,
        MissReason.NEVER_STORED,
    ]
    assert directory.blocks == 2 and directory.ghost_blocks == 1
    directory.remove(one, TABLE, 0, keys_of([1]), MissReason.REMOVED)
    assert reasons(directory, [1]) == [MissReason.EVICTED_QUOTA], "said twice, it left once"
    directory.remove_everywhere(TABLE, keys_of([1, 2]))
    assert reasons(directory, [1, 2]) == [MissReason.EVICTED_QUOTA, MissReason.REMOVED]
    directory.add(two, TABLE, 0, keys_of([1]))
    directory.check()
    assert directory.blocks == 2 and directory.ghost_blocks == 1


def test_what_only_a_lost_node_had_is_remembered_as_lost() -> None:
    directory = Directory()
    lost, here = directory.take_slot(), directory.take_slot()
    directory.add(lost, TABLE, 0, keys_of(range(10)))
    directory.add(here, TABLE, 0, keys_of(range(5)))
    assert directory.drop_slot(lost, MissReason.NODE_LOST) == 10
    assert reasons(directory, [4, 5, 9]) == [MissReason.UNROUTABLE, MissReason.NODE_LOST, MissReason.NODE_LOST]
    assert directory.blocks == 5 and list(directory.tables()) == [(TABLE, 5)]
    assert directory.take_slot() == lost
    directory.check()
    assert not directory.blocks_of(lost), "a slot's next owner has none of it"


def test_a_shadow_that_is_given_up_never_was() -> None:
    directory = Directory()
    shadow = directory.take_slot()
    directory.add(shadow, TABLE, 0, keys_of([1]))
    directory.drop_slot(shadow)
    assert reasons(directory, [1]) == [MissReason.NEVER_STORED] and directory.ghost_blocks == 0
    assert directory.blocks == 0 and not list(directory.tables())
    assert not directory.known_ids(TABLE, keys_of([1])).any() and not directory.sets_of(TABLE)
    directory.check()
    directory.turn(0.0)
    assert not directory.sweeping and not list(directory.remembered())


def evict(directory: Directory, slot: int, numbers: range, table: TableKey = TABLE) -> None:
    directory.add(slot, table, 0, keys_of(numbers))
    directory.remove(slot, table, 0, keys_of(numbers), MissReason.EVICTED_ROOM)


def test_old_ghosts_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "GHOSTS_MAX", 100)
    monkeypatch.setattr(ghosts_module, "GENERATION_GHOSTS", 20)
    directory = Directory()
    slot = directory.take_slot()
    directory.add(slot, TABLE, 0, keys_of(range(10_000, 10_200)))
    for number in range(20):
        evict(directory, slot, range(20 * number, 20 * number + 20), TABLE if number % 2 else OTHER)
        directory.turn(now=200.0 * number)
        directory.check()
    assert directory.ghost_blocks <= 120 and directory.blocks == 200
    assert reasons(directory, [20]) == [MissReason.NEVER_STORED]
    assert reasons(directory, [399]) == [MissReason.EVICTED_ROOM]
    assert len(directory.holders._ids) < 20, "set ids of forgotten generations are used again"


def test_young_ghosts_stay_even_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "GHOSTS_MAX", 100)
    monkeypatch.setattr(ghosts_module, "GENERATION_GHOSTS", 20)
    directory = Directory()
    slot = directory.take_slot()
    directory.add(slot, TABLE, 0, keys_of(range(1000)))
    directory.turn(now=0.0)
    directory.drop_slot(slot, MissReason.NODE_LOST)
    for now in (1.0, 60.0, 119.0):
        directory.turn(now)
    assert directory.ghost_blocks == 1000
    for now in (122.0, 123.0):
        directory.turn(now)
    assert directory.ghost_blocks == 0 and not list(directory.remembered())
    directory.check()


def test_the_time_of_a_ghost_is_known_within_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "GENERATION_GHOSTS", 2)
    directory = Directory()
    slot = directory.take_slot()
    directory.turn(now=50.0)
    evict(directory, slot, range(2))
    directory.turn(now=60.0)
    evict(directory, slot, range(2, 3))
    directory.turn(now=70.0)
    first, second = directory.ghost(TABLE, keys_of([0])), directory.ghost(TABLE, keys_of([2]))
    assert first == (MissReason.EVICTED_ROOM, 50.0, 60.0) and second == (MissReason.EVICTED_ROOM, 60.0, 70.0)
    assert directory.ghost(TABLE, keys_of([7])) is None


def test_a_purge_goes_on_in_pieces_while_its_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "GHOSTS_MAX", 100)
    monkeypatch.setattr(ghosts_module, "GENERATION_GHOSTS", 1000)
    monkeypatch.setattr(directory_module, "SWEPT_SLOTS", 1 << 10)
    monkeypatch.setattr("kvstrata.master.directory.table.MOVED_AT_ONCE", 64)
    directory = Directory()
    slot = directory.take_slot()
    evict(directory, slot, range(3000))
    directory.turn(0.0)
    now = 500.0
    for step in range(60):
        directory.add(slot, TABLE, 0, keys_of(range(10_000 + 100 * step, 10_100 + 100 * step)))
        directory.turn(now + step)
        directory.check()
    for step in range(100):
        directory.turn(now + 60 + step)
    assert directory.ghost_blocks == 0 and directory.blocks == 6000
    directory.check()


def test_dropped_tables_are_buried_whole_and_found_again() -> None:
    directory = Directory()
    slot = directory.take_slot()
    directory.route({slot: ""})
    directory.add(slot, TABLE, 0, keys_of([1, 2]))
    directory.add(slot, OTHER, 0, keys_of([1]))
    directory.remove(slot, TABLE, 0, keys_of([2]), MissReason.EVICTED_ROOM)
    assert directory.counted(lambda key: key.salt == "tenant") == 1
    dropped = directory.drop_tables(lambda key: key.salt == "tenant", MissReason.EPOCH, 10.0, renumbered=7)
    assert dropped == 1 and directory.blocks == 1 and directory.ghost_blocks == 0
    directory.check()
    moved = TABLE._replace(group=7)
    assert directory.graves.holds(moved, keys_of([1, 2, 3])).tolist() == [True, True, False]
    assert not directory.graves.holds(TABLE, keys_of([1])).any()
    directory.turn(10.0 + graves_module.BURIED_S)
    assert directory.graves.find(moved) is None
    directory.check()


def test_graves_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graves_module, "BURIED_MAX", 10)
    graves = graves_module.Graves()
    for number, size in enumerate([6, 4, 3, 11]):
        table = Table()
        table.put(keys_of(range(size)), np.ones(size, dtype=np.uint32))
        graves.bury(number, table, MissReason.DROPPED, 0.0)
        graves.check()
    assert [graves.find(number) is not None for number in range(4)] == [False, True, True, False]


@pytest.mark.parametrize("at_once", [64, 1 << 16])
def test_entries_come_at_least_once_while_the_table_moves(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("kvstrata.master.directory.table.MOVED_AT_ONCE", at_once)
    table = Table()
    table.put(keys_of(range(500)), np.arange(1, 501, dtype=np.uint32))
    seen: set[int] = set()
    cursor = BEGIN
    for step in range(1000):
        keys, values, after = table.entries(cursor, 100)
        assert len(keys) == len(values)
        seen |= set(values.tolist())
        if after is None:
            break
        cursor = after
        if step < 40:
            fresh = range(1000 + 100 * step, 1100 + 100 * step)
            table.put(keys_of(fresh), np.array(fresh, dtype=np.uint32))
    assert seen >= set(range(1, 501))


@pytest.mark.parametrize("at_once", [64, 1 << 16])
def test_a_remap_in_pieces(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("kvstrata.master.directory.table.MOVED_AT_ONCE", at_once)
    rng = random.Random(3)
    table = Table()
    table.put(keys_of(range(3000)), (np.arange(3000, dtype=np.uint32) % 7) + 1)
    mapping = np.array([0, 0, 2, 3, 0, 2], dtype=np.uint32)
    counts = np.zeros(8, dtype=np.int64)
    cursor = BEGIN
    for _ in range(10_000):
        values, after = table.remap(Remap.of(mapping), cursor, rng.randrange(1, 300))
        counts += np.bincount(values, minlength=8)
        table.check()
        if after is None:
            break
        cursor = after
    assert counts.tolist() == [0, 429, 0, 0, 429, 428, 0, 0], "each entry once; those past the mapping stay"
    expected = np.array([0, 2, 3, 0, 2, 6, 7])[np.arange(3000) % 7]
    assert np.array_equal(table.find(keys_of(range(3000))), expected) and table.live == 3000 - 858


class Remembering(RuleBasedStateMachine):
    """Against a dict: block -> holders, or the reason of the last departure, while ghosts stay bounded."""

    @initialize()
    def begin(self) -> None:
        self.directory = Directory()
        self._swept = directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN
        directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN = 20, 16  # type: ignore[misc]
        self.now = 0.0
        self.slots = [self.directory.take_slot() for _ in range(2)]
        self.held: dict[int, set[tuple[int, int]]] = {}
        self.left: dict[int, MissReason] = {}

    def teardown(self) -> None:
        if hasattr(self, "_swept"):
            directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN = self._swept  # type: ignore[misc]

    @rule(at=st.integers(0, 1), tier=st.integers(0, 1), blocks=st.lists(st.integers(0, 30), min_size=1))
    def add(self, at: int, tier: int, blocks: list[int]) -> None:
        self.directory.add(self.slots[at], TABLE, tier, keys_of(blocks))
        for block in blocks:
            self.held.setdefault(block, set()).add((at, tier))
            self.left.pop(block, None)

    @rule(
        at=st.integers(0, 1),
        tier=st.integers(0, 1),
        blocks=st.lists(st.integers(0, 30), min_size=1),
        reason=st.sampled_from([MissReason.EVICTED_ROOM, MissReason.EVICTED_QUOTA, MissReason.CORRUPT]),
    )
    def remove(self, at: int, tier: int, blocks: list[int], reason: MissReason) -> None:
        self.directory.remove(self.slots[at], TABLE, tier, keys_of(blocks), reason)
        for block in blocks:
            self._take(block, {(at, tier)}, reason)

    @rule(at=st.integers(0, 1), lost=st.booleans())
    def drop(self, at: int, lost: bool) -> None:
        reason = MissReason.NODE_LOST if lost else None
        self.directory.drop_slot(self.slots[at], reason)
        self.slots[at] = self.directory.take_slot()
        for block in list(self.held):
            self._take(block, {(at, 0), (at, 1)}, reason)

    def _take(self, block: int, gone: set[tuple[int, int]], reason: MissReason | None) -> None:
        if block in self.held:
            self.held[block] -= gone
            if not self.held[block]:
                del self.held[block]
                if reason is not None:
                    self.left[block] = reason

    @rule()
    def drop_all(self) -> None:
        assert self.directory.drop_tables(lambda key: True, MissReason.EPOCH, self.now) == len(self.held)
        self.held, self.left = {}, {}

    @rule(seconds=st.sampled_from([0.25, 30.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.directory.turn(self.now)

    @invariant()
    def remembered(self) -> None:
        self.directory.check()
        assert self.directory.blocks == len(self.held)
        told = reasons(self.directory, range(31))
        for block, reason in enumerate(told):
            if block in self.held:
                assert reason is MissReason.UNROUTABLE
            else:  # the oldest may be forgotten; nothing is ever remembered wrongly
                assert reason in (self.left.get(block), MissReason.NEVER_STORED)


class Crowded(Remembering):
    """The same with room for a few ghosts only."""

    _names = ("GHOSTS_MAX", "GENERATION_GHOSTS", "YOUNG_GHOSTS_MAX", "YOUNG_S")

    @initialize()
    def begin(self) -> None:
        super().begin()
        self._before: list[Any] = [getattr(ghosts_module, name) for name in self._names]
        for name, value in zip(self._names, (6, 3, 12, 20.0), strict=True):
            setattr(ghosts_module, name, value)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "_before"):
            for name, value in zip(self._names, self._before, strict=True):
                setattr(ghosts_module, name, value)


class Roomy(Remembering):
    """With room for all of them nothing is forgotten."""

    @invariant()
    def exact(self) -> None:
        told = reasons(self.directory, range(31))
        expected = [self.left.get(block, MissReason.NEVER_STORED) for block in range(31) if block not in self.held]
        assert [reason for block, reason in enumerate(told) if block not in self.held] == expected


TestCrowded = Crowded.TestCase
TestCrowded.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRoomy = Roomy.TestCase
TestRoomy.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
