"""Packed block hashes to small integers: a hash table on numpy arrays that grows without a pause.

A dict of 16-byte hashes costs 100 bytes and a Python object an entry, and answers half a million
lookups a second when it is large. This one answers millions, at 33 to 89 bytes an entry.

A large table that must grow (or shrink) does so beside its old slots: each later change moves some
entries over, and lookups try both, so that no call waits while ten million entries move. The new slots'
memory is asked for ahead, bit by bit, as a kernel needs a good part of a second for hundreds of MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.probing import EMPTY, FEW, STRIDE, Keys, Remap, SlotArray, Slots, Values

CAPACITY_MIN: Final = 64
#: Used slots (live entries and tombstones) never pass this share of the capacity ...
LOAD_MAX: Final = 0.6
#: ... and new slots start at most this full, so that the next move is far away.
LOAD_MOVED: Final = 0.45
#: Fewer live entries than this share: the table shrinks.
LOAD_MIN: Final = 0.08
#: At this share used, the slots that will be needed next begin to be made ready ...
LOAD_AHEAD: Final = 0.5
#: ... this many for each key of a change: twice the slots, for a tenth of them in keys.
WARMED_PER_KEY: Final = 24
#: Old slots up to this many are moved at once.
MOVED_AT_ONCE: Final = 1 << 16
#: Old slots moved on by a change: this many, or MOVED_PER_KEY for each of its keys. At 1 / 0.6 slots an
#: old entry, and room for a third as many new ones, the old slots are through long before the new are full.
MOVED_MIN: Final = 1 << 11
MOVED_PER_KEY: Final = 8
#: A remap moves an old slot in place of so many that it would have looked at.
REMAPPED_PER_MOVED: Final = 8
#: A place in a table: its layout, and a slot of it.
Cursor = tuple[int, int]
BEGIN: Final[Cursor] = (-1, 0)
#: Doublings tried for a key that finds no place; each has its own secret, so that one nearly always does.
SPREADS_MAX: Final = 6


class Table:
    """A map from keys u64[n, 2] to values 1 .. ``VALUE_MAX``; 0 means absent.

    Not thread-safe: its owner holds a lock.
    """

    __slots__ = ("_layouts", "_moved", "_next", "_old", "_slots", "_warmed")

    def __init__(self) -> None:
        self._slots = SlotArray(CAPACITY_MIN)
        self._old: SlotArray | None = None
        self._moved = 0  #: old slots before this one are empty
        self._next: SlotArray | None = None
        self._warmed = 0  #: next slots before this one have their memory
        self._layouts = 0  #: grows whenever entries may be in other slots than before

    # ------------------------------------------------------------------ questions

    @property
    def live(self) -> int:
        """Entries."""
        return self._slots.live + (self._old.live if self._old is not None else 0)

    @property
    def capacity(self) -> int:
        return self._slots.capacity

    @property
    def nbytes(self) -> int:
        return sum(slots.nbytes for slots in (self._slots, self._old, self._next) if slots is not None)

    def find(self, keys: Keys) -> Values:
        """Values of ``keys``, 0 where absent: u32[n]."""
        if len(keys) <= FEW:
            return np.array([self.value(low, high) for low, high in keys.tolist()], dtype=np.uint32)
        _, values = self._slots.probe(keys)
        if self._old is not None:
            missing = np.flatnonzero(values == EMPTY)
            _, values[missing] = self._old.probe(keys[missing])
        return values

    def value(self, low: int, high: int) -> int:
        """The value of one key, 0 when it is absent."""
        slot = self._slots.locate_one(low, high)
        if slot >= 0:
            return self._slots.value_at(slot)
        if self._old is not None and (slot := self._old.locate_one(low, high)) >= 0:
            return self._old.value_at(slot)
        return 0

    def entries(self, cursor: Cursor, count: int) -> tuple[Keys, Values, Cursor | None]:
        """Entries of the next ``count`` slots: (keys, values, where to go on; None at the end).

        Begin with :data:`BEGIN`. Of a table that changes meanwhile some may come twice; one that is always
        there comes at least once.
        """
        where = self._settled(cursor, count)
        if where is None:
            return np.zeros((0, 2), dtype=np.uint64), np.zeros(0, dtype=np.uint32), BEGIN
        end = min(self.capacity, where + count)
        keys, values, _ = self._slots.entries(where, end)
        return keys, values, (self._layouts, end) if end < self.capacity else None

    def _settled(self, cursor: Cursor, count: int) -> int | None:
        """The slot that ``cursor`` stands for; 0 when entries moved since; None while they do: they move on."""
        if self._old is not None:
            self._move(max(MOVED_MIN, count))
            return None
        layout, where = cursor
        return where if layout == self._layouts else 0

    def histogram(self, size: int) -> npt.NDArray[np.int64]:
        """How many entries have each value below ``size``. O(capacity)."""
        counts = self._slots.histogram(size)
        return counts if self._old is None else counts + self._old.histogram(size)

    # ------------------------------------------------------------------ changes

    def put(self, keys: Keys, values: Values) -> None:
        """Set values (none of them 0). Of equal keys in one batch the last wins."""
        if len(keys) <= FEW:
            self.put_few(dict(zip(map(tuple, keys.tolist()), values.tolist(), strict=True)))
            return
        self._advance(keys)
        slots = self._slots.locate(keys)
        known = slots >= 0
        self._slots.value[slots[known]] = values[known]
        self._insert(keys[~known], values[~known])

    def add(self, keys: Keys, values: Values) -> None:
        """As :meth:`put`, of keys that are known to be absent."""
        if len(keys) <= FEW:
            self.put_few(dict(zip(map(tuple, keys.tolist()), values.tolist(), strict=True)))
            return
        self._go_on(len(keys))
        self._insert(keys, values)

    def put_few(self, entries: Mapping[tuple[int, int], int]) -> None:
        """As :meth:`put`, key by key."""
        self._advance_few(entries)
        fresh = []
        for (low, high), value in entries.items():
            slot = self._slots.locate_one(low, high)
            if slot >= 0:
                self._slots.set_one(slot, value)
            else:
                fresh.append((low, high, value))
        self._insert_few(fresh)

    def discard(self, keys: Keys) -> int:
        """Take keys out; returns how many were there."""
        if len(keys) <= FEW:
            return len(self.update_few(keys, np.zeros_like))
        self._advance(keys)
        slots = self._slots.locate(keys)
        known = np.unique(slots[slots >= 0])
        self._slots.set(known, np.zeros(len(known), dtype=np.uint32))
        self._maybe_shrink()
        return len(known)

    def update(self, keys: Keys, change: Callable[[Values], Values]) -> tuple[Values, Values]:
        """Apply ``change`` to the value of each distinct key; 0 stands for absent on both sides.

        Returns (before, after) of the distinct keys that ``change`` altered.
        """
        if len(keys) <= FEW:
            altered_few = np.array(self.update_few(keys, change), dtype=np.uint32).reshape(-1, 2)
            return altered_few[:, 0], altered_few[:, 1]
        self._advance(keys)
        slots = self._slots.locate(keys)
        known = np.unique(slots[slots >= 0])
        before = self._slots.value[known]
        after = change(before)
        altered = before != after
        before, after = before[altered], after[altered]
        self._slots.set(known[altered], after)
        fresh = change(np.zeros(1, dtype=np.uint32))
        if fresh[0] != EMPTY:
            absent = keys[slots < 0]
            count = self._insert(absent, np.full(len(absent), fresh[0], dtype=np.uint32))
            before = np.concatenate((before, np.zeros(count, dtype=np.uint32)))
            after = np.concatenate((after, np.full(count, fresh[0], dtype=np.uint32)))
        self._maybe_shrink()
        return before, after

    def update_few(self, keys: Keys, change: Callable[[Values], Values]) -> list[tuple[int, int]]:
        """As :meth:`update`, key by key: (before, after) of each distinct key that ``change`` altered."""
        pairs = [(low, high) for low, high in dict.fromkeys(map(tuple, keys.tolist()))]
        self._advance_few(pairs)
        slots = [self._slots.locate_one(low, high) for low, high in pairs]
        before = [self._slots.value_at(slot) if slot >= 0 else 0 for slot in slots]
        after = change(np.array(before, dtype=np.uint32)).tolist()
        altered = [row for row in zip(slots, pairs, before, after, strict=True) if row[2] != row[3]]
        for slot, _, _, value in altered:
            if slot >= 0:
                self._slots.set_one(slot, value)
        self._insert_few([(*pair, value) for slot, pair, _, value in altered if slot < 0])
        self._maybe_shrink()
        return [(was, now) for _, _, was, now in altered]

    def remap(self, remap: Remap, cursor: Cursor, count: int) -> tuple[Values, Cursor | None]:
        """Replace values in the next ``count`` slots.

        Returns (what was replaced, where to go on; None at the end). Begin with :data:`BEGIN`; nothing may be given
        a value that is being replaced meanwhile.
        """
        where = self._settled(cursor, count // REMAPPED_PER_MOVED)
        if where is None:
            return np.zeros(0, dtype=np.uint32), BEGIN
        end = min(self.capacity, where + count)
        replaced = self._slots.remap(remap, where, end)
        if end < self.capacity:
            return replaced, (self._layouts, end)
        self._maybe_shrink()
        return replaced, None

    def passed(self, cursor: Cursor) -> Values:
        """The values before ``cursor``; none when it is to begin again."""
        layout, where = cursor
        return self._slots.entries(0, where if self._old is None and layout == self._layouts else 0)[1]

    def check(self) -> None:
        """Assert the structure, and that no key is in the old slots and the new. O(capacity)."""
        self._slots.check()
        assert self._slots.used <= LOAD_MAX * self.capacity, "too full"
        if self._old is not None:
            self._old.check()
            keys, _, slots = self._old.entries(0, self._old.capacity)
            assert not len(slots) or slots[0] >= self._moved
            assert (self._slots.locate(keys) < 0).all(), "a key twice"
            assert self._slots.used + self._old.live <= LOAD_MAX * self.capacity, "too full, once all has moved"

    # ------------------------------------------------------------------ size

    def _advance(self, keys: Keys) -> None:
        """Before a change of ``keys``: none of them is in old slots, and a move in progress goes on."""
        if self._old is not None:
            old = np.unique(self._old.locate(keys))
            self._take_over(old[old >= 0])
        self._go_on(len(keys))

    def _advance_few(self, pairs: Collection[tuple[int, int]]) -> None:
        """As :meth:`_advance`, key by key."""
        old = self._old
        if old is not None:
            for low, high in pairs:
                slot = old.locate_one(low, high)
                if slot >= 0:
                    value = old.value_at(slot)
                    old.set_one(slot, 0)
                    self._place_one(low, high, value)
        self._go_on(len(pairs))

    def _go_on(self, count: int) -> None:
        """With a change of ``count`` keys, some of what is to be moved or made ready is."""
        if self._old is not None:
            self._move(max(MOVED_MIN, MOVED_PER_KEY * count))
        elif self._slots.used > LOAD_AHEAD * self.capacity and self.capacity > MOVED_AT_ONCE:
            self._look_ahead(WARMED_PER_KEY * count)

    def _look_ahead(self, count: int) -> None:
        """Have ``count`` more of the slots ready that the next resize will most likely take."""
        if self._next is None:
            growth = int((LOAD_MAX - LOAD_AHEAD) * self.capacity)
            self._next, self._warmed = SlotArray(_capacity_for(self.live + growth)), 0
        self._next.warm(self._warmed, self._warmed + count)
        self._warmed += count

    def _maybe_shrink(self) -> None:
        if self._old is None and self.capacity > CAPACITY_MIN and self.live < LOAD_MIN * self.capacity:
            self._resize(_capacity_for(self.live))

    def _resize(self, capacity: int) -> None:
        """Begin to move to new slots; what an earlier move has left is moved first."""
        if self._old is not None:
            self._move(self._old.capacity)
        self._layouts += 1
        ahead, self._next = self._next, None
        fresh = ahead if ahead is not None and ahead.capacity == capacity else SlotArray(capacity)
        self._old, self._slots, self._moved = self._slots, fresh, 0
        if self._old.capacity <= MOVED_AT_ONCE:
            self._move(self._old.capacity)

    def _move(self, count: int) -> None:
        """Move the entries of the next ``count`` old slots."""
        assert self._old is not None
        end = min(self._old.capacity, self._moved + count)
        for start in range(self._moved, end, STRIDE):
            self._take_over(self._old.entries(start, min(end, start + STRIDE))[2])
        self._moved = end
        if not self._old.live:
            self._old = None

    def _take_over(self, slots: Slots) -> None:
        assert self._old is not None
        if slots.size:
            keys, values = self._old.at(slots)
            self._old.set(slots, np.zeros_like(values))
            self._place(keys, values)

    def _insert(self, keys: Keys, values: Values) -> int:
        """Add keys that are nowhere yet; returns how many were distinct."""
        if not len(keys):
            return 0
        self._make_room(len(keys))
        return self._place(keys, values)

    def _insert_few(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """As :meth:`_insert`, of distinct keys, key by key."""
        if entries:
            self._make_room(len(entries))  # first: slots are others after it
        for low, high, value in entries:
            self._place_one(low, high, value)

    def _make_room(self, count: int) -> None:
        coming = count + (self._old.live if self._old is not None else 0)
        if self._slots.used + coming > LOAD_MAX * self.capacity:
            self._resize(_capacity_for(self.live + count))

    def _place(self, keys: Keys, values: Values) -> int:
        total, left = self._slots.insert(keys, values)
        while left.size:
            keys, values = keys[left], values[left]
            self._spread()
            count, left = self._slots.insert(keys, values)
            total += count
        return total

    def _place_one(self, low: int, high: int, value: int) -> None:
        while not self._slots.insert_one(low, high, value):
            self._spread()

    def _spread(self) -> None:
        """A key found no place within reach: move to more slots, under another secret, at once."""
        crowded, capacity = self._slots, self.capacity
        for _ in range(SPREADS_MAX):
            capacity *= 2
            roomy = SlotArray(capacity)
            strides = (crowded.entries(start, start + STRIDE)[:2] for start in range(0, crowded.capacity, STRIDE))
            if all(not roomy.insert(keys, values)[1].size for keys, values in strides):
                self._slots = roomy
                self._layouts += 1
                return
        raise MemoryError(f"{self.live} keys do not fit {capacity} slots: their hashes are not spread")


def _capacity_for(entries: int) -> int:
    capacity = CAPACITY_MIN
    while entries > LOAD_MOVED * capacity:
        capacity *= 2
    return capacity
