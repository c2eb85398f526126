"""Where the bytes of blocks lie, as pieces for a gather or scatter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.base import Mask
from kvstrata.transfer.regions import BlockView, Region

Int64s = npt.NDArray[np.int64]


def packed(blocks: BlockView) -> tuple[Int64s, Int64s]:
    """(address, length), i64[m] each, of all pieces in order, neighbours that touch joined."""
    address = (blocks.table[:, :, 0] + blocks.region.address).ravel()
    length = blocks.table[:, :, 1].ravel()
    if len(length) < 2:
        return address, length
    starts = np.flatnonzero(np.concatenate(([True], address[1:] != address[:-1] + length[:-1])))
    return address[starts], np.add.reduceat(length, starts)


def cut(blocks: BlockView, low: int, high: int) -> BlockView:
    """Bytes ``low`` to ``high`` of each block. Pieces outside are left out; where blocks differ in how they are cut,
    some have pieces of no bytes."""
    length = blocks.table[:, :, 1]
    stop = np.cumsum(length, axis=1)
    start = stop - length
    first, last = np.maximum(start, low), np.minimum(stop, high)
    kept = ((last - first) > 0).any(axis=0)
    table = np.empty((len(blocks), int(np.count_nonzero(kept)), 2), np.int64)
    table[:, :, 0] = (blocks.table[:, :, 0] + first - start)[:, kept]
    table[:, :, 1] = np.maximum(last - first, 0)[:, kept]
    return BlockView(blocks.region, table, high - low, blocks.after)


def by_range(region: Region, count: int, ends: Sequence[int]) -> BlockView:
    """``count`` blocks at the start of a region, a piece for each range: range k of all blocks, then range k + 1."""
    table = np.empty((count, len(ends), 2), np.int64)
    low = 0
    for k, high in enumerate(ends):
        table[:, k, 0] = count * low + np.arange(count, dtype=np.int64) * (high - low)
        table[:, k, 1] = high - low
        low = high
    return BlockView(region, table, int(ends[-1]))


def whole_blocks(region: Region, count: int, block_bytes: int) -> BlockView:
    """``count`` blocks at the start of a region, one after the other."""
    table = np.empty((count, 1, 2), np.int64)
    table[:, 0, 0] = np.arange(count, dtype=np.int64) * block_bytes
    table[:, 0, 1] = block_bytes
    return BlockView(region, table, block_bytes)


def runs(mask: Mask) -> Iterator[tuple[int, int]]:
    """(first, past the last) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
