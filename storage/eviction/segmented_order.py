"""What has been used again outlives what was used once, as far as that pays: an order behind the seam.

Segmented LRU (Karedla, Love and Wherry, 1994) adapted to chains: new blocks are on trial; a block used again
is protected, and when more than a share of all blocks is, the least recent of them go back on trial as the
newest there. Blocks on trial leave first. The share is found by :class:`ShareDuel`; while it is none, the
order is plain LRU exactly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from kvstrata.storage.eviction.orders import HINTED
from kvstrata.storage.eviction.share_duel import ShareDuel
from kvstrata.storage.records import VISIBLE, Block

#: ``Block.mark`` of a block in the order.
TRIAL: Final = 0
PROTECTED: Final = 1
#: Protected blocks that go back on trial for each block of a call, when too many are.
BACK_PER_BLOCK: Final = 2


class SegmentedOrder:
    """An :class:`~kvstrata.storage.eviction.orders.Order`; all calls O(1) a block."""

    __slots__ = ("_duel", "_held", "_latest", "_protected", "_trial")

    def __init__(self, duel: ShareDuel | None = None) -> None:
        self._duel = duel or ShareDuel()
        self._trial: OrderedDict[Block, None] = OrderedDict()
        self._protected: OrderedDict[Block, None] = OrderedDict()
        self._held = 0
        self._latest = 0

    def __len__(self) -> int:
        return len(self._trial) + len(self._protected)

    @property
    def share(self) -> float:
        """What part of the blocks may be protected now."""
        return self._duel.share

    def insert(self, blocks: Sequence[Block], stamp: int) -> None:
        trial = self._trial
        for block in reversed(blocks):
            trial[block] = None
            block.mark = TRIAL
            block.stamp = block.slab.hot = stamp
            block.parked = False
        self._held += len(blocks)
        self._used(blocks, stamp)

    def touch(self, blocks: Sequence[Block], stamp: int) -> None:
        goes_to = PROTECTED if self._duel.share else TRIAL
        target = self._segment(goes_to)
        if goes_to == TRIAL:
            self._settle(len(blocks), stamp)  # before: they are older than what this call uses
        newest = target.move_to_end
        for block in reversed(blocks):
            block.stamp = block.slab.hot = stamp
            block.hits += 1
            if block.parked:
                block.parked = False
                target[block] = None
            elif block.mark == goes_to:
                newest(block)
            else:
                del self._segment(block.mark)[block]
                target[block] = None
            block.mark = goes_to
        self._used(blocks, stamp)

    def _used(self, blocks: Sequence[Block], stamp: int) -> None:
        self._latest = max(self._latest, stamp)
        self._duel.used(blocks, self._held)
        self._settle(len(blocks), stamp)

    def _settle(self, called: int, stamp: int) -> None:
        """Put protected blocks above the share back on trial, some for each of the ``called`` ones."""
        too_many = len(self._protected) - int(self._duel.share * self._held)
        for _ in range(min(too_many, BACK_PER_BLOCK * called)):
            block, _nothing = self._protected.popitem(last=False)
            block.mark = TRIAL
            # As the newest there it counts, next to other shelves, as used just before this call.
            block.stamp = max(block.stamp, stamp - 1)
            block.slab.hot = max(block.slab.hot, block.stamp)
            self._trial[block] = None

    def remove(self, block: Block) -> None:
        if block.parked:
            block.parked = False
        else:
            del self._segment(block.mark)[block]
        block.mark = TRIAL
        self._held -= 1

    def front(self) -> Block | None:
        """On trial first, but for blocks of the latest call: that may need the room which they hold themselves."""
        trial = _front(self._trial)
        if trial is not None and trial.stamp < self._latest:
            return trial
        protected = _front(self._protected)
        if protected is None or (trial is not None and trial.stamp <= protected.stamp):
            return trial
        return protected

    def unpark(self, block: Block) -> None:
        if not block.parked:
            self._held += 1
        self._take_coldest(block)

    def cool(self, block: Block) -> None:
        block.stamp = HINTED
        if not block.parked:
            del self._segment(block.mark)[block]
        block.mark = TRIAL
        self._take_coldest(block)

    def _take_coldest(self, block: Block) -> None:
        segment = self._segment(block.mark)
        block.parked = False
        segment[block] = None
        segment.move_to_end(block, last=False)

    def _segment(self, mark: int) -> OrderedDict[Block, None]:
        return self._protected if mark == PROTECTED else self._trial

    def blocks(self) -> Iterator[Block]:
        return chain(self._trial, self._protected)

    def check(self) -> None:
        assert self._held >= len(self)
        for mark, segment in ((TRIAL, self._trial), (PROTECTED, self._protected)):
            for block in segment:
                assert block.mark == mark and not block.parked and block.state == VISIBLE
                assert block.stamp <= block.slab.hot
        self._duel.check()


def _front(segment: OrderedDict[Block, None]) -> Block | None:
    while segment:
        block = next(iter(segment))
        if not block.leases and not block.children:
            return block
        del segment[block]
        block.parked = True
    return None
