"""Block tables against the definition: a slot is the block's number times its size, and the offset in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.ranks.batch_parts import Part, build_batch
from kvstrata.engine_adapter.paged.ranks.block_table import BlockTable

BLOCKS = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(BLOCKS, min_size=1, max_size=2), min_size=1, max_size=4), size=st.sampled_from([1, 3, 16])
)
def test_slots_of_any_tokens(rows: list[list[list[int]]], size: int) -> None:
    table = BlockTable(len(rows), 12, size)
    for row, appended in enumerate(rows):
        for block_ids in appended:
            table.append(row, block_ids)
    tokens = [(row, p) for row, parts in enumerate(rows) for p in range(size * sum(map(len, parts)))]
    slots = table.slot_mapping(*np.asarray(tokens, np.int64).T)
    whole = [[block_id for part in parts for block_id in part] for parts in rows]
    assert slots.tolist() == [whole[row][p // size] * size + p % size for row, p in tokens]


def test_a_row_is_reused_from_its_start() -> None:
    table = BlockTable(2, 4, 16)
    table.append(1, [5, 6, 7])
    table.clear(1)
    table.append(1, [9])
    assert table.num_blocks(1) == 1
    assert table.blocks(1, 16).tolist() == [9]
    with pytest.raises(AssertionError, match="17 tokens need 2 blocks and it has 1"):
        table.blocks(1, 17)


def test_skipped_blocks_are_the_null_block_and_nothing_is_written_there() -> None:
    table = BlockTable(1, 4, 16)
    table.append(0, [5, 6, 7])
    table.skip(0, 2)
    assert table.blocks(0, 48).tolist() == [0, 0, 7]
    with pytest.raises(AssertionError, match="position 20 would be written to block 0"):
        table.slot_mapping(np.asarray([0, 0]), np.asarray([40, 20]))
    table.skip(0, 9)
    table.append(0, [8])
    assert table.blocks(0, 64).tolist() == [0, 0, 0, 8]


def test_a_table_has_an_end() -> None:
    table = BlockTable(1, 2, 16)
    with pytest.raises(AssertionError, match="0 \\+ 3 blocks in a table of 2"):
        table.append(0, [1, 2, 3])
    table.append(0, [1])
    with pytest.raises(AssertionError, match="position 16 is beyond its 1 blocks"):
        table.slot_mapping(np.asarray([0]), np.asarray([16]))


def test_a_batch_of_parts() -> None:
    table = BlockTable(3, 4, 4)
    table.append(2, [10, 11])
    table.append(0, [20])
    parts = [Part("a", 2, 3, [7, 8, 9], False), Part("b", 0, 0, [1], True)]
    batch = build_batch(parts, [table], [0, 0], [1])
    batch.check()
    assert batch.token_ids.tolist() == [7, 8, 9, 1]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert list(batch.spans) == [(0, 3), (3, 4)]
    assert batch.context_ends == [6, 1]
    assert batch.logits_rows.tolist() == [3]
    assert batch.groups[0].slot_mapping.tolist() == [43, 44, 45, 80]
    assert [blocks.tolist() for blocks in batch.groups[0].block_tables] == [[10, 11], [20]]
    assert batch.groups[0].num_common_prefix_blocks == 1
