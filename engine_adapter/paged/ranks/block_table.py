"""Which blocks the running requests hold, one table a KV cache group, and where a token's KV goes.

::

    row of a request:   | 7 | 3 | 12 | . . .      block ids in the order of positions
    slot of position p: table[row, p // block_size] * block_size + p % block_size
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.rows import I64

#: The block that stands where attention needs none: its KV stays zero, and nothing is written to it.
NULL_BLOCK = 0


class BlockTable:
    """One group's table, int32 [max_seqs, max_blocks]. A row belongs to one request at a time."""

    def __init__(self, max_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._table: npt.NDArray[np.int32] = np.zeros((max_seqs, max_blocks), np.int32)
        self._lengths: npt.NDArray[np.int64] = np.zeros(max_seqs, np.int64)

    def num_blocks(self, row: int) -> int:
        return int(self._lengths[row])

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a row. O(new blocks)."""
        start = self.num_blocks(row)
        end = start + len(block_ids)
        if end > self.max_blocks:
            raise AssertionError(f"row {row}: {start} + {len(block_ids)} blocks in a table of {self.max_blocks}")
        self._table[row, start:end] = block_ids
        self._lengths[row] = end

    def skip(self, row: int, num_blocks: int) -> None:
        """The first ``num_blocks`` are not read any more, and may be somebody else's by now: the null block."""
        self._table[row, : min(num_blocks, self.num_blocks(row))] = NULL_BLOCK

    def clear(self, row: int) -> None:
        self._lengths[row] = 0

    def blocks(self, row: int, num_tokens: int) -> I64:
        """The block ids that hold the first ``num_tokens`` tokens of a row, int64, a copy."""
        needed = -(-num_tokens // self.block_size)
        if needed > self._lengths[row]:
            raise AssertionError(f"row {row}: {num_tokens} tokens need {needed} blocks and it has {self._lengths[row]}")
        return self._table[row, :needed].astype(np.int64)

    def slot_mapping(self, rows: I64, positions: I64) -> I64:
        """Slots of tokens, int64 [n]: ``rows`` and ``positions`` [n] name them. Vectorised over all requests."""
        indices = positions // self.block_size
        beyond = indices >= self._lengths[rows]
        if beyond.any():
            first = int(np.flatnonzero(beyond)[0])
            row = int(rows[first])
            raise AssertionError(f"row {row}: position {positions[first]} is beyond its {self._lengths[row]} blocks")
        block_ids = self._table[rows, indices].astype(np.int64)
        if (block_ids == NULL_BLOCK).any():
            first = int(np.flatnonzero(block_ids == NULL_BLOCK)[0])
            raise AssertionError(f"row {int(rows[first])}: position {positions[first]} would be written to block 0")
        return block_ids * self.block_size + positions % self.block_size
