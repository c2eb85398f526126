from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay.capacity import NODE_BYTES_MIN, blocks_held, node_bytes_for
from kvstrata.storage.arena import dram_arena, slab_bytes_for
from kvstrata.storage.slab import slot_size


@given(st.integers(1, 200_000), st.integers(1, 1 << 20))
def test_a_node_holds_what_it_was_sized_for_and_little_more(blocks: int, block_bytes: int) -> None:
    size = node_bytes_for(blocks, block_bytes)
    held = blocks_held(size, block_bytes)
    assert held >= blocks
    # Slab tails: a slot and two pages in each slab, one slab that is not whole, generations.
    tails = 16 * (slot_size(block_bytes) + 2 * 4096) + slab_bytes_for(size, None) + 8 * blocks
    assert size <= max(NODE_BYTES_MIN, 1.02 * blocks * slot_size(block_bytes) + tails)


@pytest.mark.parametrize("block_bytes", [100, 2048, 5000, 1 << 20])
def test_a_real_arena_holds_as_many(block_bytes: int) -> None:
    size = node_bytes_for(20, block_bytes)
    arena = dram_arena(size)
    try:
        total = sum(arena.slots_in_a_slab(slot_size(block_bytes)) for _ in arena.slabs)
        assert total == blocks_held(size, block_bytes) >= 20
    finally:
        arena.close()
