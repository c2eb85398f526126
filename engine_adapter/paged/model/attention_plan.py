"""Which query tiles of a step meet which key segments: made once a step and group, used by each of its layers.

A query tile is ``TILE`` positions of one request, from a multiple of ``TILE``. A segment is ``SEGMENT`` positions
of a context, from a multiple of ``SEGMENT``. One meeting of the two is a pair of products of one shape whatever
the step was made of, which is what makes attention's bits a matter of positions alone::

                segment 0   segment 1   segment 2
    tile 0       masked        -           -            -        not computed: nothing there to see
    tile 16      all         masked        -            all      every row sees the whole segment
    tile 17      all         masked        -            masked   some rows do not: hidden scores become -inf
    tile 32      all          all        masked

Computing a meeting that is wholly hidden changes nothing (its weight is exactly 0), so meetings are put together
as is convenient: many tiles with one segment for prefill, one tile with many segments for decode, and the tiles
of all requests with the segments of a common prefix.

Planning is done on the host; the arrays of a plan are where the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.arrays import HOST, I64, Arrays
from kvstrata.engine_adapter.paged.model.rows import TILE, Batch

SEGMENT: Final = 256
#: Meetings computed together: enough to pay for a call, few enough that their scores stay in the CPU's cache.
MEETINGS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Meeting:
    """Tiles ``first`` to ``end`` with all segments of the gather it belongs to.

    ``hidden``: (index of the segment in the gather, [tiles, 1, TILE, 1, SEGMENT] true where a row must not look).
    """

    first: int
    end: int
    hidden: tuple[tuple[int, npt.NDArray[np.bool_]], ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values of some adjacent segments of one context, and who meets them.

    ``slots`` [segments * SEGMENT]: where they are in the cache; those outside ``valid_from`` to ``valid_to`` are
    not computed or no longer held, and stand for zeros.
    """

    slots: I64
    valid_from: int
    valid_to: int
    meetings: tuple[Meeting, ...]

    @property
    def segments(self) -> int:
        return len(self.slots) // SEGMENT


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``rows`` [n]: where each token's query lies in [num_tiles * TILE]. ``gathers``: ascending by segment for
    each tile."""

    rows: I64
    num_tiles: int
    gathers: tuple[Gather, ...]


def plan_attention(
    batch: Batch, group: int, block_size: int, sliding_window: int, arrays: Arrays = HOST
) -> AttentionPlan:
    """Plan one group's attention; ``sliding_window`` 0 is full attention. O(tokens + meetings on a mask's edge)."""
    return _Planner(batch, group, block_size, sliding_window, arrays).plan()


class _Planner:
    def __init__(self, batch: Batch, group: int, block_size: int, sliding_window: int, arrays: Arrays) -> None:
        self._group = batch.groups[group]
        self._positions = batch.positions
        self._spans = batch.spans
        self._block_size = block_size
        self._window = sliding_window
        self._arrays = arrays
        self._starts, self._ends = batch.context_starts, batch.context_ends
        tiles = [
            np.arange(start // TILE, (end - 1) // TILE + 1) * TILE
            for start, end in zip(self._starts, self._ends, strict=True)
        ]
        counts = [len(part) for part in tiles]
        #: First position of every tile; tiles of request r are _firsts[r] to _firsts[r + 1].
        self._tile_starts: I64 = np.concatenate(tiles) if tiles else np.empty(0, np.int64)
        self._firsts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()

    def plan(self) -> AttentionPlan:
        rows = np.empty(len(self._positions), np.int64)
        for request, (start, end) in enumerate(self._spans):
            offset = self._firsts[request] * TILE - self._starts[request] // TILE * TILE
            rows[start:end] = self._positions[start:end] + offset
        return AttentionPlan(self._arrays.to_device(rows), len(self._tile_starts), tuple(self._gathers()))

    def _gathers(self) -> Iterator[Gather]:
        common = self._common_segments()
        every = len(self._tile_starts)
        if common:
            start = min(self._starts)
            for low, high in self._steps(self._oldest(start), common, every):
                yield self._gather(0, start, low, high, 0, every)
        for request, start in enumerate(self._starts):
            first, end = self._firsts[request], self._firsts[request + 1]
            last = (self._ends[request] - 1) // SEGMENT + 1
            for low, high in self._steps(max(common, self._oldest(start)), last, end - first):
                yield self._gather(request, start, low, high, *self._seen_by(first, end, low, high))

    def _oldest(self, start: int) -> int:
        """First segment that the token at ``start`` sees."""
        return max(0, start - self._window + 1) // SEGMENT if self._window else 0

    def _common_segments(self) -> int:
        """Whole segments that all requests share and that are computed by the end of the step."""
        if len(self._spans) < 2:
            return 0
        tokens = self._group.num_common_prefix_blocks * self._block_size
        return min(tokens, *self._ends) // SEGMENT

    @staticmethod
    def _steps(first: int, end: int, tiles: int) -> Iterator[tuple[int, int]]:
        """Cut segments ``first`` to ``end`` so that ``tiles`` of them make about ``MEETINGS_MAX`` meetings."""
        size = max(1, MEETINGS_MAX // max(tiles, 1))
        for low in range(first, end, size):
            yield low, min(low + size, end)

    def _seen_by(self, first: int, end: int, low: int, high: int) -> tuple[int, int]:
        """The tiles of ``first`` to ``end``, adjacent ones of a request, that see segments ``low`` to ``high``."""
        starts = self._tile_starts[first:end]
        begin = first + int(np.searchsorted(starts, low * SEGMENT))
        if self._window:
            end = first + int(np.searchsorted(starts, high * SEGMENT - 1 + self._window, side="left"))
        return begin, end

    def _gather(self, request: int, start: int, low: int, high: int, first: int, end: int) -> Gather:
        """Segments by one request's table, as tokens from ``start`` on in tiles ``first`` to ``end`` see them."""
        base, stop = low * SEGMENT, high * SEGMENT
        valid_from = max(0, start - self._window + 1 - base) if self._window else 0
        valid_to = min(self._ends[request], stop) - base
        slots = np.zeros(stop - base, np.int64)
        positions = np.arange(base + valid_from, base + valid_to)
        table = self._group.block_tables[request]
        slots[valid_from:valid_to] = table[positions // self._block_size] * self._block_size
        slots[valid_from:valid_to] += positions % self._block_size
        size = max(1, MEETINGS_MAX // (high - low))
        meetings = (
            Meeting(begin, min(begin + size, end), self._hidden(begin, min(begin + size, end), low, high))
            for begin in range(first, end, size)
        )
        return Gather(self._arrays.to_device(slots), valid_from, valid_to, tuple(meetings))

    def _hidden(self, first: int, end: int, low: int, high: int) -> tuple[tuple[int, npt.NDArray[np.bool_]], ...]:
        starts = self._tile_starts[first:end]
        masks = []
        for segment in range(low, high):
            whole = int(starts.min()) >= (segment + 1) * SEGMENT - 1
            if self._window:
                whole = whole and int(starts.max()) + TILE - 1 < segment * SEGMENT + self._window
            if not whole:
                masks.append((segment - low, self._arrays.to_device(self._mask(starts, segment))))
        return tuple(masks)

    def _mask(self, starts: I64, segment: int) -> npt.NDArray[np.bool_]:
        queries = (starts[:, None] + np.arange(TILE))[:, None, :, None, None]
        keys = segment * SEGMENT + np.arange(SEGMENT)
        hidden: npt.NDArray[np.bool_] = keys > queries
        if self._window:
            hidden |= keys <= queries - self._window
        return hidden
