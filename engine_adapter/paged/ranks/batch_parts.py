"""The model's batch of a step, put together from each request's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstrata.engine_adapter.paged.model.rows import I64, Batch, GroupBatch
from kvstrata.engine_adapter.paged.ranks.block_table import BlockTable


class Part(NamedTuple):
    """Tokens at positions ``start`` to ``end - 1`` of the request in ``row`` of the block tables."""

    request_id: str
    row: int
    start: int
    token_ids: list[int]
    samples: bool  #: the logits of its last token are wanted

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def build_batch(
    parts: Sequence[Part], tables: Sequence[BlockTable], layer_group: Sequence[int], common_blocks: Sequence[int]
) -> Batch:
    """``tables`` and ``common_blocks``: one a KV cache group. O(tokens + blocks of the requests)."""
    counts = np.asarray([len(part.token_ids) for part in parts], np.int64)
    ends = np.cumsum(counts)
    starts = ends - counts
    first_positions = np.asarray([part.start for part in parts], np.int64)
    positions = np.arange(counts.sum(), dtype=np.int64) + np.repeat(first_positions - starts, counts)
    rows = np.repeat(np.asarray([part.row for part in parts], np.int64), counts)
    return Batch(
        token_ids=np.concatenate([np.asarray(part.token_ids, np.int64) for part in parts]),
        positions=positions,
        spans=list(zip(starts.tolist(), ends.tolist(), strict=True)),
        groups=[
            _group_batch(table, parts, rows, positions, shared)
            for table, shared in zip(tables, common_blocks, strict=True)
        ],
        layer_group=layer_group,
        logits_rows=ends[np.asarray([part.samples for part in parts], np.bool_)] - 1,
    )


def _group_batch(table: BlockTable, parts: Sequence[Part], rows: I64, positions: I64, common_blocks: int) -> GroupBatch:
    return GroupBatch(
        slot_mapping=table.slot_mapping(rows, positions),
        block_tables=[table.blocks(part.row, part.end) for part in parts],
        num_common_prefix_blocks=common_blocks,
    )
