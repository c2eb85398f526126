"""Copies of many small pieces that lie in a grid: blocks of equal pieces, a fixed stride apart on each side.

A block of a paged KV cache is one piece a layer and K or V. Copied one by one, pieces of some KiB cost more in
calls (and in handing the interpreter's lock to and fro) than in bytes; as one strided array a block is one call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

#: Pieces of this size and more are as quick one by one.
PIECE_BYTES_MAX: Final = 64 << 10
PIECES_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """``blocks`` blocks of ``pieces`` pieces of ``piece_bytes``. ``target`` and ``source``: address of each
    block's first piece, i64[blocks]; the strides are from piece to piece, in bytes, positive."""

    target: Int64s
    source: Int64s
    target_stride: int
    source_stride: int
    pieces: int
    piece_bytes: int

    @classmethod
    def found_in(
        cls, target: Int64s, source: Int64s, length: Int64s, piece_bytes_max: int = PIECE_BYTES_MAX
    ) -> Grid | None:
        """The grid that these pieces (i64[n] each) make, or None. O(n) in C."""
        count = len(length)
        if count < PIECES_MIN or int(length[0]) >= piece_bytes_max or bool((length != length[0]).any()):
            return None
        along_target, along_source = np.diff(target), np.diff(source)
        strides = int(along_target[0]), int(along_source[0])
        if min(strides) < int(length[0]):
            return None
        turns = (along_target != strides[0]) | (along_source != strides[1])
        pieces = int(turns.argmax()) + 1 if turns.any() else count
        if pieces < 2 or count % pieces:
            return None
        inside = np.ones(count, np.bool_)
        inside[pieces - 1 :: pieces] = False  # the step from a block to the next may be anything
        if bool(turns[inside[:-1]].any()):
            return None
        return cls(target[::pieces], source[::pieces], *strides, pieces, int(length[0]))

    def halves(self) -> tuple[Grid, Grid]:
        """The same work in two parts of about the same size."""
        middle = len(self.target) // 2
        return self._part(slice(None, middle)), self._part(slice(middle, None))

    def _part(self, which: slice) -> Grid:
        strides = self.target_stride, self.source_stride
        return Grid(self.target[which], self.source[which], *strides, self.pieces, self.piece_bytes)

    def copy(self) -> None:
        """Copy every piece. The caller vouches for every address."""
        to, rows = self._windows(self.target, self.target_stride)
        origin, lines = self._windows(self.source, self.source_stride)
        for row, line in zip(rows, lines, strict=True):
            to[row] = origin[line]

    def _windows(self, first: Int64s, stride: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
        """u8[any, pieces, piece_bytes] over the memory, overlapping, and the row at which each block lies in it."""
        base = int(first.min()) if len(first) else 0
        apart = first - base
        unit = int(np.gcd.reduce(apart)) or 1
        reach = int(apart.max()) if len(first) else 0
        span = reach + stride * (self.pieces - 1) + self.piece_bytes
        memory = memoryview((ctypes.c_uint8 * span).from_address(base))
        shape = (reach // unit + 1, self.pieces, self.piece_bytes)
        windows: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, memory, strides=(unit, stride, 1))
        rows: list[int] = (apart // unit).tolist()
        return windows, rows
