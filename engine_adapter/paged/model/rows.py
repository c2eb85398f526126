"""What one step computes, and how its tokens lie in tiles so that a token's bits never depend on its neighbours.

A BLAS product of m rows gives a row bits that depend on m and on where the row lies. So every product here has
one fixed shape, ``TILE`` rows, and the token at position p always lies at row ``p % TILE`` of some tile::

    tokens (request, position):   a14 a15 a16 a17   b3   c1        TILE = 4 for the drawing

    tile 0:   a16  c1   a14  b3       row r holds tokens whose position is r modulo TILE,
    tile 1:   .    a17  .    a15      the k-th of them in tile k; the rest is zeros

Rows of a product do not read each other, so which tokens share a tile decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.engine_adapter.paged.model.arrays import F32, HOST, I64, ArrayModule, Arrays

__all__ = ["F32", "I64", "TILE", "Batch", "GroupBatch", "RowLayout", "multiply"]

TILE: Final = 16


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One KV cache group's part of a step.

    ``slot_mapping`` [n]: where the K and V of each token go, ``block id * block_size + offset``.
    ``block_tables``: one array of block ids a request, long enough for its last position; entries that a sliding
    window has left behind may be the null block. ``num_common_prefix_blocks``: the first so many blocks are the
    same in every table of the step, and computed by its end.
    """

    slot_mapping: I64
    block_tables: Sequence[I64]
    num_common_prefix_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, of one or several requests.

    ``token_ids``, ``positions`` [n]. ``spans``: (start, end) in n of each request, in order, covering all of n;
    a request's positions are consecutive, and everything before its first is in the KV cache. ``groups``: one a
    KV cache group. ``layer_group``: the group of each layer of the model. ``logits_rows`` [m]: tokens whose
    logits are wanted, as indices into n.
    """

    token_ids: I64
    positions: I64
    spans: Sequence[tuple[int, int]]
    groups: Sequence[GroupBatch]
    layer_group: Sequence[int]
    logits_rows: I64

    @property
    def context_starts(self) -> list[int]:
        """First position that each request computes in this step."""
        return [int(self.positions[start]) for start, _ in self.spans]

    @property
    def context_ends(self) -> list[int]:
        """One past the last position that each request computes in this step."""
        return [int(self.positions[end - 1]) + 1 for _, end in self.spans]

    def check(self) -> None:
        """Assert that the parts fit each other. O(n)."""
        n = len(self.token_ids)
        assert len(self.positions) == n, f"{n} tokens and {len(self.positions)} positions"
        covered = 0
        for start, end in self.spans:
            assert start == covered < end, f"span ({start}, {end}) after {covered}: expected adjacent and not empty"
            covered = end
        assert covered == n, f"spans cover {covered} of {n} tokens"
        if n:
            breaks = np.flatnonzero(np.diff(self.positions) != 1) + 1
            starts = {start for start, _ in self.spans}
            assert starts.issuperset(breaks.tolist()), f"positions are not consecutive at tokens {breaks.tolist()}"
            assert int(self.positions.min()) >= 0, "a position is negative"
        for index, group in enumerate(self.groups):
            assert len(group.slot_mapping) == n, f"group {index}: {len(group.slot_mapping)} slots for {n} tokens"
            assert len(group.block_tables) == len(self.spans), f"group {index}: not one block table a request"
        assert all(0 <= group < len(self.groups) for group in self.layer_group), "a layer without a group"
        if len(self.logits_rows):
            assert 0 <= int(self.logits_rows.min()) <= int(self.logits_rows.max()) < n, "logits of a token not here"


class RowLayout:
    """Where each of n tokens lies in ``[num_tiles, TILE, width]`` arrays of ``arrays``. O(n log n) to make, on the
    host."""

    def __init__(self, positions: I64, arrays: Arrays = HOST) -> None:
        residues = positions % TILE
        order = np.argsort(residues, kind="stable")
        counts = np.bincount(residues, minlength=TILE)
        firsts = np.cumsum(counts) - counts
        rank = np.empty(len(positions), np.int64)
        rank[order] = np.arange(len(positions)) - firsts[residues[order]]
        #: Row of each token in the arrays seen as [num_tiles * TILE, width]; a host array.
        self.rows: I64 = rank * TILE + residues
        self.num_tiles = int(counts.max(initial=0))
        self._xp = arrays.xp
        self._rows = arrays.to_device(self.rows)

    def scatter(self, values: F32) -> F32:
        """[n, width] -> [num_tiles, TILE, width], zeros where there is no token."""
        tiles = self._xp.zeros((self.num_tiles * TILE, values.shape[1]), values.dtype)
        tiles[self._rows] = values
        return tiles.reshape(self.num_tiles, TILE, values.shape[1])

    def gather(self, tiles: F32) -> F32:
        """[num_tiles, TILE, width] -> [n, width]."""
        return self._xp.take(tiles.reshape(-1, tiles.shape[-1]), self._rows, axis=0)


def multiply(xp: ArrayModule, tiles: F32, weight: F32) -> F32:
    """[num_tiles, TILE, k] x [k, n], ``weight`` C-contiguous: one product of one shape a tile. For all weights."""
    return xp.matmul(tiles, weight)
