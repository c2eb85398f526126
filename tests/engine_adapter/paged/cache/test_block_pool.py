"""Rules of the block pool, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache import kv_events
from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.blocks import KVCacheBlock
from kvstrata.engine_adapter.paged.cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvstrata.engine_adapter.paged.request import Request, SamplingParams
from kvstrata.proto.errors import InvalidArgument

SIZE = 4


def request(num_blocks: int, name: str = "r", salt: str = "") -> Request:
    return Request(name, range(SIZE * num_blocks), SamplingParams(), BlockHasher(SIZE), cache_salt=salt)


def pool_of(num_blocks: int, *, events: bool = False) -> BlockPool:
    return BlockPool(num_blocks, enable_prefix_caching=True, events=events)


def cache(pool: BlockPool, of: Request, blocks: Sequence[KVCacheBlock], group: int = 0, first: int = 0) -> None:
    pool.cache_full_blocks(of, blocks, first, len(blocks), group, SIZE, SIZE)
    pool.check()


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out_freed_cached_or_counted() -> None:
    pool = pool_of(4)
    assert pool.num_free_blocks == 3 and 0 not in ids(pool.get_new_blocks(3))
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block])
    pool.hold([0, 0])
    pool.release([0])
    pool.cache_full_blocks(request(1), [pool.null_block], 0, 1, 0, SIZE, SIZE)
    assert pool.null_block.ref_count == 0 and pool.num_free_blocks == 0 and pool.num_cached_hashes == 0
    pool.check()


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = pool_of(4)
    kept = pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="3 blocks asked, 2 free"):
        pool.get_new_blocks(3)
    assert pool.num_free_blocks == 2 and pool.usage == pytest.approx(1 / 3)
    pool.free_blocks(kept)
    assert pool.usage == 0
    pool.check()


def test_a_pool_has_room_for_a_block_besides_the_null_block() -> None:
    with pytest.raises(InvalidArgument, match="at least 2"):
        pool_of(1)


def test_a_free_block_is_found_until_it_is_handed_out() -> None:
    pool, chain = pool_of(4), request(2)
    first, second = blocks = pool.get_new_blocks(2)
    cache(pool, chain, blocks)
    pool.free_blocks(reversed(blocks))
    assert pool.num_free_blocks == 3
    assert pool.get_cached_block(chain.block_hashes[0], 0) is first
    assert pool.get_cached_block(chain.block_hashes[1], 0) is second
    assert pool.get_cached_block(chain.block_hashes[0], 1) is None, "another group's block"
    pool.get_new_blocks(2)  # the never used block, then the tail of the chain
    assert pool.get_cached_block(chain.block_hashes[0], 0) is first
    assert pool.get_cached_block(chain.block_hashes[1], 0) is None
    pool.get_new_blocks(1)
    assert pool.num_cached_hashes == 0
    pool.check()


def test_tail_first() -> None:
    pool, chain = pool_of(101), request(100)
    blocks = pool.get_new_blocks(100)
    cache(pool, chain, blocks)
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(30)
    present = [pool.get_cached_block(block_hash, 0) is not None for block_hash in chain.block_hashes]
    assert present == [True] * 70 + [False] * 30


def test_a_touched_block_leaves_the_queue_and_keeps_its_hash() -> None:
    pool, chain = pool_of(3), request(1)
    blocks = pool.get_new_blocks(1)
    cache(pool, chain, blocks)
    pool.free_blocks(blocks)
    pool.touch(blocks)
    pool.touch(blocks)
    assert blocks[0].ref_count == 2 and pool.num_free_blocks == 1
    pool.get_new_blocks(1)
    assert pool.get_cached_block(chain.block_hashes[0], 0) is blocks[0]
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 0
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 1
    with pytest.raises(AssertionError, match="once too often"):
        pool.free_blocks(blocks)
    pool.check()


def test_a_held_block_is_not_handed_out() -> None:
    pool = pool_of(4)
    blocks = pool.get_new_blocks(3)
    pool.hold(ids(blocks))
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 0
    pool.release(ids(blocks))
    assert ids(pool.get_new_blocks(3)) == ids(blocks)[::-1], "given in chain order, evicted tail first"
    pool.check()


def test_two_blocks_with_one_hash_are_both_kept() -> None:
    pool, chain = pool_of(3, events=True), request(1)
    one, two = pool.get_new_blocks(2)
    cache(pool, chain, [one])
    cache(pool, chain, [two])
    assert pool.num_cached_hashes == 1
    pool.free_blocks([one, two])
    pool.take_events()
    assert ids(pool.get_new_blocks(1)) == [one.block_id]
    assert pool.get_cached_block(chain.block_hashes[0], 0) is two
    assert pool.take_events() == [], "it can still be found"
    pool.get_new_blocks(1)
    assert pool.take_events() == [BlockRemoved(hashes=chain.block_hashes, group=0)]
    pool.check()


def test_caching_twice_is_caching_once_and_other_tokens_are_refused() -> None:
    pool, chain = pool_of(4, events=True), request(2)
    blocks = pool.get_new_blocks(2)
    cache(pool, chain, blocks)
    cache(pool, chain, blocks)
    assert len(pool.take_events()) == 1
    with pytest.raises(AssertionError, match="holds other tokens"):
        pool.cache_full_blocks(chain, blocks[::-1], 0, 2, 0, SIZE, SIZE)


def test_a_block_of_several_hash_blocks_has_the_hash_of_its_last() -> None:
    pool = pool_of(4)
    chain = request(5)
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(chain, blocks, 0, 2, 3, 2 * SIZE, SIZE)
    assert pool.get_cached_block(chain.block_hashes[1], 3) is blocks[0]
    assert pool.get_cached_block(chain.block_hashes[3], 3) is blocks[1]
    assert pool.num_cached_hashes == 2
    pool.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool, chain = BlockPool(3, enable_prefix_caching=False, events=True), request(1)
    cache(pool, chain, pool.get_new_blocks(1))
    assert pool.get_cached_block(chain.block_hashes[0], 0) is None and pool.take_events() == []


def test_reset_waits_for_references() -> None:
    pool, chain = pool_of(3, events=True), request(1)
    blocks = pool.get_new_blocks(1)
    cache(pool, chain, blocks)
    assert not pool.reset_prefix_cache() and pool.num_cached_hashes == 1
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() and pool.get_cached_block(chain.block_hashes[0], 0) is None
    assert pool.take_events() == [AllBlocksCleared()], "what was said before does not matter"
    pool.check()


def test_distrusted_blocks_are_forgotten_even_in_use() -> None:
    pool, chain = pool_of(3, events=True), request(2)
    blocks = pool.get_new_blocks(2)
    cache(pool, chain, blocks)
    pool.evict_blocks([0, blocks[1].block_id])
    assert pool.get_cached_block(chain.block_hashes[1], 0) is None
    assert pool.get_cached_block(chain.block_hashes[0], 0) is blocks[0]
    assert pool.take_events()[-1] == BlockRemoved(hashes=[chain.block_hashes[1]], group=0)
    assert blocks[1].ref_count == 1
    pool.check()


def test_events_say_parent_tokens_and_runs() -> None:
    pool, chain = pool_of(8, events=True), request(4, salt="tenant")
    blocks = pool.get_new_blocks(4)
    cache(pool, chain, [blocks[0], pool.null_block, *blocks[2:]], group=2)
    hashes = chain.block_hashes
    assert pool.take_events() == [
        BlockStored(hashes=hashes[:1], parent=b"", token_ids=[0, 1, 2, 3], block_size=4, group=2, salt="tenant"),
        BlockStored(
            hashes=hashes[2:], parent=hashes[1], token_ids=[*range(8, 16)], block_size=4, group=2, salt="tenant"
        ),
    ]
    assert pool.take_events() == []


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "KV_EVENTS_MAX", 3)
    pool, chain = pool_of(6, events=True), request(5)
    blocks = pool.get_new_blocks(5)
    for count in range(5):
        cache(pool, chain, blocks[: count + 1], first=count)
    known: set[bytes] = set(chain.block_hashes)
    for event in pool.take_events():
        apply(event, known)
    assert known == set(chain.block_hashes[3:]), "less than the engine has, and nothing it has not"


def apply(event: KVEvent, known: set[bytes]) -> None:
    match event:
        case BlockStored():
            known.update(event.hashes)
        case BlockRemoved():
            known.difference_update(event.hashes)
        case AllBlocksCleared():
            known.clear()
