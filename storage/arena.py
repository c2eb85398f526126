"""One tier's room: slabs of equal size, each cut into slots of one size at a time.

A slab takes a slot size when a size needs one and goes back to the free list when its last slot is freed,
so that namespaces with different block sizes share a node. What to evict when nothing is free is the
inventory's business. DRAM is allocated and faulted at the start; extents of SSDs are cut the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.huge_pages import HUGEPAGE_BYTES, Pages, huge_pages_for, transparent_bytes
from kvstrata.storage.slab import Slab

log = get_logger(__name__)

G = TypeVar("G", bound=SlotGrid)

SLAB_BYTES_MIN: Final = 4 << 20
SLAB_BYTES_MAX: Final = 256 << 20
#: Default slab: this part of all DRAM, within the bounds above.
SLABS_WANTED: Final = 8
SLABS_MIN: Final = 2
#: An explicit slab size may be as small as this (tests, tiny pools).
SLAB_BYTES_FLOOR: Final = 64 << 10
_PAGE: Final = 4096


def slab_bytes_for(dram_bytes: int, wanted: int | None, *, hugepages: bool = False) -> int:
    """The slab size of a pool; raises :class:`ConfigError` when two slabs do not fit.

    Default: an eighth of DRAM, 4 MiB to 256 MiB, and never more than half of DRAM.
    """
    if wanted is None:
        size = min(max(dram_bytes // SLABS_WANTED, SLAB_BYTES_MIN), SLAB_BYTES_MAX, dram_bytes // SLABS_MIN)
    else:
        size = wanted
    grain = HUGEPAGE_BYTES if hugepages else _PAGE
    size -= size % grain
    if size < SLAB_BYTES_FLOOR:
        raise ConfigError(f"slabs of {size} bytes are too small: at least {SLAB_BYTES_FLOOR} (is --dram too small?)")
    if size * SLABS_MIN > dram_bytes:
        raise ConfigError(f"{dram_bytes} bytes of DRAM hold no {SLABS_MIN} slabs of {size}: raise --dram")
    return size


class Arena(Generic[G]):
    """Grids and their generations, of one tier. Not thread-safe: its owner's lock covers it.

    ``grids`` are of one size. It closes them when it is closed.
    """

    def __init__(self, grids: Sequence[G], slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.slabs: list[G] = list(grids)
        self.bytes_total = len(self.slabs) * slab_bytes
        self.bytes_used = 0
        self._free: list[G] = list(reversed(self.slabs))
        self._shaped: dict[int, dict[int, G]] = {}
        #: slot size -> heap of (when it was cut, slab): each cut slab with room, and some without or cut again since.
        self._with_room: dict[int, list[tuple[int, G]]] = {}
        self._listed: set[int] = set()  #: indexes of slabs that :attr:`_with_room` has, as they are cut now
        self._cut_at: dict[int, int] = {}
        self._cuts = 0
        self._slots_of: dict[int, int] = {}
        self._excluded: set[int] = set()
        self._generation = 0

    def slots_in_a_slab(self, slot_bytes: int) -> int:
        """0 when a block of that size can never be held."""
        found = self._slots_of.get(slot_bytes)
        if found is None:
            found = self._slots_of[slot_bytes] = self.slabs[0].room_for(slot_bytes)[0] if self.slabs else 0
        return found

    def allocate(self, slot_bytes: int, count: int) -> list[tuple[G, list[int]]]:
        """Up to ``count`` free slots, ascending within each grid; fewer when nothing more is free.

        The caller enters a record for each in its grid's ``blocks`` before it does anything else.
        """
        slots: list[tuple[G, list[int]]] = []
        while count and (self._with_room.get(slot_bytes) or self._shape_one(slot_bytes)):
            heap = self._with_room[slot_bytes]
            at, slab = heap[0]
            if self._cut_at.get(slab.index) != at:
                heapq.heappop(heap)
                continue
            if slab.free:
                taken = slab.take(count)
                slots.append((slab, taken))
                count -= len(taken)
            if count:  # it is full
                heapq.heappop(heap)
                self._listed.discard(slab.index)
        return slots

    def _shape_one(self, slot_bytes: int) -> bool:
        if not self._free or not self.slots_in_a_slab(slot_bytes):
            return False
        self._cut(self._free.pop(), slot_bytes)
        return True

    def _cut(self, slab: G, slot_bytes: int) -> None:
        slab.shape(slot_bytes)
        self._shaped.setdefault(slot_bytes, {})[slab.index] = slab
        self._cuts += 1
        self._cut_at[slab.index] = self._cuts
        self._list(slab)

    def _list(self, slab: G) -> None:
        """A slab in use has room."""
        if slab.index not in self._listed and slab.index not in self._excluded:
            self._listed.add(slab.index)
            heapq.heappush(self._with_room.setdefault(slab.slot_bytes, []), (self._cut_at[slab.index], slab))

    def adopt(self, slab: G, slot_bytes: int, slots: Sequence[int], generation: int) -> None:
        """Take a free grid into use as it was found on a device: cut to ``slot_bytes``, these slots taken.

        ``generation`` is the greatest that was found in it. The caller enters a record for each slot.
        """
        self._free.remove(slab)
        self._cut(slab, slot_bytes)
        slab.adopt(slots)
        self._generation = max(self._generation, generation)

    def disown(self, slab: G, slots: Sequence[int]) -> None:
        """After :meth:`adopt`: nobody uses these slots after all. A grid without any goes back to the free list."""
        slab.disown(slots)
        self._less(slab)

    def exclude(self, slab: G) -> None:
        """Its device is gone: nothing is allocated in it any more. What is taken there is freed as ever."""
        if slab.index in self._excluded:
            return
        self._excluded.add(slab.index)
        self.bytes_total -= self.slab_bytes
        if slab.slot_bytes:
            self._uncut(slab)
        else:
            self._free.remove(slab)

    @property
    def generation(self) -> int:
        """The greatest number given so far."""
        return self._generation

    def excluded(self, slab: G) -> bool:
        """True for a grid whose device is gone."""
        return slab.index in self._excluded

    def next_generation(self) -> int:
        """A number no slot of this node has ever had."""
        self._generation += 1
        return self._generation

    def next_generations(self, count: int) -> range:
        """So many numbers that no slot of this node has ever had."""
        first = self._generation + 1
        self._generation += count
        return range(first, first + count)

    def pass_generation(self, generation: int) -> None:
        """No number up to this one is given from here on: an earlier start may have used it."""
        self._generation = max(self._generation, generation)

    def free(self, slab: G, slot: int) -> None:
        """Give one slot back; an empty slab goes back to the free list."""
        self.free_all(slab, (slot,))

    def free_all(self, slab: G, slots: Sequence[int]) -> None:
        """:meth:`free` several slots of one slab."""
        slab.give_back(slots)
        self.bytes_used -= len(slots) * slab.slot_bytes
        self._less(slab)

    def _less(self, slab: G) -> None:
        """Slots of it are free now: it has room, or goes back to the free list."""
        if slab.index in self._excluded:
            if not slab.blocks:
                slab.shape(0)
        elif slab.blocks:
            self._list(slab)
        else:
            self._uncut(slab)
            slab.shape(0)
            self._free.append(slab)

    def _uncut(self, slab: G) -> None:
        shaped = self._shaped[slab.slot_bytes]
        del shaped[slab.index], self._cut_at[slab.index]
        self._listed.discard(slab.index)
        if not shaped:
            del self._shaped[slab.slot_bytes]
            self._with_room.pop(slab.slot_bytes, None)

    def shared(self) -> bool:
        """True when slots of more than one size are in use."""
        return len(self._shaped) > 1

    def others(self, slot_bytes: int, fits: Callable[[G], bool]) -> list[G]:
        """Slabs cut to any other slot size for which ``fits`` is true; O(slabs)."""
        return [s for size, shaped in self._shaped.items() if size != slot_bytes for s in shaped.values() if fits(s)]

    def capacity(self) -> dict[int, tuple[int, int]]:
        """slot size -> (slots taken, slots cut)."""
        return {
            size: (sum(len(s.blocks) for s in shaped.values()), sum(s.slots for s in shaped.values()))
            for size, shaped in self._shaped.items()
        }

    @property
    def free_slabs(self) -> int:
        return len(self._free)

    def check(self) -> None:
        """Assert that bytes add up and that no slab or slot is in two places."""
        used = 0
        in_use: set[int] = set()
        for size, shaped in self._shaped.items():
            for index, slab in shaped.items():
                assert slab.index == index and slab.slot_bytes == size and slab.blocks
                slab.check()
                used += len(slab.blocks) * size
                in_use.add(index)
                assert not slab.free or index in self._listed, f"slab {index} has room, and is not listed"
        for slab in self.slabs:
            if slab.index in self._excluded:
                slab.check()
                used += len(slab.blocks) * slab.slot_bytes
        assert used == self.bytes_used, f"{self.bytes_used} bytes counted as used, {used} are"
        listed = [s.index for heap in self._with_room.values() for at, s in heap if self._cut_at.get(s.index) == at]
        assert len(listed) == len(set(listed)) and set(listed) == self._listed, "a slab with room is listed twice"
        assert self._cut_at.keys() == in_use, "a slab that is cut has no number"
        unused = {slab.index for slab in self._free}
        assert not unused & in_use and len(unused) == len(self._free)
        assert not self._excluded & (unused | in_use), "a grid of a failed device is in use"
        assert len(unused) + len(in_use) + len(self._excluded) == len(self.slabs), "a slab is neither free nor in use"
        assert self.bytes_total == (len(self.slabs) - len(self._excluded)) * self.slab_bytes
        assert all(slab.slot_bytes == 0 and not slab.blocks and not slab.pinned for slab in self._free)

    def close(self) -> None:
        """Give all memory back. Views handed out keep theirs."""
        for slab in self.slabs:
            slab.close()


def dram_arena(dram_bytes: int, slab_bytes: int | None = None, *, hugepages: bool = False) -> Arena[Slab]:
    """All DRAM of a node, allocated now. Raises :class:`ConfigError` when the memory is not to be had."""
    size = slab_bytes_for(dram_bytes, slab_bytes, hugepages=hugepages)
    count = dram_bytes // size
    pages = huge_pages_for(count * size) if hugepages else Pages.SMALL
    slabs: list[Slab] = []
    try:
        for index in range(count):
            slabs.append(Slab(index, size, pages=pages))
    except BaseException:
        for slab in slabs:
            slab.close()
        raise
    if pages is not Pages.SMALL:
        _tell_pages(slabs, pages)
    return Arena(slabs, size)


def _tell_pages(slabs: Sequence[Slab], pages: Pages) -> None:
    """Transparent huge pages are found at the start or, where memory is in fragments, not: the log says how many."""
    total = sum(slab.nbytes for slab in slabs)
    huge = transparent_bytes({slab.address for slab in slabs}) if pages is Pages.TRANSPARENT else total
    tell = log.info if huge >= total else log.warning
    tell("huge pages", kind=pages.value, mib=huge >> 20, of_mib=total >> 20)
