"""The directory against a dict of dicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory import directory as directory_module
from kvstrata.master.directory.directory import Directory, TableKey, prefix_length
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import BEGIN

BLOCKS = st.lists(st.integers(0, 25), min_size=1, max_size=12)
TABLES = [TableKey(0, 0, "a"), TableKey(0, 0, ""), TableKey(1, 0, "a"), TableKey(1, 1, "a"), TableKey(1, 2, "a")]
SHARDS = {0: 1, 1: 3}


def keys_of(numbers: list[int]) -> Keys:
    array = np.array(numbers, dtype=np.uint64).reshape(-1)
    return np.column_stack((array * np.uint64(1 << 40), array))


class AgainstOracle(RuleBasedStateMachine):
    """``held`` is (table, block, slot) -> tiers; ``hidden`` the same, with the delta that shows it again."""

    @initialize()
    def begin(self) -> None:
        self.swept = directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN
        directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN = 40, 16  # type: ignore[misc]
        self.directory = Directory()
        self.now = 0.0
        self.slots: list[int] = []
        self.routable: dict[int, str] = {}
        self.held: dict[tuple[TableKey, int, int], set[int]] = {}
        self.hidden: dict[tuple[TableKey, int, int], tuple[set[int], int]] = {}
        for host in ("h1", "h2"):
            self.join(True, host)
            for table in TABLES:
                self.directory.add(self.slots[-1], table, 0, keys_of(list(range(8))))
                self.held.update({(table, block, self.slots[-1]): {0} for block in range(8)})

    def teardown(self) -> None:
        if hasattr(self, "swept"):
            directory_module.SWEPT_SLOTS, directory_module.SWEPT_MIN = self.swept  # type: ignore[misc]

    @precondition(lambda self: len(self.slots) < 5)
    @rule(routed=st.booleans(), host=st.sampled_from(["h1", "h2"]))
    def join(self, routed: bool, host: str) -> None:
        slot = self.directory.take_slot()
        assert slot not in self.slots
        self.slots.append(slot)
        if routed:
            self.routable[slot] = host
            self.directory.route(self.routable)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), table=st.sampled_from(TABLES), tier=st.integers(0, 1), blocks=BLOCKS)
    def add(self, data: Any, table: TableKey, tier: int, blocks: list[int]) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.directory.add(slot, table, tier, keys_of(blocks))
        for block in blocks:
            self.hidden.pop((table, block, slot), None)
            self.held.setdefault((table, block, slot), set()).add(tier)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), table=st.sampled_from(TABLES), tier=st.integers(0, 1), blocks=BLOCKS)
    def remove(self, data: Any, table: TableKey, tier: int, blocks: list[int]) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.directory.remove(slot, table, tier, keys_of(blocks))
        for block in blocks:
            self.hidden.pop((table, block, slot), None)
            self._take(table, block, slot, {tier})

    def _take(self, table: TableKey, block: int, slot: int, tiers: set[int]) -> None:
        left = self.held.get((table, block, slot), set()) - tiers
        self.held[table, block, slot] = left
        if not left:
            del self.held[table, block, slot]

    @rule(table=st.sampled_from(TABLES), blocks=BLOCKS)
    def remove_everywhere(self, table: TableKey, blocks: list[int]) -> None:
        known = {key[1] for key in [*self.held, *self.hidden] if key[0] == table and key[1] in blocks}
        assert self.directory.remove_everywhere(table, keys_of(blocks)) == len(known)
        for mapping in (self.held, self.hidden):
            for key in [key for key in mapping if key[0] == table and key[1] in blocks]:
                del mapping[key]

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), table=st.sampled_from(TABLES), blocks=BLOCKS, seq=st.integers(1, 4))
    def hide(self, data: Any, table: TableKey, blocks: list[int], seq: int) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.directory.hide(slot, table, keys_of(blocks), seq)
        for block in blocks:
            tiers = self.held.pop((table, block, slot), None)
            if tiers:
                self.hidden[table, block, slot] = (tiers, seq)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), seq=st.integers(1, 4))
    def applied(self, data: Any, seq: int) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.directory.applied(slot, seq)
        for key, (tiers, until) in list(self.hidden.items()):
            if key[2] == slot and until <= seq:
                del self.hidden[key]
                self.held[key] = tiers

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), reason=st.sampled_from([None, MissReason.NODE_LOST]))
    def drop(self, data: Any, reason: MissReason | None) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.slots.remove(slot)
        self.routable.pop(slot, None)
        had = {key[:2] for key in [*self.held, *self.hidden] if key[2] == slot}
        assert self.directory.drop_slot(slot, reason) == len(had)
        self.held = {key: tiers for key, tiers in self.held.items() if key[2] != slot}
        self.hidden = {key: entry for key, entry in self.hidden.items() if key[2] != slot}

    @rule()
    def turn(self) -> None:
        """A piece of a sweep."""
        self.now += 0.25
        self.directory.turn(self.now)

    @rule(table=st.sampled_from(TABLES), blocks=BLOCKS)
    def holders(self, table: TableKey, blocks: list[int]) -> None:
        known = set(self.slots)
        for block, set_id in zip(blocks, self.directory.living_ids(table, keys_of(blocks)).tolist(), strict=True):
            expected = {key[2] for key in [*self.held, *self.hidden] if key[:2] == (table, block)}
            assert {slot for slot, _ in self.directory.holders_of(set_id)} == expected <= known
        keys, ids, _ = self.directory.entries(table, BEGIN, 1 << 12)
        assert np.array_equal(ids, self.directory.living_ids(table, keys))
        assert self.directory.holders.retired.isdisjoint(ids.tolist())

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), host=st.sampled_from(["h1", "h2"]))
    def toggle(self, data: Any, host: str) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        if self.routable.pop(slot, None) is None:
            self.routable[slot] = host
        self.directory.route(self.routable)

    @rule(table=st.sampled_from(TABLES), blocks=BLOCKS, host=st.sampled_from(["", "h1", "h2", "nowhere"]))
    def lookup(self, table: TableKey, blocks: list[int], host: str) -> None:
        count = SHARDS[table.group]
        found = self.directory.lookup(table.group, table.shard, count, table.salt, keys_of(blocks), host)
        present = []
        for block, code in zip(blocks, found.codes.tolist(), strict=True):
            allowed = self._routes(table, block)
            assert bool(code) == bool(allowed)
            if code:
                slot, tier = (code - 1) >> 2, (code - 1) & 3
                assert (slot, tier) in allowed
                here = [route for route in allowed if self.routable[route[0]] == host]
                assert not here or (slot, tier) in here
            sisters = [table._replace(shard=shard) for shard in range(count)]
            present.append(all(self._routes(sister, block) for sister in sisters))
        assert found.present.tolist() == present
        assert found.hit_blocks == next((i for i, here in enumerate(present) if not here), len(blocks))
        shard_present = [bool(code) for code in found.codes.tolist()]
        assert found.shard_hit_blocks == next((i for i, here in enumerate(shard_present) if not here), len(blocks))

    def _routes(self, table: TableKey, block: int) -> set[tuple[int, int]]:
        return {
            (slot, tier)
            for (held_table, held_block, slot), tiers in self.held.items()
            if (held_table, held_block) == (table, block) and slot in self.routable
            for tier in tiers
        }

    @invariant()
    def counts(self) -> None:
        self.directory.check()
        everything = [*self.held, *self.hidden]
        assert self.directory.blocks == len({key[:2] for key in everything})
        assert dict(self.directory.tables()) == {
            table: count for table in TABLES if (count := len({key[1] for key in everything if key[0] == table}))
        }
        for table in TABLES:
            by_holders = Counter(frozenset(key[2] for key in everything if key[:2] == block)
                                 for block in {key[:2] for key in everything if key[0] == table})  # fmt: skip
            told: Counter[frozenset[int]] = Counter()
            for set_id, count in self.directory.sets_of(table).items():
                assert set_id not in self.directory.holders.retired
                told[frozenset(slot for slot, _ in self.directory.holders_of(set_id))] += count
            del told[frozenset()]
            assert told == by_holders
        by_slot = self.directory.blocks_by_slot()
        assert set(by_slot) <= set(self.slots)
        for slot in self.slots:
            assert by_slot[slot] == self.directory.blocks_of(slot)
            assert self.directory.blocks_of(slot) == len({key[:2] for key in everything if key[2] == slot})


TestAgainstOracle = AgainstOracle.TestCase
TestAgainstOracle.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)

TABLE = TableKey(0, 0, "tenant")


def test_a_salt_without_blocks_leaves_no_table() -> None:
    directory = Directory()
    slot = directory.take_slot()
    for number in range(50):
        directory.add(slot, TableKey(0, 0, str(number)), 0, keys_of([1]))
    for number in range(49):
        directory.remove(slot, TableKey(0, 0, str(number)), 0, keys_of([1]))
    directory.remove(slot, TABLE, 0, keys_of([1]))
    assert [key.salt for key, _ in directory.tables()] == ["49"]
    directory.drop_slot(slot)
    assert not list(directory.tables())


def test_unroutable_blocks_are_told_from_absent_ones() -> None:
    directory = Directory()
    slot = directory.take_slot()
    directory.add(slot, TABLE, 0, keys_of([1, 2]))
    found = directory.lookup(0, 0, 1, "tenant", keys_of([1, 2, 3]))
    assert directory.reasons(found.ids).tolist() == [MissReason.UNROUTABLE] * 2 + [MissReason.NEVER_STORED]
    assert not found.present.any()


def test_a_newer_report_on_a_block_outlives_an_older_one() -> None:
    directory = Directory()
    slot = directory.take_slot()
    directory.route({slot: ""})
    directory.add(slot, TABLE, 0, keys_of([1, 2]))
    directory.hide(slot, TABLE, keys_of([1, 2]), seq=1)
    directory.remove(slot, TABLE, 0, keys_of([1]))
    directory.add(slot, TABLE, 1, keys_of([1]))
    directory.hide(slot, TABLE, keys_of([1]), seq=5)
    directory.applied(slot, 2)
    assert directory.lookup(0, 0, 1, "tenant", keys_of([1, 2])).codes.tolist() == [0, 1]
    directory.applied(slot, 5)
    assert directory.lookup(0, 0, 1, "tenant", keys_of([1, 2])).codes.tolist() == [2, 1]
    directory.check()


def test_of_two_reports_due_together_the_newer_knows_the_tiers() -> None:
    directory = Directory()
    slot = directory.take_slot()
    directory.route({slot: ""})
    directory.add(slot, TABLE, 0, keys_of([1]))
    directory.hide(slot, TABLE, keys_of([1]), seq=1)
    directory.remove(slot, TABLE, 0, keys_of([1]))
    directory.add(slot, TABLE, 1, keys_of([1]))
    directory.hide(slot, TABLE, keys_of([1]), seq=2)
    directory.applied(slot, 2)
    assert directory.lookup(0, 0, 1, "tenant", keys_of([1])).codes.tolist() == [2]


def test_a_holder_set_that_takes_a_freed_id_is_routed() -> None:
    directory = Directory()
    gone, here = directory.take_slot(), directory.take_slot()
    directory.route({here: ""})
    directory.add(gone, TABLE, 0, keys_of([1]))
    directory.drop_slot(gone)
    assert directory.lookup(0, 0, 1, "tenant", keys_of([1])).hit_blocks == 0
    directory.add(here, TABLE._replace(salt="other"), 1, keys_of([2]))
    assert directory.lookup(0, 0, 1, "other", keys_of([2])).hit_blocks == 1
    directory.remove(here, TABLE._replace(salt="other"), 1, keys_of([2]))
    directory.add(here, TABLE, 0, keys_of([1]))
    assert directory.lookup(0, 0, 1, "tenant", keys_of([1])).hit_blocks == 1


def test_a_slot_is_dropped_at_once_and_swept_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "SWEPT_SLOTS", 1 << 10)
    directory = Directory()
    gone, here = directory.take_slot(), directory.take_slot()
    directory.route({gone: "", here: ""})
    directory.add(gone, TABLE, 0, keys_of(list(range(4000))))
    directory.add(here, TABLE, 0, keys_of(list(range(1000))))

    def untouched(*_: object) -> None:
        raise AssertionError("a drop looks into no table")

    with monkeypatch.context() as patch:
        for name in ("remap", "update", "find", "histogram", "entries"):
            patch.setattr(f"kvstrata.master.directory.table.Table.{name}", untouched)
        assert directory.drop_slot(gone, MissReason.NODE_LOST) == 4000
        assert directory.blocks == 1000 and directory.ghost_blocks == 3000
    again = directory.take_slot()
    assert again == gone, "its number can be taken at once"
    directory.route({again: "", here: ""})
    asked = keys_of([0, 999, 1000, 3999])
    seen_half_way = 0
    for step in range(100):
        found = directory.lookup(0, 0, 1, "tenant", asked)
        assert found.codes.tolist() == [1 + 4 * here, 1 + 4 * here, 0, 0]
        assert directory.reasons(found.ids).tolist()[2:] == [MissReason.NODE_LOST] * 2
        assert directory.blocks_of(again) == 0 and directory.blocks_of(here) == 1000 == directory.blocks
        assert directory.holders.retired.isdisjoint(found.ids.tolist()), "not even the ids of the past are told"
        assert found.replicas == 1 and directory.ghost_blocks == 3000
        directory.check()
        if not directory.sweeping:
            break
        directory.turn(0.25 * step)
        in_table = set(directory._parts[TABLE].counts)
        seen_half_way += bool(in_table & directory.holders.retired) and not in_table <= directory.holders.retired
    assert not directory.sweeping and seen_half_way > 2
    assert len(directory.holders._ids) == len(set(directory._parts[TABLE].counts)) + 1, "freed in the end"


def test_a_second_slot_is_dropped_while_the_first_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "SWEPT_SLOTS", 1 << 10)
    directory = Directory()
    first, second = directory.take_slot(), directory.take_slot()
    for slot in (first, second):
        directory.add(slot, TABLE, 0, keys_of(list(range(4000))))
    directory.drop_slot(first, MissReason.EVICTED)
    for _ in range(4):
        directory.turn(0.0)
    assert directory.blocks == 4000 and directory.sweeping
    directory.drop_slot(second, MissReason.NODE_LOST)
    directory.check()
    assert directory.blocks == 0 and directory.ghost_blocks == 4000
    while directory.sweeping:
        directory.turn(0.0)
        directory.check()
    ids = directory.known_ids(TABLE, keys_of(list(range(4000))))
    assert set(directory.reasons(ids).tolist()) == {MissReason.NODE_LOST} and directory.ghost_blocks == 4000
    assert not directory.holders.retired


def test_many_small_tables_are_swept_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "SWEPT_SLOTS", 10 * directory_module.SWEPT_MIN)
    directory = Directory()
    slot = directory.take_slot()
    for number in range(95):
        directory.add(slot, TableKey(0, 0, str(number)), 0, keys_of([1]))
    directory.drop_slot(slot)
    left = []
    while directory.sweeping:
        directory.turn(0.0)
        left.append(len(list(directory.remembered())))
    assert left == [85, 75, 65, 55, 45, 35, 25, 15, 5, 0]


def test_hidden_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "HIDDEN_REPORTS_MAX", 3)
    directory = Directory()
    slot = directory.take_slot()
    directory.route({slot: ""})
    directory.add(slot, TABLE, 0, keys_of(list(range(5))))
    for block in range(5):
        directory.hide(slot, TABLE, keys_of([block]), seq=9)
    directory.applied(slot, 9)
    found = directory.lookup(0, 0, 1, "tenant", keys_of(list(range(5))))
    assert found.present.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("mask, length", [([], 0), ([1], 1), ([0, 1], 0), ([1, 1, 0, 1], 2), ([1, 1], 2)])
def test_prefix_length(mask: list[int], length: int) -> None:
    assert prefix_length(np.array(mask, dtype=np.bool_)) == length
