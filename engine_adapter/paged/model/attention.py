"""Paged attention: reads keys and values by block table, writes them by slot mapping.

Each meeting of a query tile and a key segment (see ``attention_plan``) gives a part of its own::

    scores = q k^T           [TILE * group, SEGMENT]
    peak   = max(scores)     weights = exp(scores - peak)      sum, out = weights 1, weights v

and parts are added up in the order of segments, each scaled by exp(its peak - the highest peak), as in online
softmax (Milakov and Gimelshein, 2018) and FlashDecoding. A part that sees nothing has the peak ``_NO_PEAK`` and
changes no bit of the others.
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.arrays import F32, HOST, I64, ArrayModule, Arrays
from kvstrata.engine_adapter.paged.model.attention_plan import MEETINGS_MAX, SEGMENT, AttentionPlan, Gather, Meeting
from kvstrata.engine_adapter.paged.model.rows import TILE

#: Below any score, and finite: -inf less -inf would be NaN.
_NO_PEAK: Final = np.float32(-1e30)

_HALF_MAX: Final = float(np.finfo(np.float16).max)

KV = npt.NDArray[np.float32] | npt.NDArray[np.float16]


def write_kv(kv: KV, slot_mapping: I64, keys: F32, values: F32) -> None:
    """Put K and V [n, num_kv_heads, head_size] of n tokens into ``kv`` [2, num_blocks, block_size, ...].

    All on one device. What float16 cannot hold becomes its largest number: an infinity would be NaN to tokens that
    must not see it.
    """
    flat = kv.reshape(2, -1, *kv.shape[3:])
    for part, entries in enumerate((keys, values)):
        flat[part][slot_mapping] = (
            entries if kv.dtype == np.float32 else entries.clip(-_HALF_MAX, _HALF_MAX).astype(kv.dtype)
        )


class PagedAttention:
    """Attention of heads of one shape; buffers are reused from layer to layer. Not thread-safe."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, arrays: Arrays = HOST) -> None:
        self._arrays, self._xp = arrays, (xp := arrays.xp)
        self._kv_heads, self._head_size = num_kv_heads, head_size
        self._group = num_heads // num_kv_heads
        self._scale = np.float32(head_size**-0.5)
        rows = TILE * self._group
        self._scores = xp.empty(MEETINGS_MAX * num_kv_heads * rows * SEGMENT, np.float32)
        self._outs = xp.empty(MEETINGS_MAX * num_kv_heads * rows * head_size, np.float32)
        self._kv = xp.empty((2, MEETINGS_MAX * SEGMENT, num_kv_heads, head_size), np.float32)
        self._half = xp.empty(self._kv.shape[1:], np.float16)
        self._ones = xp.ones((SEGMENT, 1), np.float32)

    def __call__(self, queries: F32, kv: KV, plan: AttentionPlan) -> F32:
        """Attend with ``queries`` [n, num_heads * head_size] to ``kv``, which holds this step's K and V already.

        Returns [n, num_heads * head_size].
        """
        state = _Softmax(self._xp, self._tiles(queries, plan), self._kv_heads, self._group)
        for gather in plan.gathers:
            self._meet(gather, kv, state)
        return self._tokens(state.result(), plan)

    def _tiles(self, queries: F32, plan: AttentionPlan) -> F32:
        """[n, heads * d] -> [tiles, 1, kv_heads, TILE * group, d], scaled."""
        rows = self._xp.zeros((plan.num_tiles * TILE, queries.shape[1]), np.float32)
        rows[plan.rows] = queries
        rows *= self._scale
        shape = (plan.num_tiles, TILE, self._kv_heads, self._group, self._head_size)
        by_head = self._xp.ascontiguousarray(rows.reshape(shape).transpose(0, 2, 1, 3, 4))
        return by_head.reshape(plan.num_tiles, 1, self._kv_heads, TILE * self._group, self._head_size)

    def _tokens(self, tiles: F32, plan: AttentionPlan) -> F32:
        shape = (plan.num_tiles, self._kv_heads, TILE, self._group, self._head_size)
        rows = tiles.reshape(shape).transpose(0, 2, 1, 3, 4).reshape(plan.num_tiles * TILE, -1)
        return self._xp.take(rows, plan.rows, axis=0)

    def _meet(self, gather: Gather, kv: KV, state: _Softmax) -> None:
        if not gather.meetings:
            return
        keys, values = self._read(gather, kv)
        for meeting in gather.meetings:
            self._attend(meeting, gather.segments, keys, values, state)

    def _read(self, gather: Gather, kv: KV) -> tuple[F32, F32]:
        """K as [1, segments, kv_heads, d, SEGMENT] and V as [1, segments, kv_heads, SEGMENT, d], views of a buffer."""
        tokens = len(gather.slots)
        flat = kv.reshape(2, -1, self._kv_heads, self._head_size)
        for part in (0, 1):
            buffer = self._kv[part, :tokens]
            into = buffer if flat.dtype == np.float32 else self._half[:tokens]
            self._arrays.take_into(flat[part], gather.slots, into)
            if into is not buffer:
                buffer[...] = into
            # What is not computed may be anything, and 0 * NaN is NaN.
            buffer[: gather.valid_from] = 0
            buffer[gather.valid_to :] = 0
        shaped = self._kv[:, :tokens].reshape(2, 1, gather.segments, SEGMENT, self._kv_heads, self._head_size)
        return shaped[0].transpose(0, 1, 3, 4, 2), shaped[1].transpose(0, 1, 3, 2, 4)

    def _attend(self, meeting: Meeting, segments: int, keys: F32, values: F32, state: _Softmax) -> None:
        xp = self._xp
        tiles = meeting.end - meeting.first
        shape = (tiles, segments, self._kv_heads, TILE * self._group)
        count = prod(shape)
        scores = self._scores[: count * SEGMENT].reshape(*shape, SEGMENT)
        outs = self._outs[: count * self._head_size].reshape(*shape, self._head_size)
        xp.matmul(state.queries[meeting.first : meeting.end], keys, out=scores)
        by_row = scores.reshape(tiles, segments, self._kv_heads, TILE, self._group, SEGMENT)
        for segment, hidden in meeting.hidden:
            xp.copyto(by_row[:, segment], -np.inf, where=hidden)
        peaks = xp.max(scores, axis=-1, keepdims=True)
        xp.maximum(peaks, _NO_PEAK, out=peaks)
        xp.subtract(scores, peaks, out=scores)
        xp.exp(scores, out=scores)
        xp.matmul(scores, values, out=outs)
        sums = xp.matmul(scores, self._ones)
        for segment in range(segments):
            state.add(meeting, peaks[:, segment], sums[:, segment], outs[:, segment])


class _Softmax:
    """What each query row has seen so far: the highest peak, the sum of weights, the weighted values.

    All [tiles, kv_heads, TILE * group, 1 or d].
    """

    def __init__(self, xp: ArrayModule, queries: F32, kv_heads: int, group: int) -> None:
        self._xp = xp
        self.queries = queries
        tiles, head_size = queries.shape[0], queries.shape[-1]
        shape = (tiles, kv_heads, TILE * group)
        self._peaks = xp.full((*shape, 1), _NO_PEAK, np.float32)
        self._sums = xp.zeros((*shape, 1), np.float32)
        self._outs = xp.zeros((*shape, head_size), np.float32)

    def add(self, meeting: Meeting, peaks: F32, sums: F32, outs: F32) -> None:
        """Add a part. ``outs`` is overwritten."""
        mine = slice(meeting.first, meeting.end)
        xp = self._xp
        highest = xp.maximum(self._peaks[mine], peaks)
        before, now = xp.exp(self._peaks[mine] - highest), xp.exp(peaks - highest)
        self._peaks[mine] = highest
        self._sums[mine] = self._sums[mine] * before + sums * now
        outs *= now
        self._outs[mine] *= before
        self._outs[mine] += outs

    def result(self) -> F32:
        """The attention of every row, [tiles, kv_heads, TILE * group, d]."""
        return self._xp.divide(self._outs, self._sums, out=self._outs)
