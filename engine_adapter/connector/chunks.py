"""A job cut into calls: what one call to the pool names, and in which order. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstrata.engine_adapter.connector.base import GroupBlocks, Job, JobKind
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.transfer.gpu.runtime import Event

#: Bytes of one call: enough that its round trip does not show beside the copy, little enough that a deadline
#: or a lost node costs a part of a job.
CHUNK_BYTES: Final = 32 << 20


class Chunk(NamedTuple):
    """Rows ``start`` to ``stop`` of one entry (the ``column``-th) of a job's groups.

    ``offset``: the first row's place among all blocks of the job, group after group. ``after``: the mark that device
    memory comes after.
    """

    blocks: GroupBlocks
    column: int
    start: int
    stop: int
    offset: int
    after: Event | None = None

    def hashes(self, width: int) -> bytes:
        return self.blocks.hashes[self.start * width : self.stop * width]

    def parent(self, width: int) -> bytes:
        """The hash before the first row, empty at a chain's head."""
        return self.blocks.hashes[(self.start - 1) * width : self.start * width] if self.start else self.blocks.parent


def chunks_of(
    groups: Sequence[GroupBlocks], layout: PoolLayout, chunk_bytes: int = CHUNK_BYTES, after: Event | None = None
) -> list[Chunk]:
    """In the order of the tokens they end at, so that what is left out at any time is the tail of all groups."""
    found: list[tuple[int, Chunk]] = []
    offset = 0
    for column, blocks in enumerate(groups):
        count = len(blocks.block_ids)
        tokens = layout.groups[blocks.group].block_tokens
        rows = max(1, chunk_bytes // layout.block_bytes(blocks.group))
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            chunk = Chunk(blocks, column, start, stop, offset + start, after)
            found.append(((blocks.first_index + stop) * tokens, chunk))
        offset += count
    return [chunk for _, chunk in sorted(found, key=lambda pair: pair[0])]


def blocks_in(job: Job) -> int:
    """Blocks of all groups."""
    return sum(len(blocks.block_ids) for blocks in job.groups)


def problem_of(job: Job, layout: PoolLayout) -> str:
    """Why this job cannot be carried out as it stands, or an empty string."""
    named: set[int] = set()
    for blocks in job.groups:
        if not 0 <= blocks.group < len(layout.groups) or not layout.groups[blocks.group].poolable:
            return f"group {blocks.group} is none of the pool's"
        ids = set(blocks.block_ids)
        if len(blocks.hashes) != len(blocks.block_ids) * layout.hash_bytes:
            return f"{len(blocks.hashes)} bytes of hashes for {len(blocks.block_ids)} blocks"
        # Block 0 is the null block: every request's tables name it, and nothing is ever in it.
        if ids and not (min(ids) > 0 and max(ids) < layout.num_blocks):
            return f"block ids from {min(ids)} to {max(ids)}: expected 1 to {layout.num_blocks - 1}"
        if job.layered and len(job.groups) > 1:
            return "a layered load of several groups"
        if job.kind is JobKind.LOAD and (len(ids) < len(blocks.block_ids) or ids & named):
            return "a block id is loaded into twice"
        named |= ids
    return ""
