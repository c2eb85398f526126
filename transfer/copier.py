"""Host-to-host copies of many pieces: contiguous runs merged, big jobs split over two threads while there is a core
for the second one.

``ctypes.memmove`` releases the GIL. One large copy runs much faster than the same bytes in 2 MiB
pieces (the C library switches to non-temporal stores above a threshold), hence the merging. Halves may miss that
threshold, so that they cost more CPU time than the whole: they pay only where both run at once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.grids import Grid
from kvstrata.transfer.regions import BlockView
from kvstrata.transfer.two_threads import run_both, worth_it

Int64s = npt.NDArray[np.int64]

#: Below this, handing half of the work to another thread costs more than it saves.
SPLIT_BYTES: Final = 4 << 20

_memmove = ctypes.memmove


def merge_runs(target: Int64s, source: Int64s, length: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Join neighbours that are contiguous on both sides. All arrays i64[n]; order is kept."""
    if len(length) < 2:
        return target, source, length
    apart = (target[1:] != target[:-1] + length[:-1]) | (source[1:] != source[:-1] + length[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return target[starts], source[starts], np.add.reduceat(length, starts)


def copy(target: Int64s, source: Int64s, length: Int64s) -> None:
    """Copy ``length[i]`` bytes from address ``source[i]`` to ``target[i]``.

    The caller vouches for every address. Returns when all bytes are in place.
    """
    target, source, length = merge_runs(target, source, length)
    total = int(length.sum())
    whole = total < SPLIT_BYTES or not worth_it()
    grid = Grid.found_in(target, source, length)
    if grid is not None:
        _copy_grid(grid, whole or len(grid.target) < 2)
        return
    if whole:
        _copy_each(target, source, length)
        return
    first, second = halves(target, source, length, total // 2)
    run_both(partial(_copy_each, *first), partial(_copy_each, *second))


def _copy_grid(grid: Grid, whole: bool) -> None:
    if whole:
        grid.copy()
        return
    first, second = grid.halves()
    run_both(first.copy, second.copy)


def _copy_each(target: Int64s, source: Int64s, length: Int64s) -> None:
    for to, origin, count in zip(target.tolist(), source.tolist(), length.tolist(), strict=True):
        _memmove(to, origin, count)


def halves(
    target: Int64s, source: Int64s, length: Int64s, middle: int
) -> tuple[tuple[Int64s, Int64s, Int64s], tuple[Int64s, Int64s, Int64s]]:
    """Split work of more than ``middle`` bytes there, cutting the run it falls in at a page."""
    ends = np.cumsum(length)
    at = int(np.searchsorted(ends, middle, side="left"))
    inside = (middle - (int(ends[at]) - int(length[at]))) & ~4095
    head = (target[: at + 1], source[: at + 1], length[: at + 1].copy())
    head[2][-1] = inside
    tail = (target[at:].copy(), source[at:].copy(), length[at:].copy())
    tail[0][0] += inside
    tail[1][0] += inside
    tail[2][0] -= inside
    return head, tail


def copy_one(target: int, source: int, length: int) -> None:
    """Copy one piece; large ones are split as in :func:`copy`."""
    if length < SPLIT_BYTES:
        _memmove(target, source, length)
    else:
        copy(np.array([target]), np.array([source]), np.array([length]))


def copy_few(pairs: Iterable[tuple[int, int]], nbytes: int) -> None:
    """Copy ``nbytes`` from each pair's second address to its first, in order; what is contiguous on both sides at once.

    For a handful of pairs, of which arrays would cost more than they save. The caller vouches for every address.
    """
    target = source = length = 0
    for to, origin in pairs:
        if origin - source == to - target == length:
            length += nbytes
            continue
        if length:
            copy_one(target, source, length)
        target, source, length = to, origin, nbytes
    if length:
        copy_one(target, source, length)


def copy_into(blocks: BlockView, source: Int64s) -> None:
    """Scatter: block i of the view receives ``block_bytes`` bytes from address ``source[i]``."""
    target, length = _pieces(blocks)
    copy(target, _spread(source, blocks), length)


def copy_range(blocks: BlockView, source: Int64s) -> None:
    """As :func:`copy_into`, for a few pieces of many blocks: from block to block they often lie a fixed stride apart.

    A range is then one copy or two, and not one a block; a caller beside a busy thread hardly needs the interpreter.
    """
    target, length = _pieces(blocks)
    spread, shape = _spread(source, blocks), (len(blocks), blocks.pieces)
    to, origin, sizes = (array.reshape(shape).T.ravel() for array in (target, spread, length))
    grid = Grid.found_in(to, origin, sizes, piece_bytes_max=sys.maxsize)
    if grid is not None and grid.pieces >= blocks.pieces:
        grid.copy()
    else:
        copy(target, spread, length)


def copy_between(target: BlockView, blocks: BlockView) -> None:
    """Gather ``blocks`` into ``target``, whose blocks are in one piece each."""
    assert target.pieces == 1
    source, length = _pieces(blocks)
    copy(_spread(target.table[:, 0, 0] + target.region.address, blocks), source, length)


def _pieces(blocks: BlockView) -> tuple[Int64s, Int64s]:
    return (blocks.table[:, :, 0] + blocks.region.address).ravel(), blocks.table[:, :, 1].ravel()


def _spread(base: Int64s, blocks: BlockView) -> Int64s:
    """Address of each piece in a contiguous image of each block, i64[n * pieces]."""
    if blocks.pieces == 1:
        return base
    lengths = blocks.table[:, :, 1]
    return (base[:, None] + np.cumsum(lengths, axis=1) - lengths).ravel()
