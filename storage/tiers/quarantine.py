"""Slots of an SSD that gave back what was not written to them: kept from reuse for a while, still charged.

A bad sector would only spoil the next block, and whoever looks into it finds the bytes as they were read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

from kvstrata.storage.leases import LeaseBook
from kvstrata.storage.records import Block, Lease, Shelf

QUARANTINE_S: Final = 600.0
#: Past this many slots the oldest goes back into use, however young.
QUARANTINE_BLOCKS: Final = 256


class Quarantine:
    """Not thread-safe: the node's lock covers it."""

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self._held: deque[tuple[float, Lease]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, block: Block, now: float) -> None:
        """Hold the block's slot. Call before the block is withdrawn."""
        self._held.append((now + QUARANTINE_S, self._leases.hold([block], now)))
        if len(self._held) > QUARANTINE_BLOCKS:
            self._leases.end(self._held.popleft()[1])

    def let_go(self, shelves: Collection[Shelf]) -> None:
        """Blocks of these shelves have gone as a whole: their slots are somebody else's business."""
        if not shelves:
            return
        held, self._held = self._held, deque()
        for until, lease in held:
            if lease.blocks[0].shelf in shelves:
                self._leases.end(lease)
            else:
                self._held.append((until, lease))

    def expire(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            self._leases.end(self._held.popleft()[1])

    def check(self) -> None:
        assert len(self._held) <= QUARANTINE_BLOCKS
        assert all(block.leases for _, lease in self._held for block in lease.blocks)
