"""What clients on this host may read without asking: an index of the readable DRAM blocks in shared memory.

The layout is :mod:`kvstrata.transfer.index_layout`'s. Nothing here waits for a reader, and no reader holds anything
up: what a reader has found counts only if it stands unchanged after its copy. So the inventory takes a block's row
away before the block's slot may be given to another, and a shelf's scope word before anybody is told that the shelf
is gone. What finds no place in its two buckets is not in the index, and is read by asking for it.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from kvstrata.proto.logs import get_logger
from kvstrata.storage.records import VISIBLE, Block, Shelf
from kvstrata.storage.sealed_memory import SealedMemory
from kvstrata.transfer import index_layout as layout
from kvstrata.transfer.index_layout import BUCKET_BYTES, BUCKET_ROWS, BUCKET_TAGS, ROW, ROW_WORDS

log = get_logger(__name__)

#: The first table has two rows for each block of this size that the arena could hold, and at least so many buckets.
BLOCK_BYTES_FIRST: Final = 128 << 10
BUCKETS_MIN: Final = 64
#: All tables together take at most this part of the arena's bytes.
ARENA_SHARE: Final = 32
#: Another table is made when this part of all rows is taken.
FULL: Final = 0.5

_TABLE_BITS: Final = 4
_DIGEST: Final = ROW_WORDS - 1
assert layout.TABLES_MAX <= 1 << _TABLE_BITS


class IndexMemory(Protocol):
    """Zeroed memory of the index. ``share_fd`` is -1 where it cannot be handed out."""

    view: memoryview
    share_fd: int
    nbytes: int

    def close(self) -> None: ...


class PrivateMemory:
    """Of this process alone: for state that no client maps."""

    share_fd = -1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._mapping)

    def close(self) -> None:
        self.view.release()
        self._mapping.close()


def shared_memory(nbytes: int) -> SealedMemory:
    """Of a memfd that clients map. Its pages come as they are used. Raises :class:`OSError`."""
    return SealedMemory("kvstrata-index", nbytes, populate=False)


class _Table:
    """Tags and rows of one piece of memory, as words."""

    def __init__(self, memory: IndexMemory) -> None:
        self.memory = memory
        self.buckets = memory.nbytes // BUCKET_BYTES
        self.mask = self.buckets - 1
        self.rows_at = 8 * BUCKET_ROWS * self.buckets
        self.bytes = memory.view
        self.tags = memory.view[: self.rows_at].cast("Q")
        self.words = memory.view[self.rows_at :].cast("Q")

    def free_row(self, first: int, second: int) -> int:
        """An empty row of the emptier of two buckets; -1 when both are full."""
        first, second = first & self.mask, second & self.mask
        here = BUCKET_TAGS.unpack_from(self.bytes, first * BUCKET_TAGS.size)
        there = BUCKET_TAGS.unpack_from(self.bytes, second * BUCKET_TAGS.size)
        if there.count(0) > here.count(0):
            first, here = second, there
        return first * BUCKET_ROWS + here.index(0) if 0 in here else -1

    def close(self) -> None:
        self.tags.release()
        self.words.release()
        self.memory.close()


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
        self.tables: list[_Table] = []
        self.rows = 0  #: that there are
        self.blocks = 0  #: rows that are taken
        self.crowded = 0  #: blocks that found no place
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
            self.crowded += len(blocks)
            return
        if self.blocks + len(blocks) > FULL * self.rows:
            self._grow()
        pack, spread, digest = ROW.pack_into, layout.spread, layout.digest
        keys = layout.keys_of(b"".join([block.hash for block in blocks]), shelf.entry.width).tolist()
        for block, (low, high) in zip(blocks, keys, strict=True):
            tag, first, second = spread(low, high, scope)
            for number in range(len(self.tables) - 1, -1, -1):
                table = self.tables[number]
                row = table.free_row(first, second)
                if row >= 0:
                    break
            else:
                self.crowded += 1
                continue
            slab, slot, generation, checksum = block.slab, block.slot, block.generation, block.checksum
            offset = slab.data_offset + slot * slab.slot_bytes
            mixed = digest(low, high, slab.index | slot << 32, offset, generation, checksum, scope)
            at = table.rows_at + row * ROW.size
            pack(table.bytes, at, low, high, slab.index, slot, offset, generation, checksum, scope, mixed)
            table.tags[row] = tag
            block.place = row << _TABLE_BITS | number
            self.blocks += 1

    def withdraw(self, block: Block) -> None:
        """Before the block's slot may go to another; nothing when it is not in the index."""
        place = block.place
        if place >= 0:
            table, row = self.tables[place & (1 << _TABLE_BITS) - 1], place >> _TABLE_BITS
            table.words[row * ROW_WORDS + _DIGEST] = 0
            table.tags[row] = 0
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
        self.tables.append(_Table(memory))
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
        taken = sum(tag != 0 for table in self.tables for tag in table.tags)
        assert taken == self.blocks, f"{taken} tags for {self.blocks} rows"
        for place, block in named.items():
            self._check_row(self.tables[place & (1 << _TABLE_BITS) - 1], place >> _TABLE_BITS, block)
        used = self._words[layout.HEAD_WORDS : layout.HEAD_WORDS + self._scopes_used]
        scopes = [word for word in used if word]
        assert len(scopes) == self._scopes_used - len(self._scopes_free), "scope words are lost"

    def _check_row(self, table: _Table, row: int, block: Block) -> None:
        shelf = block.shelf
        fields = ROW.unpack_from(table.bytes, table.rows_at + row * ROW.size)
        low, high, slab, slot, offset, generation, checksum, scope, mixed = fields
        assert (low, high) == layout.key_of(block.hash) and (scope == shelf.scope or shelf.retired)
        assert (slab, slot, offset) == (block.slab.index, block.slot, block.offset)
        assert (generation, checksum) == (block.generation, block.checksum)
        assert mixed == layout.digest(low, high, slab | slot << 32, offset, generation, checksum, scope)
        tag, *buckets = layout.spread(low, high, scope)
        assert table.tags[row] == tag and row // BUCKET_ROWS in [number & table.mask for number in buckets]
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
