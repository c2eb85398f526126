"""One table of the shared index, as the node writes it."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstrata.storage.serving.index_memory import IndexMemory
from kvstrata.transfer.index_layout import BUCKET_BYTES, BUCKET_ROWS, ROW_WORDS, U64s

DIGEST: Final = ROW_WORDS - 1
#: Of a bucket's bits: how many are set, and the lowest that is not.
COUNT: Final = bytes(bits.bit_count() for bits in range(1 << BUCKET_ROWS))
_FREE: Final = bytes((~bits & bits + 1).bit_length() - 1 for bits in range(1 << BUCKET_ROWS))
assert BUCKET_ROWS == 8


class Table:
    """Tags and rows of one piece of memory, as words."""

    def __init__(self, memory: IndexMemory) -> None:
        self.memory = memory
        self.buckets = memory.nbytes // BUCKET_BYTES
        self.mask = self.buckets - 1
        self.rows_at = 8 * BUCKET_ROWS * self.buckets
        self.bytes = memory.view
        self.tags = memory.view[: self.rows_at].cast("Q")
        self.words = memory.view[self.rows_at :].cast("Q")
        self.taken = bytearray(self.buckets)  #: a bit for each row of a bucket

    def take(self, spread: int) -> int:
        """An empty row of the emptier of two buckets, which is taken from here on; -1 when both are full."""
        taken, bucket, other = self.taken, spread & self.mask, spread >> 32 & self.mask
        if COUNT[taken[other]] < COUNT[taken[bucket]]:
            bucket = other
        rows = taken[bucket]
        free = _FREE[rows]
        if free == BUCKET_ROWS:
            return -1
        taken[bucket] = rows | 1 << free
        return bucket * BUCKET_ROWS + free

    def give_back(self, row: int) -> None:
        """The row is empty."""
        self.words[row * ROW_WORDS + DIGEST] = 0
        self.tags[row] = 0
        self.taken[row >> 3] ^= 1 << (row & 7)

    def write(self, rows: list[int], words: U64s, tags: U64s) -> None:
        """Rows that were taken, and then their tags."""
        np.frombuffer(self.words, np.uint64).reshape(-1, ROW_WORDS)[rows] = words
        np.frombuffer(self.tags, np.uint64)[rows] = tags

    def close(self) -> None:
        self.tags.release()
        self.words.release()
        self.memory.close()
