"""From what the pool has to what a request can use: the longest hit, and the rows that a load must name.

Pure functions over block numbers of one request's chain; no hashes are compared and nothing is remembered.

::

    full group      [local ...................... end)   every block
    window group                    [end - w + 1, end)   only the blocks that hold the last w - 1 tokens, from local on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstrata.engine_adapter.connector.base import BlockIds, GroupBlocks
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout


def pools_prefixes(layout: PoolLayout) -> bool:
    """Whether an external hit is possible at all: no layer's KV may be left out of the pool."""
    groups = [group for group in layout.groups if group.layers]
    return bool(groups) and all(group.poolable for group in groups)


def block_counts(layout: PoolLayout, num_hashes: int) -> list[int]:
    """Full blocks of each group in a chain of ``num_hashes`` hash blocks; 0 for a group without layers."""
    tokens = num_hashes * layout.hash_block_tokens
    return [tokens // group.block_tokens if group.layers else 0 for group in layout.groups]


def block_hash(layout: PoolLayout, group: int, block_hashes: Sequence[bytes], index: int) -> bytes:
    """The hash of the group's block ``index``: that of its last hash block."""
    return block_hashes[(index + 1) * (layout.groups[group].block_tokens // layout.hash_block_tokens) - 1]


def packed_hashes(layout: PoolLayout, group: int, block_hashes: Sequence[bytes], rows: range) -> bytes:
    """The hashes of the group's blocks ``rows`` (contiguous), one after the other."""
    step = layout.groups[group].block_tokens // layout.hash_block_tokens
    return b"".join(block_hashes[(rows.start + 1) * step - 1 : rows.stop * step : step]) if rows else b""


def group_blocks(
    layout: PoolLayout, group: int, block_hashes: Sequence[bytes], rows: range, table: Sequence[int]
) -> GroupBlocks:
    """Blocks ``rows`` (contiguous) of a request's chain, as a job names them. ``table``: the group's block table."""
    return GroupBlocks(
        group=group,
        hashes=packed_hashes(layout, group, block_hashes, rows),
        block_ids=list(table[rows.start : rows.stop]),
        first_index=rows.start,
        parent=block_hash(layout, group, block_hashes, rows.start - 1) if rows.start else b"",
    )


def longest_hit(layout: PoolLayout, present: Sequence[bytes | bytearray], local_tokens: int, limit_tokens: int) -> int:
    """Where the longest usable hit ends: ``local_tokens`` (nothing more) up to ``limit_tokens``, aligned.

    ``present``: one byte a block from the chain's start, for each group; 0 where the pool does not have it. Blocks
    before ``local_tokens`` are the engine's own, and need not be there. O(blocks), vectorised.
    """
    aligned = layout.aligned_tokens
    assert local_tokens % aligned == 0, f"{local_tokens} local tokens: not a multiple of {aligned}"
    if not pools_prefixes(layout):
        return local_tokens
    end = limit_tokens
    for group, have in zip(layout.groups, present, strict=True):
        if group.layers:
            end = min(end, _leading_tokens(group, have, local_tokens))
    ends = np.arange(end // aligned * aligned, local_tokens, -aligned)
    usable = np.ones(len(ends), np.bool_)
    for group, have in zip(layout.groups, present, strict=True):
        if group.layers and group.window_tokens:
            missing = np.concatenate(([0], np.cumsum(np.frombuffer(have, np.uint8) == 0)))
            first = np.maximum(local_tokens, ends - group.window_tokens + 1) // group.block_tokens
            usable &= missing[ends // group.block_tokens] == missing[first]
    longest = np.flatnonzero(usable)
    return int(ends[longest[0]]) if len(longest) else local_tokens


def _leading_tokens(group: GroupLayout, have: bytes | bytearray, local_tokens: int) -> int:
    """Tokens up to the first block after the local ones that is missing; a window bounds only by what was asked."""
    hole = -1 if group.window_tokens else have.find(0, local_tokens // group.block_tokens)
    return (len(have) if hole < 0 else hole) * group.block_tokens


@dataclass(frozen=True, slots=True)
class LoadRows:
    """The rows of each group that a load of tokens ``[begin, end)`` names. Both ends are aligned."""

    layout: PoolLayout
    begin: int
    end: int

    def rows(self, group: int) -> range:
        """Block numbers in the request's chain; empty for a group without layers, or whose window needs none."""
        kind = self.layout.groups[group]
        if not kind.layers:
            return range(0)
        first = max(self.begin, self.end - kind.window_tokens + 1) if kind.window_tokens else self.begin
        return range(first // kind.block_tokens, self.end // kind.block_tokens)

    def groups(self, block_hashes: Sequence[bytes], block_ids: BlockIds) -> list[GroupBlocks]:
        """What the job names: groups in order, those without rows left out."""
        kept = [(index, rows) for index in range(len(self.layout.groups)) if (rows := self.rows(index))]
        blocks = [group_blocks(self.layout, index, block_hashes, rows, block_ids[index]) for index, rows in kept]
        for entry in blocks:
            assert 0 not in entry.block_ids, f"a load into the null block: group {entry.group}, tokens {self}"
        return blocks

    @property
    def nbytes(self) -> int:
        """Bytes on one rank."""
        return sum(self.layout.block_bytes(index) * len(self.rows(index)) for index in range(len(self.layout.groups)))

    def loaded_tokens(self, done: bytes) -> int:
        """Tokens from ``begin`` on that are usable when these blocks are there. ``done``: one byte a named block."""
        present, at = [], 0
        for index, kind in enumerate(self.layout.groups):
            rows = self.rows(index)
            have = bytearray(self.end // kind.block_tokens)
            have[rows.start : rows.stop] = done[at : at + len(rows)]
            at += len(rows)
            present.append(have)
        assert at == len(done), f"{len(done)} bytes for {at} blocks"
        return longest_hit(self.layout, present, self.begin, self.end) - self.begin
