"""A fixed number of slots, probed by whole batches of keys at once.

Every probe step is a few array operations over the keys that are still undecided. Hashes are chosen by
whoever writes prompts, so the first slot of a key depends on a secret drawn for each set of slots, and no
key is ever more than ``PROBES_MAX`` steps from it.
"""

from __future__ import annotations

import secrets
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  #: shape [n, 2]
Values = npt.NDArray[np.uint32]  #: shape [n]
Slots = npt.NDArray[np.int64]

PROBES_MAX: Final = 256
#: Values are 1 .. ``VALUE_MAX``; 0 means absent.
VALUE_MAX: Final = 0xFFFFFFFE
#: Up to so many keys are looked for one by one, in plain integers: arrays of so few cost more than they save.
FEW: Final = 32
#: So many keys of a batch that are not decided yet are walked one by one: a step over arrays costs as much as thirty
#: steps of single keys, and the last of a batch need many.
LEFT_FEW: Final = 32
#: Slots looked at together by passes over everything: temporaries stay in cache.
STRIDE: Final = 1 << 16

EMPTY: Final = np.uint32(0)
TOMBSTONE: Final = np.uint32(0xFFFFFFFF)
_LIVE_BELOW: Final = np.uint32(0xFFFFFFFE)
_EMPTY: Final = int(EMPTY)
_TOMBSTONE: Final = int(TOMBSTONE)
_WORD: Final = (1 << 64) - 1


class Remap(NamedTuple):
    """Values to be replaced: v by ``after[v]`` where ``moves[v]``. The last of ``moves`` stands for all past it."""

    moves: npt.NDArray[np.bool_]
    after: Values

    @classmethod
    def of(cls, mapping: Values) -> Remap:
        """Every value v becomes ``mapping[v]``; 0 takes the entry out. Values past the mapping stay."""
        moves = np.append(mapping != np.arange(len(mapping)), False)
        return cls(moves, np.where(mapping == EMPTY, TOMBSTONE, mapping).astype(np.uint32))


class SlotArray:
    """Open addressing over ``capacity`` slots (a power of two): 20 bytes a slot.

    ``live`` entries; ``used`` counts tombstones too. The owner keeps ``used`` well below the capacity.
    """

    __slots__ = (
        "_hi", "_highs", "_keys", "_lo", "_lows", "_mask", "_reach", "_secret", "_secrets", "_values", "live", "used",
        "value",
    )  # fmt: skip

    def __init__(self, capacity: int) -> None:
        self._keys: Keys = np.zeros((capacity, 2), dtype=np.uint64)  # both halves are in one line of the cache
        self._lo, self._hi = self._keys[:, 0], self._keys[:, 1]
        self.value = np.zeros(capacity, dtype=np.uint32)
        self._mask = np.uint64(capacity - 1)
        self._reach = 1  #: probes that find every key
        self._secrets = tuple(secrets.randbits(64) | (i & 1) for i in range(4))
        self._secret = np.array(self._secrets, dtype=np.uint64)
        # The same memory, for one key at a time: items of these are plain integers.
        self._lows, self._highs, self._values = self._lo.data, self._hi.data, self.value.data
        self.live = 0
        self.used = 0

    @property
    def capacity(self) -> int:
        return len(self.value)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self.value.nbytes

    def warm(self, start: int, stop: int) -> None:
        """Make the kernel provide the memory of these slots now: it takes longest when touched at random."""
        self._keys[start:stop] = 0
        self.value[start:stop] = 0

    def locate(self, keys: Keys) -> Slots:
        """The slot of each key, -1 where absent."""
        return self.probe(keys)[0]

    def probe(self, keys: Keys) -> tuple[Slots, Values]:
        """The slot of each key, -1 where absent, and its value, 0 there. Probes go 1, 2, 3, ... slots further."""
        slots = self._first_slots(keys)
        found = np.full(len(keys), -1, dtype=np.int64)
        held = np.zeros(len(keys), dtype=np.uint32)
        pending: Slots | None = None
        low, high = keys[:, 0], keys[:, 1]
        mask = np.int64(self._mask)
        for step in range(1, self._reach + 1):
            if len(slots) <= LEFT_FEW:
                rows = slice(None) if pending is None else pending
                found[rows], held[rows] = self._walk(slots.tolist(), low.tolist(), high.tolist(), step)
                break
            values = self.value[slots]
            there = self._keys.take(slots, axis=0)
            hit = is_live(values)
            hit &= there[:, 0] == low
            hit &= there[:, 1] == high
            if pending is None:
                np.copyto(found, slots, where=hit)
                np.copyto(held, values, where=hit)
            else:
                rows = pending[hit]
                found[rows], held[rows] = slots[hit], values[hit]
            more = np.flatnonzero(~hit & (values != EMPTY))
            if not more.size:
                break
            pending = more if pending is None else pending[more]
            low, high = low[more], high[more]
            slots = (slots[more] + step) & mask
        return found, held

    def insert(self, keys: Keys, values: Values) -> tuple[int, Slots]:
        """Add keys known to be absent; of equal ones the last wins.

        Returns how many distinct keys found a place, and the positions of those that found none within
        ``PROBES_MAX`` probes.
        """
        slots = self._first_slots(keys)
        pending = np.arange(len(keys))
        mask = np.int64(self._mask)
        total = 0
        for step in range(1, PROBES_MAX + 1):
            if len(slots) <= LEFT_FEW:
                added, left = self._put_rest(slots, keys, values, pending, step)
                return total + added, left
            occupant = self.value[slots]
            free = np.flatnonzero(~is_live(occupant))
            if free.size:
                total += self._claim(slots[free], keys, values, pending[free], occupant[free])
                self._reach = max(self._reach, step)
            # Equal keys probe in step, so a loser meets its equal in the very slot it lost.
            there = self._keys.take(slots, axis=0)
            settled = is_live(self.value[slots])
            settled &= there[:, 0] == keys[pending, 0]
            settled &= there[:, 1] == keys[pending, 1]
            more = np.flatnonzero(~settled)
            pending = pending[more]
            if not more.size:
                break
            slots = (slots[more] + step) & mask
        return total, pending

    # ------------------------------------------------------------------ one key

    def locate_one(self, low: int, high: int) -> int:
        """As :meth:`locate`, for one key."""
        values, lows, mask = self._values, self._lows, len(self._values) - 1
        slot = self._first_slot(low, high)
        for step in range(1, self._reach + 1):
            value = values[slot]
            if value == _EMPTY:
                return -1
            if lows[slot] == low and self._highs[slot] == high and value != _TOMBSTONE:
                return slot
            slot = (slot + step) & mask
        return -1

    def _walk(self, slots: list[int], lows: list[int], highs: list[int], step: int) -> tuple[list[int], list[int]]:
        """As :meth:`probe`, one by one, of keys that are not before these slots, their ``step``-th."""
        values, own_lows, own_highs, mask = self._values, self._lows, self._highs, len(self._values) - 1
        steps = range(step, self._reach + 1)
        found, held = [], []
        for slot, low, high in zip(slots, lows, highs, strict=True):
            at, what = -1, 0
            for further in steps:
                value = values[slot]
                if value == _EMPTY:
                    break
                if own_lows[slot] == low and own_highs[slot] == high and value != _TOMBSTONE:
                    at, what = slot, value
                    break
                slot = (slot + further) & mask
            found.append(at)
            held.append(what)
        return found, held

    def insert_one(self, low: int, high: int, value: int) -> bool:
        """Add a key known to be absent; False when it finds no place within ``PROBES_MAX`` probes."""
        return self._put(self._first_slot(low, high), low, high, value, 1)

    def _put(self, slot: int, low: int, high: int, value: int, first: int) -> bool:
        """Add a key that is not before ``slot``, its ``first``-th, or give its equal this value; False as above."""
        values, mask = self._values, len(self._values) - 1
        for step in range(first, PROBES_MAX + 1):
            occupant = values[slot]
            if occupant in (_EMPTY, _TOMBSTONE):
                self._lows[slot], self._highs[slot], values[slot] = low, high, value
                self.live += 1
                self.used += occupant == _EMPTY
                self._reach = max(self._reach, step)
                return True
            if self._lows[slot] == low and self._highs[slot] == high:
                values[slot] = value
                return True
            slot = (slot + step) & mask
        return False

    def _put_rest(self, slots: Slots, keys: Keys, values: Values, rows: Slots, step: int) -> tuple[int, Slots]:
        """The rows of a batch that are left at their ``step``-th slots, one by one: as :meth:`insert`."""
        before, put = self.live, self._put
        rest = zip(slots.tolist(), keys[rows].tolist(), values[rows].tolist(), strict=True)
        placed = [put(slot, low, high, value, step) for slot, (low, high), value in rest]
        return self.live - before, rows if not any(placed) else rows[~np.array(placed, dtype=np.bool_)]

    def value_at(self, slot: int) -> int:
        return self._values[slot]

    def set_one(self, slot: int, value: int) -> None:
        """As :meth:`set`, for one slot."""
        self._values[slot] = value or _TOMBSTONE
        self.live -= not value

    # ------------------------------------------------------------------ slots

    def set(self, slots: Slots, values: Values) -> None:
        """New values for distinct live slots; 0 leaves a tombstone."""
        gone = values == EMPTY
        self.value[slots] = np.where(gone, TOMBSTONE, values)
        self.live -= int(np.count_nonzero(gone))

    def entries(self, start: int, stop: int) -> tuple[Keys, Values, Slots]:
        """(keys, values, slots) of the live entries between two slots."""
        slots = start + np.flatnonzero(is_live(self.value[start:stop]))
        return *self.at(slots), slots

    def at(self, slots: Slots) -> tuple[Keys, Values]:
        """(keys, values) in these slots."""
        return self._keys.take(slots, axis=0), self.value[slots]

    def remap(self, remap: Remap, start: int, stop: int) -> Values:
        """Replace values between two slots; returns what was replaced."""
        replaced = []
        for first in range(start, stop, STRIDE):
            values = self.value[first : min(stop, first + STRIDE)]
            slots = np.flatnonzero(np.take(remap.moves, values, mode="clip"))
            before = values[slots]
            after = remap.after[before]
            values[slots] = after
            self.live -= int(np.count_nonzero(after == TOMBSTONE))
            replaced.append(before)
        return np.concatenate(replaced) if replaced else np.zeros(0, dtype=np.uint32)

    def histogram(self, size: int) -> npt.NDArray[np.int64]:
        """How many entries have each value below ``size``."""
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, self.capacity, STRIDE):
            values = self.value[start : start + STRIDE]
            counts += np.bincount(values[is_live(values)], minlength=size)
        return counts

    def check(self) -> None:
        """Assert the counts, and that a lookup of every key ends where it is. O(capacity)."""
        keys, _, slots = self.entries(0, self.capacity)
        assert len(slots) == self.live, f"{len(slots)} live entries, counted {self.live}"
        assert np.count_nonzero(self.value) == self.used
        assert np.array_equal(self.locate(keys), slots), "an entry is not where a lookup ends"
        some = slice(0, len(slots), 1 + len(slots) // 64)
        assert [self.locate_one(*key) for key in keys[some].tolist()] == slots[some].tolist(), "one key goes elsewhere"

    def _first_slots(self, keys: Keys) -> Slots:
        add_low, multiply_low, add_high, multiply_high = self._secret
        mixed = keys[:, 0] ^ add_low
        mixed *= multiply_low
        mixed ^= mixed >> np.uint64(32)
        mixed += keys[:, 1] ^ add_high
        mixed *= multiply_high
        mixed ^= mixed >> np.uint64(31)
        mixed &= self._mask
        first: Slots = mixed.view(np.int64)
        return first

    def _first_slot(self, low: int, high: int) -> int:
        """As :meth:`_first_slots`, for one key."""
        add_low, multiply_low, add_high, multiply_high = self._secrets
        mixed = (low ^ add_low) * multiply_low & _WORD
        mixed = ((mixed ^ mixed >> 32) + (high ^ add_high)) * multiply_high & _WORD
        return (mixed ^ mixed >> 31) & (len(self._values) - 1)

    def _claim(self, slots: Slots, keys: Keys, values: Values, rows: Slots, occupant: Values) -> int:
        """Write rows into free slots; where several want one, the last gets it. Returns slots taken."""
        ticket = np.arange(1, len(slots) + 1, dtype=np.uint32)
        self.value[slots] = ticket
        won = self.value[slots] == ticket
        slots, rows = slots[won], rows[won]
        self._lo[slots] = keys[rows, 0]
        self._hi[slots] = keys[rows, 1]
        self.value[slots] = values[rows]
        self.live += len(slots)
        self.used += int(np.count_nonzero(occupant[won] == EMPTY))
        return len(slots)


def is_live(values: Values) -> npt.NDArray[np.bool_]:
    """Neither empty nor a tombstone: one comparison, as 0 - 1 wraps to the top."""
    return (values - np.uint32(1)) < _LIVE_BELOW
