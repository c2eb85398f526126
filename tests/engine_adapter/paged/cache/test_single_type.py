"""Each kind of attention: what a hit needs, what is given back, what is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.coordinator import make_manager
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.cache.single_type import SingleTypeManager
from kvstrata.engine_adapter.paged.request import Request, SamplingParams

HEADS = {"num_kv_heads": 1, "head_size": 2}
FULL = FullAttentionSpec(block_size=4, **HEADS)
MLA = MLASpec(block_size=4, latent_size=4)
CROSS = CrossAttentionSpec(block_size=4, max_encoder_len=10, **HEADS)
MAMBA = MambaSpec(block_size=4, shapes=((2, 3), (4,)))


def sliding(window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=window, **HEADS)


def chunked(chunk: int) -> ChunkedLocalSpec:
    return ChunkedLocalSpec(block_size=4, chunk_size=chunk, **HEADS)


def request(num_tokens: int, name: str = "r") -> Request:
    return Request(name, range(num_tokens), SamplingParams(), BlockHasher(4))


def manager_of(spec: KVCacheSpec, num_blocks: int = 64) -> SingleTypeManager:
    return make_manager(spec, 0, BlockPool(num_blocks, enable_prefix_caching=True), 4)


def hit(spec: KVCacheSpec, present: list[bool], max_tokens: int, alignment: int = 4) -> list[bool] | None:
    """Which blocks of the hit are real, when the cache has those of ``present``."""
    manager, owner = manager_of(spec), request(4 * len(present) + 1, "owner")
    pool = manager._pool
    blocks = pool.get_new_blocks(len(present))
    table = [block if there else pool.null_block for block, there in zip(blocks, present, strict=True)]
    pool.cache_full_blocks(owner, table, 0, len(table), 0, 4, 4)
    found = manager.find_longest_cache_hit(owner.block_hashes, max_tokens, alignment)
    for index, block in enumerate(found):
        assert block.is_null or block is blocks[index]
    pool.check()
    return [not block.is_null for block in found]


def grown(spec: KVCacheSpec, num_tokens: int) -> SingleTypeManager:
    """A manager with the table of request "r"."""
    manager = manager_of(spec)
    manager.attach(request(num_tokens), [])
    manager.allocate("r", 0, num_tokens)
    return manager


def real(manager: SingleTypeManager) -> list[bool]:
    return [not block.is_null for block in manager.table("r")]


T, F = True, False


@pytest.mark.parametrize("spec", [FULL, MLA], ids=["full", "mla"])
def test_full_attention_hits_the_leading_run(spec: KVCacheSpec) -> None:
    assert hit(spec, [T, T, F, T], 16) == [T, T]
    assert hit(spec, [T, T, T, T], 16) == [T] * 4
    assert hit(spec, [T, T, T, T], 15) == [T] * 3, "capped"
    assert hit(spec, [T, T, T, T], 15, alignment=8) == [T] * 2, "aligned"
    assert hit(spec, [F, T], 8) == []
    assert hit(spec, [T], 99) == [T], "no more hashes"


def test_full_attention_gives_nothing_back() -> None:
    manager = grown(FULL, 17)
    manager.remove_skipped_blocks("r", 17)
    assert real(manager) == [T] * 5


def test_a_sliding_window_hit_needs_the_last_window_less_one_tokens() -> None:
    # Window 8: the token after the hit reads 7 tokens before it: two blocks of 4.
    assert hit(sliding(8), [F, F, T, T], 16) == [F, F, T, T]
    assert hit(sliding(8), [T, F, F, T], 16) == [T], "the head needs no more than there is"
    assert hit(sliding(8), [T, T, F, T], 16) == [T, T]
    assert hit(sliding(8), [F, T, F, T], 16) == []
    # Window 6: 5 tokens, still two blocks. Window 5: 4 tokens, one block. Window 1: none.
    assert hit(sliding(6), [F, F, F, T], 16) == []
    assert hit(sliding(5), [F, F, F, T], 16) == [F, F, F, T]
    assert hit(sliding(1), [F, F, F, F], 16) == [F] * 4


def test_a_sliding_window_hit_is_aligned() -> None:
    assert hit(sliding(5), [F, T, T], 12, alignment=8) == [F, T]
    assert hit(sliding(5), [F, F, T], 12, alignment=8) == []
    assert hit(sliding(5), [F, T, T], 7, alignment=4) == []


@given(
    present=st.lists(st.booleans(), max_size=12),
    window=st.integers(1, 30),
    max_tokens=st.integers(0, 60),
    alignment=st.sampled_from([4, 8, 12]),
    kind=st.sampled_from(["sliding", "chunked"]),
)
def test_a_windowed_hit_is_the_longest_whose_next_token_finds_all_it_reads(
    present: list[bool], window: int, max_tokens: int, alignment: int, kind: str
) -> None:
    spec = sliding(window) if kind == "sliding" else chunked(window)

    def usable(end: int) -> bool:
        first = max(end - window + 1, 0) if kind == "sliding" else end // window * window
        return all(
            index < len(present) and present[index] for index in {position // 4 for position in range(first, end)}
        )

    top = max_tokens // alignment * alignment
    best = next(end for end in range(top, -1, -alignment) if end == 0 or usable(end))
    found = hit(spec, present, max_tokens, alignment)
    assert found is not None and len(found) * 4 == best
    first = max(best - window + 1, 0) if kind == "sliding" else best // window * window
    assert found == [index >= first // 4 for index in range(best // 4)]


def test_blocks_out_of_the_window_become_null_and_are_freed() -> None:
    manager = grown(sliding(8), 24)
    pool = manager._pool
    free, table = pool.num_free_blocks, list(manager.table("r"))
    for computed, skipped in ((7, 0), (10, 0), (11, 1), (14, 1), (15, 2), (24, 4), (24, 4), (16, 4)):
        # The next token, at position ``computed``, reads positions from computed - 7 on.
        manager.remove_skipped_blocks("r", computed)
        assert real(manager) == [F] * skipped + [T] * (6 - skipped), computed
        assert pool.num_free_blocks == free + skipped
        manager.check()
    assert manager.table("r")[4:] == table[4:]
    manager.free("r")
    assert pool.num_free_blocks == pool.num_blocks - 1


def test_a_chunk_is_given_back_when_the_next_begins() -> None:
    manager = grown(chunked(8), 24)
    for computed, skipped in ((7, 0), (8, 2), (15, 2), (16, 4), (23, 4)):
        manager.remove_skipped_blocks("r", computed)
        assert real(manager) == [F] * skipped + [T] * (6 - skipped), computed
        manager.check()


def test_a_load_is_given_blocks_for_its_window_only() -> None:
    manager = manager_of(sliding(8))
    assert manager.num_blocks_to_allocate("r", [], 32, 36) == 3
    manager.attach(request(36), [])
    manager.allocate("r", 32, 36)
    assert real(manager) == [F] * 6 + [T] * 3
    manager.drop_unloaded_tail("r", 32)
    manager.remove_skipped_blocks("r", 32)
    assert real(manager) == [F] * 6 + [T] * 3, "it was all loaded"


def test_a_table_is_cut_where_a_load_stopped_short() -> None:
    manager = grown(sliding(8), 16)
    manager.allocate("r", 40, 40)
    assert real(manager) == [T] * 4 + [F] * 4 + [T] * 2
    free = manager._pool.num_free_blocks
    manager.drop_unloaded_tail("r", 16)
    assert real(manager) == [T] * 4 and manager._pool.num_free_blocks == free + 2
    manager.allocate("r", 16, 24)
    manager.remove_skipped_blocks("r", 16)
    assert real(manager) == [F] * 2 + [T] * 4
    manager.check()


def test_a_window_that_was_never_loaded_is_not_taken_for_computed() -> None:
    manager = grown(sliding(8), 16)
    manager.allocate("r", 40, 40)
    with pytest.raises(AssertionError, match="never loaded"):
        manager.drop_unloaded_tail("r", 24)


def test_blocks_before_the_window_are_not_cached_after_a_load() -> None:
    manager, owner = manager_of(sliding(8)), request(36)
    manager.attach(owner, [])
    manager.allocate("r", 32, 36)
    manager.cache_blocks(owner, 32)
    found = [manager._pool.get_cached_block(block_hash, 0) is not None for block_hash in owner.block_hashes]
    assert found == [F] * 6 + [T] * 2 + [F]


def test_a_hit_that_was_handed_out_meanwhile_is_refused() -> None:
    manager, owner = manager_of(FULL, num_blocks=3), request(8)
    manager.attach(owner, [])
    manager.allocate("r", 0, 8)
    manager.cache_blocks(owner, 8)
    manager.free("r")
    found = manager.find_longest_cache_hit(owner.block_hashes, 8, 4)
    assert len(found) == 2
    manager._pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="stale"):
        manager.attach(owner, found)


@pytest.mark.parametrize(("spec", "count"), [(CROSS, 3), (MAMBA, 1)], ids=["cross", "mamba"])
def test_fixed_kinds_take_all_at_once_and_never_hit(spec: KVCacheSpec, count: int) -> None:
    manager, owner = manager_of(spec), request(40)
    assert manager.num_blocks_to_allocate("r", [], 0, 1) == count == spec.max_blocks(1 << 20, 512)
    manager.attach(owner, [])
    assert len(manager.allocate("r", 0, 1)) == count
    assert manager.num_blocks_to_allocate("r", [], 1, 4000) == 0 and manager.allocate("r", 1, 4000) == []
    manager.cache_blocks(owner, 40)
    manager.remove_skipped_blocks("r", 40)
    manager.drop_unloaded_tail("r", 40)
    assert manager.find_longest_cache_hit(owner.block_hashes, 40, 4) == []
    assert manager._pool.num_cached_hashes == 0 and real(manager) == [T] * count
    manager.check()
    manager.free("r")
    assert manager._pool.usage == 0
