"""Hits that all groups agree on, against a search over all lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.coordinator import KVCacheCoordinator
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.request import Request, SamplingParams

HASH_BLOCK = 2


def full(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=12 // block_size, head_size=2)


def sliding(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=12 // block_size, head_size=2, sliding_window=window)


def coordinator_of(specs: list[KVCacheSpec], num_blocks: int = 200) -> tuple[KVCacheCoordinator, BlockPool]:
    config = KVCacheConfig(
        num_blocks=num_blocks,
        groups=tuple(KVCacheGroup(layers=(layer,), spec=spec) for layer, spec in enumerate(specs)),
        max_model_len=256,
        max_num_batched_tokens=64,
    )
    pool = BlockPool(num_blocks, enable_prefix_caching=True)
    return KVCacheCoordinator(config.validated(), pool, HASH_BLOCK), pool


def fill(pool: BlockPool, owner: Request, group: int, block_size: int, present: set[int]) -> None:
    blocks = pool.get_new_blocks(owner.num_tokens // block_size)
    table = [block if index in present else pool.null_block for index, block in enumerate(blocks)]
    pool.cache_full_blocks(owner, table, 0, len(table), group, block_size, HASH_BLOCK)


def usable(spec: KVCacheSpec, present: set[int], end: int) -> bool:
    first = max(end - spec.sliding_window + 1, 0) if isinstance(spec, SlidingWindowSpec) else 0
    return {position // spec.block_size for position in range(first, end)} <= present


@given(data=st.data())
def test_the_hit_is_the_longest_that_every_group_can_use(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3))
    specs: list[KVCacheSpec] = [
        data.draw(
            st.one_of(st.just(full(size)), st.integers(1, 20).map(lambda window, size=size: sliding(size, window)))
        )
        for size in sizes
    ]
    owner = Request("r", range(50), SamplingParams(), BlockHasher(HASH_BLOCK))
    coordinator, pool = coordinator_of(specs)
    present = []
    for group, spec in enumerate(specs):
        holes = data.draw(st.sets(st.integers(0, 50 // spec.block_size), max_size=3))
        present.append(set(range(50 // spec.block_size)) - holes)
        fill(pool, owner, group, spec.block_size, present[-1])
    limit = data.draw(st.integers(0, 49))
    tables, hit = coordinator.find_longest_cache_hit(owner.block_hashes, limit)
    alignment = coordinator._alignment
    assert hit == next(
        end
        for end in range(limit // alignment * alignment, -1, -alignment)
        if all(usable(spec, there, end) for spec, there in zip(specs, present, strict=True))
    )
    for spec, there, table in zip(specs, present, tables, strict=True):
        assert len(table) * spec.block_size == hit
        assert all(block.is_null or index in there for index, block in enumerate(table))
        first = max(hit - spec.sliding_window + 1, 0) if isinstance(spec, SlidingWindowSpec) else 0
        assert not any(block.is_null for block in table[first // spec.block_size :])


def test_a_group_that_never_hits_ends_all_hits() -> None:
    state = MambaSpec(block_size=4, shapes=((2, 24),))
    coordinator, pool = coordinator_of([full(4), state])
    owner = Request("r", range(50), SamplingParams(), BlockHasher(HASH_BLOCK))
    fill(pool, owner, 0, 4, set(range(12)))
    assert coordinator.find_longest_cache_hit(owner.block_hashes, 48) == (([], []), 0)


def test_one_group_is_searched_once() -> None:
    coordinator, pool = coordinator_of([full(4)])
    owner = Request("r", range(50), SamplingParams(), BlockHasher(HASH_BLOCK))
    fill(pool, owner, 0, 4, {0, 1, 2, 4})
    asked = 0
    inner = coordinator.managers[0].find_longest_cache_hit

    def counting(hashes: list[bytes], max_tokens: int, alignment: int) -> object:
        nonlocal asked
        asked += 1
        return inner(hashes, max_tokens, alignment)

    coordinator.managers[0].find_longest_cache_hit = counting  # type: ignore[method-assign,assignment]
    assert coordinator.find_longest_cache_hit(owner.block_hashes, 49)[1] == 12 and asked == 1
