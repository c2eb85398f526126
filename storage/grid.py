"""A stretch of memory or of a device cut into slots of one size: which are taken, which are free.

What a slab of DRAM and an extent of an SSD have in common, so that one allocator and one inventory serve
both tiers.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.storage.records import Block


class SlotGrid:
    """Free slots are those of a min-heap, then those from ``_fresh`` up, so that a batch lies in one run.

    ``blocks`` maps taken slots to their records. ``generations`` has a number for each slot, new whenever
    the slot gets a new block. ``pinned`` counts blocks that cannot be evicted now, ``hot`` is the youngest
    LRU stamp that any of its blocks has had: both kept by the inventory.
    """

    __slots__ = (
        "_freed", "_fresh", "blocks", "data_offset", "generations", "hot", "index", "nbytes", "pinned", "slot_bytes",
        "slots",
    )  # fmt: skip

    def __init__(self, index: int, nbytes: int, generations: MutableSequence[int] | memoryview) -> None:
        self.index = index
        self.nbytes = nbytes
        self.generations = generations
        self.blocks: dict[int, Block] = {}
        self.pinned = 0
        self.hot = 0
        self._freed: list[int] = []
        self.shape(0)

    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        """(slots of that size that fit, byte offset of the first): the kind of grid knows."""
        raise NotImplementedError

    def shape(self, slot_bytes: int) -> None:
        """Give the empty grid another slot size; 0 takes it out of use."""
        assert not self.blocks, f"grid {self.index} has {len(self.blocks)} slots taken"
        self.slot_bytes = slot_bytes
        self.slots, self.data_offset = self.room_for(slot_bytes) if slot_bytes else (0, 0)
        self._fresh = 0
        self._freed.clear()

    @property
    def free(self) -> int:
        return self.slots - len(self.blocks)

    def take(self, count: int) -> list[int]:
        """Up to ``count`` free slots, lowest first. The caller enters them in ``blocks``."""
        freed = self._freed
        taken = [heapq.heappop(freed) for _ in range(min(count, len(freed)))]
        more = min(count - len(taken), self.slots - self._fresh)
        taken.extend(range(self._fresh, self._fresh + more))
        self._fresh += more
        return taken

    def renew(self, slots: Sequence[int], numbers: Sequence[int]) -> None:
        """Give each of these slots, ascending, its new generation."""
        first, last = slots[0], slots[-1]
        if last - first == len(slots) - 1:
            self.generations[first : last + 1] = array("Q", numbers)
            return
        for slot, number in zip(slots, numbers, strict=True):
            self.generations[slot] = number

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots; O(log slots) each."""
        blocks, freed, push = self.blocks, self._freed, heapq.heappush
        for slot in slots:
            del blocks[slot]
            push(freed, slot)

    def adopt(self, slots: Sequence[int]) -> None:
        """Right after :meth:`shape`: these are taken (found on a device); the caller enters them in ``blocks``."""
        assert not self.blocks and not self._fresh
        self._fresh = max(slots, default=-1) + 1
        taken = set(slots)
        self._freed = [slot for slot in range(self._fresh) if slot not in taken]

    def disown(self, slots: Sequence[int]) -> None:
        """After :meth:`adopt`: these have no record and are free."""
        for slot in slots:
            assert slot not in self.blocks
            heapq.heappush(self._freed, slot)

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in its memory, or in its device."""
        return self.data_offset + slot * self.slot_bytes

    def check(self) -> None:
        """Assert that every slot is either taken, freed or fresh, and exactly one of them."""
        freed = set(self._freed)
        assert len(freed) == len(self._freed), f"grid {self.index}: a slot was freed twice"
        assert not freed & self.blocks.keys(), f"grid {self.index}: slots both free and taken"
        assert freed | self.blocks.keys() == set(range(self._fresh)), f"grid {self.index}: slots are lost"
        assert self._fresh <= self.slots
        for slot, block in self.blocks.items():
            assert block.slab is self and block.slot == slot
            same = self.generations[slot] == block.generation
            assert same or block.shelf.retired, f"grid {self.index} slot {slot}: another generation"

    def close(self) -> None:
        """Give what it holds back. Safe twice."""
