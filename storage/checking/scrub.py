"""Blocks of one tier, slab by slab, to be read back: what comes next, and what becomes of what was read. Sans-IO.

A batch is leased while its bytes are read, so that no slot is reused under the reader; the lease says nothing to
the eviction order, since nobody used the blocks. What is not what was stored is withdrawn like any corrupt block, so
that the directory hears of it; on SSD its slot goes to quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.leases import LeaseBook
from kvstrata.storage.records import VISIBLE, Block, Lease
from kvstrata.storage.tiers.moves import TierMoves

#: One batch is at most so much, and at least a block: short under the lock, long enough for a device.
BATCH_BYTES: Final = 1 << 20
BATCH_BLOCKS: Final = 256

_LOADED = int(BlockStatus.LOADED)


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks to read back, leased by ``lease`` of their tier's book until :meth:`Scrub.done`."""

    blocks: list[Block]
    lease: Lease

    @property
    def nbytes(self) -> int:
        return sum(block.shelf.entry.block_bytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Bad:
    """A block that was withdrawn, and why: CORRUPT or READ_ERROR."""

    block: Block
    tier: Tier
    status: BlockStatus


class Scrub:
    """One round over a tier, at most ``limit_bytes`` of it (0: all), from ``start`` (grid, slot) on and round to it.

    Not thread-safe: the node's lock covers it. ``moves`` for the SSD's inventory, None for DRAM.
    """

    def __init__(
        self,
        inventory: Inventory,
        leases: LeaseBook,
        moves: TierMoves | None = None,
        *,
        limit_bytes: int = 0,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.blocks = self.bytes = 0  #: taken so far
        self.next_start = start  #: where the next round is to begin
        self._inventory = inventory
        self._leases = leases
        self._moves = moves
        self._limit = limit_bytes
        self._batches = self._all(start)

    @property
    def tier(self) -> Tier:
        return self._inventory.tier

    def take(self, now: float) -> Batch | None:
        """The next blocks to read, leased; None when the round is over."""
        self._inventory.now = now
        blocks = next(self._batches, None)
        return Batch(blocks, self._leases.hold(blocks, now)) if blocks else None

    def _all(self, start: tuple[int, int]) -> Iterator[list[Block]]:
        grids = self._inventory.arena.slabs
        first, slot = start
        yield from self._of_grid(grids[first], slot, None)
        for step in range(1, len(grids)):
            yield from self._of_grid(grids[(first + step) % len(grids)], 0, None)
        yield from self._of_grid(grids[first], 0, slot)

    def _of_grid(self, grid: SlotGrid, low: int, high: int | None) -> Iterator[list[Block]]:
        """What is visible in slots from ``low`` to before ``high``, in their order: neighbours are read together."""
        batch: list[Block] = []
        nbytes = 0
        for slot in sorted(grid.blocks):
            if slot < low or (high is not None and slot >= high):
                continue
            if self._limit and self.bytes + nbytes >= self._limit:
                break
            # Looked up now and not before: other things happened between batches.
            block = grid.blocks.get(slot)
            if block is None or not _stands(block):
                continue
            batch.append(block)
            nbytes += block.shelf.entry.block_bytes
            self.next_start = grid.index, slot + 1
            if nbytes >= BATCH_BYTES or len(batch) >= BATCH_BLOCKS:
                yield self._counted(batch, nbytes)
                batch, nbytes = [], 0
        if batch:
            yield self._counted(batch, nbytes)

    def _counted(self, batch: list[Block], nbytes: int) -> list[Block]:
        self.blocks += len(batch)
        self.bytes += nbytes
        return batch

    def done(self, batch: Batch, statuses: Sequence[int], now: float) -> list[Bad]:
        """What reading came to, LOADED for what is right; returns what was withdrawn for it.

        A block that was removed, dropped or outdated meanwhile is nobody's business any more. UNKNOWN: not read.
        """
        self._inventory.now = now
        bad: list[Bad] = []
        counts = self._inventory.counts
        for block, status in zip(batch.blocks, statuses, strict=True):
            if status == BlockStatus.UNKNOWN:
                continue
            counts.scrubbed += 1
            counts.scrubbed_bytes += block.shelf.entry.block_bytes
            if status != _LOADED and _stands(block):
                bad.append(Bad(block, self.tier, BlockStatus(status)))
                self._withdraw(block, status, now)
        counts.scrub_corrupt += len(bad)
        self._leases.end(batch.lease)
        return bad

    def _withdraw(self, block: Block, status: int, now: float) -> None:
        if self._moves is not None:
            self._moves.gone_bad(block, status, now)
        else:
            self._inventory.withdraw(block, "its bytes changed in memory", Departure.CORRUPT)


def _stands(block: Block) -> bool:
    return block.state == VISIBLE and not block.shelf.retired
