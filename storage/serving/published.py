"""What clients on this host may read without asking: an index of the readable DRAM blocks in shared memory.

The layout is :mod:`kvstrata.transfer.index_layout`'s. Nothing here waits for a reader, and no reader holds anything
up: what a reader has found counts only if it stands unchanged after its copy. So the inventory takes a block's row
away before the block's slot may be given to another, and a shelf's scope word before anybody is told that the shelf
is gone. What finds no place in its two buckets is not in the index, and is read by asking for it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from kvstrata.proto.logs import get_logger
from kvstrata.storage.records import VISIBLE, Block, Shelf
from kvstrata.storage.serving.index_memory import IndexMemory, PrivateMemory
from kvstrata.storage.serving.index_table import COUNT, DIGEST, Table
from kvstrata.transfer import index_layout as layout
from kvstrata.transfer.index_layout import BUCKET_BYTES, BUCKET_ROWS, ROW, ROW_WORDS

log = get_logger(__name__)

#: The first table has two rows for each block of this size that the arena could hold, and at least so many buckets.
BLOCK_BYTES_FIRST: Final = 128 << 10
BUCKETS_MIN: Final = 64
#: All tables together take at most this part of the arena's bytes.
ARENA_SHARE: Final = 32
#: Another table is made when this part of all rows is taken.
FULL: Final = 0.5
#: Fewer blocks than this are entered one by one: arrays take some time to begin.
FEW: Final = 16

_TABLE_BITS: Final = 4
assert layout.TABLES_MAX <= 1 << _TABLE_BITS


class Published:
    """Not thread-safe: the lock of the inventory's owner covers it. ``incarnation`` is the node's, ``arena_bytes``
    those of the DRAM that it is about."""

    def __init__(
        self, incarnation: int, arena_bytes: int, allocate: Callable[[int], IndexMemory] = PrivateMemory
    ) -> None:
        self._allocate = allocate
        self._bytes_max = arena_bytes // ARENA_SHARE
        self._first_buckets = _power_of_two(2 * arena_bytes // BLOCK_BYTES_FIRST // BUCKET_ROWS)
        self._head = allocate(layout.HEAD_BYTES)
        self._words = self._head.view.cast("Q")
        self.tables: list[Table] = []
        self.rows = 0  #: that there are
        self.blocks = 0  #: rows that are taken
        self._grows = True
        self._scopes_free: list[int] = []
        self._scopes_used = 0
        self._scopes_given = 0
        self._words[layout.WORD_MAGIC] = layout.MAGIC
        self._words[layout.WORD_LAYOUT] = layout.LAYOUT
        self._words[layout.WORD_INCARNATION] = incarnation
        self._words[layout.WORD_SERVING] = 1

    @property
    def memories(self) -> list[IndexMemory]:
        """The head's, then each table's."""
        return [self._head, *(table.memory for table in self.tables)]

    @property
    def nbytes(self) -> int:
        """Of all tables, most of them never touched."""
        return self.rows * BUCKET_BYTES // BUCKET_ROWS

    def beat(self, now_ns: int) -> None:
        """The node is at work at ``now_ns`` of CLOCK_MONOTONIC: it is believed for a moment from then on."""
        self._words[layout.WORD_BEAT] = now_ns

    def stop(self) -> None:
        """Nobody reads by the index from here on."""
        self._words[layout.WORD_SERVING] = 0

    # ------------------------------------------------------------------ blocks

    def publish(self, shelf: Shelf, blocks: Sequence[Block]) -> None:
        """Blocks of a shelf are readable from here on."""
        scope = shelf.scope or self._begin(shelf)
        if not scope:
            return
        if self.blocks + len(blocks) > FULL * self.rows:
            self._grow()
        if len(blocks) < FEW:
            for block in blocks:
                self._enter(block, scope)
        else:
            self._enter_all(blocks, shelf.entry.width, scope)

    def _place(self, spread: int) -> tuple[int, int] | None:
        """An empty row of the newest table that has one: (table, row)."""
        for number in range(len(self.tables) - 1, -1, -1):
            row = self.tables[number].take(spread)
            if row >= 0:
                self.blocks += 1
                return number, row
        return None

    def _enter(self, block: Block, scope: int) -> None:
        low, high = layout.key_of(block.hash)
        spread = layout.spread(low, high, scope)
        found = self._place(spread)
        if found is None:
            return
        number, row = found
        table, block.place = self.tables[number], row << _TABLE_BITS | number
        slab, slot, generation, checksum = block.slab.index, block.slot, block.generation, block.checksum
        offset = block.offset
        mixed = layout.digest(low, high, slab | slot << 32, offset, generation, checksum, scope)
        at = table.rows_at + row * ROW.size
        ROW.pack_into(table.bytes, at, low, high, slab, slot, offset, generation, checksum, scope, mixed)
        table.tags[row] = spread | 1

    def _enter_all(self, blocks: Sequence[Block], width: int, scope: int) -> None:
        """:meth:`_enter` of many, by arrays."""
        rows = np.empty((len(blocks), ROW_WORDS), np.uint64)
        keys = rows[:, :2] = layout.keys_of(b"".join([block.hash for block in blocks]), width)
        rows[:, 2] = np.frombuffer(array("Q", [block.slab.index | block.slot << 32 for block in blocks]), np.uint64)
        rows[:, 3] = np.frombuffer(array("Q", [block.offset for block in blocks]), np.uint64)
        rows[:, 4] = np.frombuffer(array("Q", [block.generation for block in blocks]), np.uint64)
        rows[:, 5] = np.frombuffer(array("Q", [block.checksum for block in blocks]), np.uint64)
        rows[:, 6] = scope
        rows[:, DIGEST] = layout.digests_of(rows)
        spread = layout.spread_all(keys, scope)
        taken: dict[int, tuple[list[int], list[int]]] = {}  # table -> its rows, and the blocks that they are for
        for at, (block, each) in enumerate(zip(blocks, spread.tolist(), strict=True)):
            found = self._place(each)
            if found is not None:
                number, row = found
                block.place = row << _TABLE_BITS | number
                here = taken.get(number)
                if here is None:
                    here = taken[number] = ([], [])
                here[0].append(row)
                here[1].append(at)
        for number, (into, of) in taken.items():
            self.tables[number].write(into, rows[of], spread[of] | np.uint64(1))

    def withdraw(self, block: Block) -> None:
        """Before the block's slot may go to another; nothing when it is not in the index."""
        place = block.place
        if place >= 0:
            table, row = self.tables[place & (1 << _TABLE_BITS) - 1], place >> _TABLE_BITS
            table.give_back(row)
            block.place = -1
            self.blocks -= 1

    def withdraw_all(self, blocks: Iterable[Block]) -> None:
        """:meth:`withdraw` of each."""
        for block in blocks:
            self.withdraw(block)

    def _grow(self) -> None:
        """As many rows again, if there may be; what is there stays where it is."""
        if not self._grows:
            return
        buckets = self.rows // BUCKET_ROWS or self._first_buckets
        if len(self.tables) == layout.TABLES_MAX or (
            self.rows and self.nbytes + buckets * BUCKET_BYTES > self._bytes_max
        ):
            self._grows = False
            return
        try:
            memory = self._allocate(buckets * BUCKET_BYTES)
        except OSError as error:
            self._grows = False
            log.warning("the shared index stays as it is", rows=self.rows, reason=error.strerror or str(error))
            return
        self.tables.append(Table(memory))
        self.rows += buckets * BUCKET_ROWS
        self._words[layout.WORD_TABLES] = len(self.tables)

    # ------------------------------------------------------------------ scopes

    def _begin(self, shelf: Shelf) -> int:
        """A number for the shelf, 0 when all words are taken."""
        if self._scopes_free:
            index = heapq.heappop(self._scopes_free)
        elif self._scopes_used < layout.SCOPES:
            index = self._scopes_used
            self._scopes_used += 1
        else:
            return 0
        self._scopes_given += 1
        scope = shelf.scope = self._scopes_given << layout.SCOPE_BITS | index
        self._words[layout.HEAD_WORDS + index] = scope
        return scope

    def end(self, shelf: Shelf) -> None:
        """No row of the shelf counts from here on. O(1)."""
        scope = shelf.scope
        if scope:
            index = scope & layout.SCOPES - 1
            self._words[layout.HEAD_WORDS + index] = 0
            shelf.scope = 0
            heapq.heappush(self._scopes_free, index)

    # ------------------------------------------------------------------ what there is

    def check(self, blocks: Iterable[Block]) -> None:
        """Assert that the rows are those of the visible blocks among all that have a slot, and that they can be
        found. O(rows)."""
        named = {}
        for block in blocks:
            assert block.place < 0 or block.state == VISIBLE, "a block that is not visible is in the index"
            if block.place >= 0:
                assert block.place not in named, "two blocks share a row"
                named[block.place] = block
        assert len(named) == self.blocks, f"{self.blocks} rows counted, {len(named)} named"
        for table in self.tables:
            tags = np.frombuffer(table.tags, np.uint64).reshape(-1, BUCKET_ROWS) != 0
            taken = np.packbits(tags, axis=1, bitorder="little").tobytes()
            assert taken == table.taken, "rows that are taken have no tag, or others have one"
        assert sum(COUNT[each] for table in self.tables for each in table.taken) == self.blocks, "a row of no block"
        for place, block in named.items():
            self._check_row(self.tables[place & (1 << _TABLE_BITS) - 1], place >> _TABLE_BITS, block)
        used = self._words[layout.HEAD_WORDS : layout.HEAD_WORDS + self._scopes_used]
        scopes = [word for word in used if word]
        assert len(scopes) == self._scopes_used - len(self._scopes_free), "scope words are lost"

    def _check_row(self, table: Table, row: int, block: Block) -> None:
        shelf = block.shelf
        fields = ROW.unpack_from(table.bytes, table.rows_at + row * ROW.size)
        low, high, slab, slot, offset, generation, checksum, scope, mixed = fields
        assert (low, high) == layout.key_of(block.hash) and (scope == shelf.scope or shelf.retired)
        assert (slab, slot, offset) == (block.slab.index, block.slot, block.offset)
        assert (generation, checksum) == (block.generation, block.checksum)
        assert mixed == layout.digest(low, high, slab | slot << 32, offset, generation, checksum, scope)
        spread = layout.spread(low, high, scope)
        buckets = (spread & table.mask, spread >> 32 & table.mask)
        assert table.tags[row] == spread | 1 and row // BUCKET_ROWS in buckets, "a block that is not found"
        if not shelf.retired:
            assert self._words[layout.HEAD_WORDS + (scope & layout.SCOPES - 1)] == scope, "a shelf's scope is another's"

    def close(self) -> None:
        """Give the memory back; clients keep their maps of it. Safe twice."""
        for table in self.tables:
            table.close()
        self._words.release()
        self._head.close()


def _power_of_two(buckets: int) -> int:
    return max(BUCKETS_MIN, 1 << max(0, buckets - 1).bit_length())
