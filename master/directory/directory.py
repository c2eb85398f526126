"""Which node has which block: soft state, rebuilt from what the nodes say.

A node's inventory stands under a *slot*, a small number that one attachment owns. A snapshot loads under
a slot of its own while the old one still answers; taking the new one into service and dropping the old is
the swap. Only slots named by :meth:`Directory.route` are ever handed to a reader.

A slot is dropped without a look at the tables: its holder sets stand for what is left of them from then on.
A block that leaves its last holder leaves a ghost in the table, so that a lookup which misses it knows why
without another probe. Set ids of the past (of dropped slots, and old ghosts) are swept out of the tables in
pieces as time passes. The tables of a dropped scope are buried whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.misses import LEFT_REASONS, MissReason
from kvstrata.master.directory.ghosts import Ghost, Ghosts
from kvstrata.master.directory.graves import Graves
from kvstrata.master.directory.holders import GHOST, HIDDEN, SLOTS_MAX, Codes, Holders, HolderSets, Ids
from kvstrata.master.directory.probing import FEW, Keys, Remap
from kvstrata.master.directory.routes import Routes
from kvstrata.master.directory.table import BEGIN, Cursor, Table
from kvstrata.master.directory.tap import Tap
from kvstrata.proto.errors import Busy

#: Miss reports remembered for a slot, so that what they hid can be shown again. Past it the oldest stay
#: hidden until the node names those blocks again.
HIDDEN_REPORTS_MAX: Final = 1024
#: Slots swept at a time: about two milliseconds. A table counts as this many at least.
SWEPT_SLOTS: Final = 1 << 19
SWEPT_MIN: Final = 1 << 12


class TableKey(NamedTuple):
    """One tenant's part of one shard of one group."""

    group: int
    shard: int
    salt: str


@dataclass(frozen=True, slots=True)
class Found:
    """Where the blocks of a lookup are; arrays run over the asked hashes.

    ``codes`` is u16[n], 0 or 1 + 4 * slot + tier, for the asked shard; ``present`` is bool[n] after the
    AND over all shards; ``ids`` is u32[n], the holder sets in the asked shard. ``replicas``: how many nodes have the
    block that most nodes have.
    """

    codes: Codes
    present: npt.NDArray[np.bool_]
    hit_blocks: int
    shard_hit_blocks: int
    ids: Ids
    replicas: int = 0


class _Report(NamedTuple):
    """Blocks that a reader did not find on a slot: shown again once delta ``seq`` has been applied."""

    seq: int
    table: TableKey
    keys: Keys
    tiers: npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Part:
    """One table, and how many of its blocks have each holder set, so that it can go without a look inside.

    ``left``: entries that nobody holds, ghosts and what is still to be swept.
    """

    table: Table = field(default_factory=Table)
    counts: dict[int, int] = field(default_factory=dict)
    left: int = 0


class _Sweep(NamedTuple):
    """Set ids being taken out of the tables: what each becomes, the ghosts' generations that end with it, and the
    tables still to look through."""

    ids: frozenset[int]
    mapping: Ids
    remap: Remap
    generations: set[int]
    tables: list[TableKey]


class Directory:
    """All tables, under one set of holder ids. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.holders = HolderSets()
        self.ghosts = Ghosts()
        self.graves = Graves()
        self.tap: Tap | None = None  #: told of every change
        self._parts: dict[TableKey, _Part] = {}
        self._ghost_blocks = 0
        self._left_blocks = 0
        self._expired: set[int] = set()
        self._sweep: _Sweep | None = None
        self._cursor: Cursor = BEGIN
        self._slots: set[int] = set()
        self._free_slots: list[int] = []
        self._reports: dict[int, deque[_Report]] = {}
        self._per_set = np.zeros(64, dtype=np.int64)
        self._routes = Routes(self.holders)
        self._reasons = np.zeros(0, dtype=np.uint8)
        self._reasons_reuses = 0

    # ------------------------------------------------------------------ slots

    def take_slot(self) -> int:
        """A slot with nothing in it. Raises :class:`Busy` when all are in use."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        if slot >= SLOTS_MAX:
            raise Busy(f"the directory has {SLOTS_MAX} inventories, which is the bound")
        self._slots.add(slot)
        return slot

    def drop_slot(self, slot: int, reason: MissReason | None = None) -> int:
        """Forget an inventory, without a look into any table; returns the replicas forgotten.

        What nobody else has leaves ghosts with ``reason``; with None it is as if it had never been.
        O(tables and holder sets).
        """
        dropped = self.blocks_of(slot)
        self._slots.remove(slot)
        self._free_slots.append(slot)  # no holder set names it any more: it may be taken at once
        self._reports.pop(slot, None)
        emptied = self.holders.drop_slot(slot, None if reason is None else self.ghosts.mark(reason))
        self._grow_counts()
        if dropped and emptied:
            for part in self._parts.values():
                left = sum(part.counts.get(set_id, 0) for set_id in emptied)
                part.left += left
                self._left_blocks += left
                self._ghost_blocks += left if reason is not None else 0
        self._routes.forget(slot)
        if self.tap is not None:
            self.tap.slot_dropped(slot)
        return dropped

    def route(self, hosts: Mapping[int, str]) -> None:
        """Set the slots that readers may be sent to, with the boot id of each one's host."""
        self._routes.set_hosts(hosts)

    def weigh(self, weights: Mapping[int, float]) -> None:
        """Set how much of the reads each slot should get beside replicas that are as good."""
        self._routes.set_weights(weights)

    # ------------------------------------------------------------------ changes

    def add(self, slot: int, table: TableKey, tier: int, keys: Keys) -> int:
        """``slot`` has these blocks in ``tier``; returns how many that is news for."""
        if self.tap is not None:
            self.tap.stored(slot, table, tier, keys)
        return self._change(table, keys, lambda ids: self.holders.with_holder(ids, slot, tier))

    def remove(self, slot: int, table: TableKey, tier: int, keys: Keys, reason: MissReason = MissReason.EVICTED) -> int:
        """``slot`` no longer has these blocks in ``tier``."""
        mark = self.ghosts.mark(reason)
        if self.tap is not None:
            self.tap.removed(slot, table, tier, keys)
        return self._change(table, keys, lambda ids: self.holders.without_holder(ids, slot, tier, mark))

    def remove_everywhere(self, table: TableKey, keys: Keys, reason: MissReason = MissReason.REMOVED) -> int:
        """No one is known to have these blocks any more; returns how many were known."""
        mark = self.ghosts.mark(reason)
        if self.tap is not None:
            self.tap.cleared(table, keys)
        return self._change(table, keys, lambda ids: self.holders.without_holders(ids, mark))

    def remove_slot_blocks(
        self, slot: int, table: TableKey, keys: Keys, reason: MissReason = MissReason.REMOVED
    ) -> int:
        """``slot`` has these blocks in no tier."""
        return sum(self.remove(slot, table, tier, keys, reason) for tier in range(HIDDEN))

    def drop_tables(
        self, match: Callable[[TableKey], bool], reason: MissReason, now: float, renumbered: int | None = None
    ) -> int:
        """Forget the tables that ``match``, without a look inside; returns the blocks they had.

        O(tables). They are buried for ``reason``, under the group ``renumbered`` if that is given.
        """
        dropped = 0
        matching = [(key, part) for key, part in self._parts.items() if match(key)]
        if self.tap is not None and matching:
            self.tap.dropped([key for key, _ in matching])
        for key, part in matching:
            dropped += part.table.live - part.left
            for set_id, count in list(part.counts.items()):
                self._count(part, set_id, -count)
            del self._parts[key]
            grave = key if renumbered is None else key._replace(group=renumbered)
            self.graves.bury(grave, part.table, reason, now)
        return dropped

    def counted(self, match: Callable[[TableKey], bool]) -> int:
        """Blocks in the tables that ``match``. O(tables)."""
        return sum(part.table.live - part.left for key, part in self._parts.items() if match(key))

    def hide(self, slot: int, table: TableKey, keys: Keys, seq: int) -> int:
        """Route no one to these blocks of ``slot`` until its delta ``seq`` has been applied (:meth:`applied`)."""
        part = self._parts.get(table)
        if part is None:
            return 0
        tiers = self.holders.tiers_of(part.table.find(keys), slot)
        seen = tiers != 0
        if not seen.any():
            return 0
        reports = self._reports.setdefault(slot, deque(maxlen=HIDDEN_REPORTS_MAX))
        reports.append(_Report(seq, table, keys[seen].copy(), tiers[seen]))
        if self.tap is not None:
            for tier in range(HIDDEN):
                self.tap.removed(slot, table, tier, keys[tiers >> tier & 1 != 0])
        return self._change(table, keys, lambda ids: self.holders.hidden(ids, slot))

    def applied(self, slot: int, seq: int) -> None:
        """Delta ``seq`` of ``slot`` is in: what was hidden up to it, and not removed since, shows again."""
        reports = self._reports.get(slot)
        if reports is None:
            return
        due = [report for report in reports if report.seq <= seq]
        later = [report for report in reports if report.seq > seq]
        for report in reversed(due):  # of two reports on one block the newer knows its tiers
            self._show(slot, _less(report, later))
        if later:
            self._reports[slot] = deque(later, maxlen=HIDDEN_REPORTS_MAX)
        else:
            del self._reports[slot]

    def _show(self, slot: int, report: _Report) -> None:
        for tiers in np.unique(report.tiers).tolist():
            keys = report.keys[report.tiers == tiers]
            if self.tap is not None:
                hidden = self.holders.hides(self.known_ids(report.table, keys), slot)
                for tier in (tier for tier in range(HIDDEN) if tiers >> tier & 1):
                    self.tap.stored(slot, report.table, tier, keys[hidden])
            self._change(report.table, keys, lambda ids, tiers=tiers: self.holders.shown(ids, slot, tiers))  # type: ignore[misc]

    def _change(self, key: TableKey, keys: Keys, change: Callable[[Ids], Ids]) -> int:
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part()
        if len(keys) <= FEW:
            altered = part.table.update_few(keys, change)
            self._grow_counts()
            for was, now in altered:
                self._count(part, was, -1)
                self._count(part, now, 1)
            self._drop_if_empty(key, part)
            return len(altered)
        before, after = part.table.update(keys, change)
        self._grow_counts()
        size = len(self._per_set)
        moved = np.bincount(after, minlength=size) - np.bincount(before, minlength=size)
        for set_id in np.flatnonzero(moved).tolist():
            self._count(part, set_id, int(moved[set_id]))
        self._drop_if_empty(key, part)
        return len(before)

    def _grow_counts(self) -> None:
        if len(self._per_set) < self.holders.size:
            self._per_set = np.concatenate((self._per_set, np.zeros(self.holders.size, dtype=np.int64)))

    def _count(self, part: _Part, set_id: int, change: int) -> None:
        """``change`` more blocks of ``part`` have this holder set."""
        if set_id == 0:
            return
        self._per_set[set_id] += change
        part.counts[set_id] = part.counts.get(set_id, 0) + change
        if not part.counts[set_id]:
            del part.counts[set_id]
        if not self.holders.held(set_id):
            part.left += change
            self._left_blocks += change
            self._ghost_blocks += change if self.holders.mark_of(set_id) is not None else 0

    def _drop_if_empty(self, key: TableKey, part: _Part) -> None:
        if not part.table.live:
            del self._parts[key]

    # ------------------------------------------------------------------ ghosts and sweeps

    def turn(self, now: float) -> None:
        """Time passes: old ghosts and graves go, and what dropped slots have left in the tables, some at a time."""
        self.graves.turn(now)
        self._expired |= self.ghosts.turn(now, self._ghosts_by_generation())
        if self._sweep is None and (self._expired or self.holders.retired):
            self._sweep, self._expired, self._cursor = self._begin_sweep(self._expired), set(), BEGIN
        if self._sweep is not None:
            self._go_on(self._sweep)

    @property
    def sweeping(self) -> bool:
        """Whether set ids of the past are still to be swept out of the tables."""
        return self._sweep is not None or bool(self._expired or self.holders.retired)

    def _ghosts_by_generation(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        if self._ghost_blocks:
            for mark, set_id in self._marks():
                counts[mark // LEFT_REASONS] += int(self._per_set[set_id]) if set_id < len(self._per_set) else 0
        return counts

    def _marks(self) -> Iterator[tuple[int, int]]:
        for set_id in range(self.holders.size):
            mark = self.holders.mark_of(set_id)
            if mark is not None:
                yield mark, set_id

    def _begin_sweep(self, generations: set[int]) -> _Sweep:
        dead = [set_id for mark, set_id in self._marks() if mark // LEFT_REASONS in generations]
        mapping = self.holders.mapping().copy()
        mapping[dead] = 0
        ids = self.holders.retired.union(dead)
        tables = [key for key, part in self._parts.items() if not ids.isdisjoint(part.counts)]
        return _Sweep(ids, mapping, Remap.of(mapping), generations, tables)

    def _go_on(self, sweep: _Sweep) -> None:
        left = SWEPT_SLOTS
        while sweep.tables and left > 0:
            key = sweep.tables[-1]
            part = self._parts.get(key)
            cursor: Cursor | None = None
            if part is not None:
                replaced, cursor = part.table.remap(sweep.remap, self._cursor, left)
                for set_id in np.flatnonzero(counts := np.bincount(replaced)).tolist():
                    self._count(part, set_id, -int(counts[set_id]))
                    self._count(part, int(sweep.mapping[set_id]), int(counts[set_id]))
                left -= max(SWEPT_MIN, part.table.capacity)
                self._drop_if_empty(key, part)
            if cursor is None:
                sweep.tables.pop()
            self._cursor = cursor or BEGIN
        if not sweep.tables:
            self._end_sweep(sweep)

    def _end_sweep(self, sweep: _Sweep) -> None:
        self._sweep = None
        self.holders.forget(sweep.ids)
        for generation in sweep.generations:
            self.ghosts.forgotten(generation)

    def reasons(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Why blocks with these holder sets are not found, if they are not routed to: u8[n]."""
        if self._reasons_reuses != self.holders.reuses or len(self._reasons) < self.holders.size:
            self._reasons = self.holders.reasons()
            self._reasons_reuses = self.holders.reuses
        return self._reasons[ids]

    def ghost(self, table: TableKey, keys: Keys) -> Ghost | None:
        """What is remembered of one block that left (``keys`` is u64[1, 2])."""
        mark = self.holders.mark_of(int(self.known_ids(table, keys)[0]))
        return None if mark is None else self.ghosts.read(mark)

    # ------------------------------------------------------------------ questions

    def lookup(
        self,
        group: int,
        shard: int,
        shard_count: int,
        salt: str,
        keys: Keys,
        boot_id: str = "",
        avoid: Collection[int] = (),
    ) -> Found:
        """Where the blocks are, and the longest prefix of which every shard is there.

        Slots in ``avoid`` are named only for blocks that no other slot has.
        """
        key = TableKey(group, shard, salt)
        if len(keys) <= FEW:
            few = self._few_ids(key, keys)
            if shard_count == 1 and not avoid and (routed := self._routes.few(few, boot_id)) is not None:
                return _found_few(few, *routed)
            ids = np.array(few, dtype=np.uint32)
        else:
            ids = self.known_ids(key, keys)
        codes = self._routes.codes(ids, boot_id, _start(keys), avoid)
        present = codes != 0
        shard_hit_blocks = prefix_length(present)
        if shard_count > 1:
            present = self._with_sisters(present, group, shard, shard_count, salt, keys, boot_id)
        replicas = self._routes.replicas(ids, boot_id)
        return Found(codes, present, prefix_length(present), shard_hit_blocks, ids, replicas)

    def codes(self, table: TableKey, keys: Keys, boot_id: str = "", avoid: Collection[int] = ()) -> Codes:
        """The location code of each block, as :class:`Found` has them."""
        if len(keys) <= FEW:
            few = self._few_ids(table, keys)
            if not avoid and (routed := self._routes.few(few, boot_id)) is not None:
                return np.array(routed[0], dtype=np.uint16)
            ids = np.array(few, dtype=np.uint32)
        else:
            ids = self.known_ids(table, keys)
        return self._routes.codes(ids, boot_id, _start(keys), avoid)

    def _few_ids(self, key: TableKey, keys: Keys) -> list[int]:
        """As :meth:`known_ids`, key by key."""
        part = self._parts.get(key)
        ids = [0] * len(keys) if part is None else [part.table.value(low, high) for low, high in keys.tolist()]
        return self.holders.mapping()[ids].tolist() if self.holders.retired_any else ids

    def _with_sisters(
        self,
        present: npt.NDArray[np.bool_],
        group: int,
        shard: int,
        shard_count: int,
        salt: str,
        keys: Keys,
        boot_id: str,
    ) -> npt.NDArray[np.bool_]:
        left = np.flatnonzero(present)
        for sister in range(shard_count):
            if sister != shard and left.size:
                ids = self.known_ids(TableKey(group, sister, salt), keys[left])
                left = left[self._routes.held(ids, boot_id)]
        everywhere = np.zeros_like(present)
        everywhere[left] = True
        return everywhere

    def known_ids(self, table: TableKey, keys: Keys) -> Ids:
        """Holder set ids of the blocks, routable or not, ghosts too: u32[n], 0 where nothing is known."""
        part = self._parts.get(table)
        return np.zeros(len(keys), dtype=np.uint32) if part is None else self.holders.current(part.table.find(keys))

    def living_ids(self, table: TableKey, keys: Keys) -> Ids:
        """As :meth:`known_ids`, with 0 for ghosts."""
        ids = self.known_ids(table, keys)
        return np.where(self.reasons(ids) >= LEFT_REASONS, ids, 0).astype(np.uint32)

    def holders_of(self, set_id: int) -> list[tuple[int, int]]:
        """(slot, tier) of each holder in a set; ``HIDDEN`` stands for a tier that a reader did not find."""
        return [(code >> 2, code & 3) for code in self.holders.holders(set_id) if code < GHOST]

    def holder_sets(self, ids: Ids) -> dict[int, Holders]:
        """The holders of each set in ``ids``, by its id; ghosts have none. O(len(ids)); good when the lock is gone."""
        # A mask in place of np.unique, which sorts: this runs under the lock.
        seen = np.zeros(self.holders.size, dtype=np.bool_)
        seen[ids] = True
        sets = {set_id: self.holders.holders(set_id) for set_id in np.flatnonzero(seen).tolist()}
        return {set_id: () if held and held[-1] >= GHOST else held for set_id, held in sets.items()}

    def entries(self, key: TableKey, cursor: Cursor, count: int) -> tuple[Keys, Ids, Cursor | None]:
        """Blocks in the next ``count`` slots of a table, no ghosts: as :meth:`Table.entries`."""
        part = self._parts.get(key)
        if part is None:
            return np.zeros((0, 2), dtype=np.uint64), np.zeros(0, dtype=np.uint32), None
        keys, ids, cursor_after = part.table.entries(cursor, count)
        ids = self.holders.current(ids)
        living = self.reasons(ids) >= LEFT_REASONS
        return keys[living], ids[living], cursor_after

    # ------------------------------------------------------------------ counts

    def sets_of(self, key: TableKey) -> Mapping[int, int]:
        """How many blocks of a table have each holder set, ghosts too."""
        part = self._parts.get(key)
        if part is None or not self.holders.retired:
            return {} if part is None else part.counts
        counts: Counter[int] = Counter()
        mapping = self.holders.mapping()
        for set_id, count in part.counts.items():
            counts[int(mapping[set_id])] += count
        del counts[0]
        return counts

    @property
    def blocks(self) -> int:
        """Distinct blocks with at least one replica on an attached node, one being synced included."""
        return sum(part.table.live for part in self._parts.values()) - self._left_blocks

    @property
    def ghost_blocks(self) -> int:
        """Blocks that left and are remembered, buried ones not counted."""
        return self._ghost_blocks

    @property
    def nbytes(self) -> int:
        return sum(part.table.nbytes for part in self._parts.values())

    def blocks_of(self, slot: int) -> int:
        """Distinct blocks that ``slot`` has in any tier, hidden ones included."""
        sets = np.flatnonzero(self._per_set[: self.holders.size]).tolist()
        holding = [set_id for set_id in sets if any(code >> 2 == slot for code in self.holders.holders(set_id))]
        return int(self._per_set[holding].sum())

    def blocks_by_slot(self) -> Counter[int]:
        """:meth:`blocks_of` for every slot that has any, in one pass over the holder sets."""
        counts: Counter[int] = Counter()
        for set_id in np.flatnonzero(self._per_set[: self.holders.size]).tolist():
            for slot in {slot for slot, _ in self.holders_of(set_id)}:
                counts[slot] += int(self._per_set[set_id])
        return counts

    def tables(self) -> Iterator[tuple[TableKey, int]]:
        """(group, shard, salt) and blocks, for every tenant that has any."""
        return ((key, part.table.live - part.left) for key, part in self._parts.items() if part.table.live > part.left)

    def remembered(self) -> Iterator[TableKey]:
        """Every table, those with ghosts only too."""
        return iter(list(self._parts))

    def check(self) -> None:
        """Assert that tables, counts, sets and slots agree. O(all blocks)."""
        self.holders.check()
        self.ghosts.check()
        self.graves.check()
        counts = np.zeros(len(self._per_set), dtype=np.int64)
        for key, part in self._parts.items():
            assert part.table.live, f"an empty table was kept for {key}"
            part.table.check()
            histogram = part.table.histogram(len(counts))
            assert part.counts == {i: int(histogram[i]) for i in np.flatnonzero(histogram).tolist()}, key
            assert part.left == sum(n for i, n in part.counts.items() if not self.holders.held(i))
            counts += histogram
        assert np.array_equal(counts, self._per_set), "counts by holder set have drifted"
        assert self._left_blocks == sum(part.left for part in self._parts.values())
        ghosts = {set_id for _, set_id in self._marks()}
        assert self._ghost_blocks == sum(int(counts[set_id]) for set_id in ghosts if set_id < len(counts))
        used = {slot for set_id in np.flatnonzero(counts).tolist() for slot, _ in self.holders_of(set_id)}
        assert used <= self._slots, f"blocks of dropped slots: {used - self._slots}"
        assert self._routes.slots <= self._slots and set(self._reports) <= self._slots
        assert not self._slots & set(self._free_slots)
        if self._sweep is not None:
            self._check_sweep(self._sweep)

    def _check_sweep(self, sweep: _Sweep) -> None:
        assert sweep.tables and not sweep.ids & {0}
        todo = set(sweep.tables)
        for key, part in self._parts.items():
            assert key in todo or sweep.ids.isdisjoint(part.counts), f"{key} was swept, and has ids of the past"
        reached = self._parts.get(sweep.tables[-1])
        if reached is not None:
            assert not np.isin(reached.table.passed(self._cursor), list(sweep.ids)).any(), "slots were swept in vain"


def _less(report: _Report, others: Iterable[_Report]) -> _Report:
    """The report without the blocks that one of ``others`` names too."""
    for other in others:
        if other.table == report.table:
            named = Table()
            named.put(other.keys, np.ones(len(other.keys), dtype=np.uint32))
            rest = named.find(report.keys) == 0
            report = report._replace(keys=report.keys[rest], tiers=report.tiers[rest])
    return report


def _start(keys: Keys) -> int:
    """Where a caller begins among equal replicas."""
    return int(keys[0, 0]) if len(keys) else 0


def _found_few(ids: list[int], codes: list[int], replicas: int) -> Found:
    hit_blocks = codes.index(0) if 0 in codes else len(codes)
    array = np.array(codes, dtype=np.uint16)
    return Found(array, array != 0, hit_blocks, hit_blocks, np.array(ids, dtype=np.uint32), replicas)


def prefix_length(present: npt.NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    if not present.size:
        return 0
    first_hole = int(np.argmin(present))
    return len(present) if present[first_hole] else first_hole
