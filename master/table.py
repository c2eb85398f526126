"""Packed block hashes to small integers: an open-addressing table on numpy arrays.

A dict of 16-byte hashes costs 100 bytes and a Python object an entry, and answers half a million
lookups a second when it is large. Here a whole batch is probed at once: every probe step is a few array
operations over the keys that are still undecided.

Hashes are chosen by whoever writes prompts, so the slot of a key depends on a secret that is drawn anew
at each rebuild, and no key is ever more than ``PROBES_MAX`` steps from its first slot.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]  #: shape [n, 2]
Values = npt.NDArray[np.uint32]  #: shape [n]
Slots = npt.NDArray[np.int64]

CAPACITY_MIN: Final = 64
#: Used slots (live entries and tombstones) never pass this share of the capacity ...
LOAD_MAX: Final = 0.6
#: ... and a rebuild leaves at most this share used, so that the next one is far away.
LOAD_REBUILT: Final = 0.45
#: Fewer live entries than this share: the table shrinks.
LOAD_MIN: Final = 0.08
PROBES_MAX: Final = 256
#: Entries moved at once by a rebuild, and slots looked at by a remap: temporaries stay in cache.
STRIDE: Final = 1 << 16

_EMPTY: Final = np.uint32(0)
_TOMBSTONE: Final = np.uint32(0xFFFFFFFF)
_LIVE_BELOW: Final = np.uint32(0xFFFFFFFE)
VALUE_MAX: Final = 0xFFFFFFFE


def fold(packed: bytes | memoryview, hash_bytes: int) -> Keys:
    """View packed hashes (16 to 32 bytes each) as u64[n, 2]; words past the second are XORed in.

    Two longer hashes with one fold make the directory name a node that then answers with a miss: the
    node compares whole hashes, so a fold can cost a round trip and never a wrong byte.
    """
    if hash_bytes == 16:
        return np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    octets = np.frombuffer(packed, dtype=np.uint8).reshape(-1, hash_bytes)
    padded = np.zeros((octets.shape[0], 32), dtype=np.uint8)
    padded[:, :hash_bytes] = octets
    words = padded.view("<u8")
    return np.ascontiguousarray(words[:, :2] ^ words[:, 2:])


class Table:
    """A map from keys u64[n, 2] to values 1 .. ``VALUE_MAX``; 0 means absent. Costs 33 to 89 bytes an entry.

    Not thread-safe: its owner holds a lock.
    """

    __slots__ = ("_hi", "_lo", "_mask", "_reach", "_secret", "_used", "_value", "live")

    def __init__(self) -> None:
        self.live = 0
        self._allocate(CAPACITY_MIN)

    # ------------------------------------------------------------------ questions

    @property
    def capacity(self) -> int:
        return int(self._mask) + 1

    @property
    def nbytes(self) -> int:
        return self._lo.nbytes + self._hi.nbytes + self._value.nbytes

    def find(self, keys: Keys) -> Values:
        """Values of ``keys``, 0 where absent: u32[n]."""
        slots = self._locate(keys)
        values = self._value[slots]  # slot -1 reads the last entry; it is overwritten next
        values[slots < 0] = _EMPTY
        return values

    def histogram(self, size: int) -> npt.NDArray[np.int64]:
        """How many entries have each value below ``size``. O(capacity)."""
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, self.capacity, STRIDE):
            values = self._value[start : start + STRIDE]
            counts += np.bincount(values[_is_live(values)], minlength=size)
        return counts

    # ------------------------------------------------------------------ changes

    def put(self, keys: Keys, values: Values) -> None:
        """Set values (none of them 0). Of equal keys in one batch the last wins."""
        self._make_room(len(keys))
        slots = self._locate(keys)
        known = slots >= 0
        self._value[slots[known]] = values[known]
        if not known.all():
            self._insert(keys[~known], values[~known])

    def discard(self, keys: Keys) -> int:
        """Take keys out; returns how many were there."""
        before, _ = self.update(keys, np.zeros_like)
        return len(before)

    def update(self, keys: Keys, change: Callable[[Values], Values]) -> tuple[Values, Values]:
        """Apply ``change`` to the value of each distinct key; 0 stands for absent on both sides.

        Returns (before, after) of the distinct keys that ``change`` altered.
        """
        slots = self._locate(keys)
        known = np.unique(slots[slots >= 0])
        before = self._value[known]
        after = change(before)
        altered = before != after
        before, after = before[altered], after[altered]
        self._value[known[altered]] = np.where(after == _EMPTY, _TOMBSTONE, after)
        self.live -= int(np.count_nonzero(after == _EMPTY))
        new_value = change(np.zeros(1, dtype=np.uint32))
        missing = slots < 0
        if new_value[0] != _EMPTY and missing.any():
            absent = keys[missing]
            self._make_room(len(absent))
            count = self._insert(absent, np.full(len(absent), new_value[0], dtype=np.uint32))
            before = np.concatenate((before, np.zeros(count, dtype=np.uint32)))
            after = np.concatenate((after, np.full(count, new_value[0], dtype=np.uint32)))
        self._maybe_shrink()
        return before, after

    def remap(self, mapping: Values) -> None:
        """Replace every value v by ``mapping[v]``; 0 takes the entry out. One pass over the table."""
        for start in range(0, self.capacity, STRIDE):
            values = self._value[start : start + STRIDE]
            live = np.flatnonzero(_is_live(values))
            changed = mapping[values[live]]
            gone = changed == _EMPTY
            changed[gone] = _TOMBSTONE
            values[live] = changed
            self.live -= int(np.count_nonzero(gone))
        self._maybe_shrink()

    def check(self) -> None:
        """Assert the structure: counts, reachability of every entry, no key twice. O(capacity)."""
        live = np.flatnonzero(_is_live(self._value))
        assert live.size == self.live, f"{live.size} live entries, counted {self.live}"
        assert np.count_nonzero(self._value) == self._used
        assert self._used <= LOAD_MAX * self.capacity, "too full"
        keys = np.column_stack((self._lo[live], self._hi[live]))
        assert np.array_equal(self._locate(keys), live), "an entry is not where a lookup ends"

    # ------------------------------------------------------------------ probing

    def _allocate(self, capacity: int) -> None:
        self._lo = np.zeros(capacity, dtype=np.uint64)
        self._hi = np.zeros(capacity, dtype=np.uint64)
        self._value = np.zeros(capacity, dtype=np.uint32)
        self._mask = np.uint64(capacity - 1)
        self._used = 0
        self._reach = 1
        self._secret = np.array([secrets.randbits(64) | (i & 1) for i in range(4)], dtype=np.uint64)

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

    def _locate(self, keys: Keys) -> Slots:
        """The slot of each key, -1 where absent. Probes go 1, 2, 3, ... slots further."""
        slots = self._first_slots(keys)
        found = np.full(len(keys), -1, dtype=np.int64)
        pending: Slots | None = None
        low, high = keys[:, 0], keys[:, 1]
        mask = np.int64(self._mask)
        for step in range(1, self._reach + 1):
            values = self._value[slots]
            hit = _is_live(values)
            hit &= self._lo[slots] == low
            hit &= self._hi[slots] == high
            if pending is None:
                np.copyto(found, slots, where=hit)
            else:
                found[pending[hit]] = slots[hit]
            more = np.flatnonzero(~hit & (values != _EMPTY))
            if not more.size:
                break
            pending = more if pending is None else pending[more]
            low, high = low[more], high[more]
            slots = (slots[more] + step) & mask
        return found

    def _insert(self, keys: Keys, values: Values) -> int:
        """Add keys known to be absent (equal ones may repeat: the last wins); returns the distinct count."""
        total = 0
        while True:
            count, left = self._insert_within_reach(keys, values)
            total += count
            if not left.size:
                return total
            keys, values = keys[left], values[left]
            self._rebuild(self.capacity * 2)

    def _insert_within_reach(self, keys: Keys, values: Values) -> tuple[int, Slots]:
        slots = self._first_slots(keys)
        pending = np.arange(len(keys))
        mask = np.int64(self._mask)
        total = 0
        for step in range(1, PROBES_MAX + 1):
            occupant = self._value[slots]
            free = np.flatnonzero(~_is_live(occupant))
            if free.size:
                total += self._claim(slots[free], keys, values, pending[free], occupant[free])
                self._reach = max(self._reach, step)
            # Equal keys probe in step, so a loser meets its equal in the very slot it lost.
            settled = (self._lo[slots] == keys[pending, 0]) & (self._hi[slots] == keys[pending, 1])
            settled &= _is_live(self._value[slots])
            more = np.flatnonzero(~settled)
            if not more.size:
                break
            pending = pending[more]
            slots = (slots[more] + step) & mask
        else:
            return total, pending
        return total, pending[:0]

    def _claim(self, slots: Slots, keys: Keys, values: Values, rows: Slots, occupant: Values) -> int:
        """Write rows into free slots; where several want one, the last gets it. Returns slots taken."""
        ticket = np.arange(1, len(slots) + 1, dtype=np.uint32)
        self._value[slots] = ticket
        won = self._value[slots] == ticket
        slots, rows = slots[won], rows[won]
        self._lo[slots] = keys[rows, 0]
        self._hi[slots] = keys[rows, 1]
        self._value[slots] = values[rows]
        self.live += len(slots)
        self._used += int(np.count_nonzero(occupant[won] == _EMPTY))
        return len(slots)

    # ------------------------------------------------------------------ size

    def _make_room(self, extra: int) -> None:
        if self._used + extra > LOAD_MAX * self.capacity:
            self._rebuild(_capacity_for(self.live + extra))

    def _maybe_shrink(self) -> None:
        if self.capacity > CAPACITY_MIN and self.live < LOAD_MIN * self.capacity:
            self._rebuild(_capacity_for(self.live))

    def _rebuild(self, capacity: int) -> None:
        low, high, value = self._lo, self._hi, self._value
        self._allocate(capacity)
        self.live = 0
        for start in range(0, len(value), STRIDE):
            values = value[start : start + STRIDE]
            live = np.flatnonzero(_is_live(values))
            if live.size:
                keys = np.column_stack((low[start : start + STRIDE][live], high[start : start + STRIDE][live]))
                self._insert(keys, values[live])


def _is_live(values: Values) -> npt.NDArray[np.bool_]:
    """Neither empty nor a tombstone: one comparison, as 0 - 1 wraps to the top."""
    return (values - np.uint32(1)) < _LIVE_BELOW


def _capacity_for(entries: int) -> int:
    capacity = CAPACITY_MIN
    while entries > LOAD_REBUILT * capacity:
        capacity *= 2
    return capacity
