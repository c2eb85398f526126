"""Layers to groups, memory to blocks, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.cache.capacity import (
    blocks_for_request,
    group_layers,
    longest_that_fits,
    plan_kv_cache,
)
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvstrata.proto.errors import InvalidArgument

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8)
SWA = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, sliding_window=64)
PAGE = 2 * 16 * 2 * 8 * 4


def layers_of(specs: list[KVCacheSpec]) -> list[tuple[int, ...]]:
    return [group.layers for group in group_layers(specs)]


def test_layers_with_equal_specs_are_one_group() -> None:
    assert layers_of([FULL] * 3) == [(0, 1, 2)]
    assert layers_of([SWA, FULL, SWA, FULL]) == [(0, 2), (1, 3)]


def test_a_kind_with_many_more_layers_is_split() -> None:
    assert layers_of([SWA] * 5 + [FULL]) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    groups = group_layers(([SWA] * 5 + [FULL]) * 5)
    assert [len(group.layers) for group in groups] == [5] * 6
    assert sorted(layer for group in groups for layer in group.layers) == [*range(30)]
    assert [group.spec for group in groups] == [SWA] * 5 + [FULL]


def test_kinds_of_nearly_one_size_stay_whole() -> None:
    assert [len(group) for group in layers_of([SWA] * 8 + [FULL] * 7)] == [8, 7]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_no_grouping_wastes_more_than_whole_kinds_would(counts: list[int]) -> None:
    kinds: list[KVCacheSpec] = [
        FULL,
        SWA,
        SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, sliding_window=32),
    ]
    specs = [kind for kind, count in zip(kinds, counts, strict=False) for _ in range(count)]
    groups = group_layers(specs)
    size = max(len(group.layers) for group in groups)
    assert size * len(groups) <= max(counts) * len(counts)
    assert sorted(layer for group in groups for layer in group.layers) == [*range(len(specs))]
    assert all(specs[layer] == group.spec for group in groups for layer in group.layers)


def test_pages_must_be_equal_and_layers_must_be() -> None:
    other = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8)
    with pytest.raises(InvalidArgument, match=f"{PAGE}.*{2 * PAGE}"):
        group_layers([FULL, other])
    with pytest.raises(InvalidArgument, match="no layers"):
        group_layers([])
    halved = FullAttentionSpec(block_size=8, num_kv_heads=4, head_size=8)
    assert layers_of([FULL, halved]) == [(0,), (1,)]


def test_memory_becomes_as_many_blocks_as_fit() -> None:
    config = plan_kv_cache(
        [SWA, FULL] * 2, memory_bytes=100 * 2 * PAGE - 1, max_model_len=256, max_num_batched_tokens=64
    )
    assert config.num_tensors == 2 and config.num_blocks == 99
    given_blocks = plan_kv_cache([FULL], num_blocks=20, memory_bytes=1, max_model_len=256, max_num_batched_tokens=64)
    assert given_blocks.num_blocks == 20


def test_one_longest_request_must_fit_and_the_error_says_what_would() -> None:
    # 256 tokens are 16 blocks, and the null block.
    assert plan_kv_cache([FULL], num_blocks=17, max_model_len=256, max_num_batched_tokens=64).num_blocks == 17
    with pytest.raises(InvalidArgument) as error:
        plan_kv_cache([FULL], memory_bytes=16 * PAGE + 5, max_model_len=256, max_num_batched_tokens=64)
    for number in (256, 17 * PAGE, 16 * PAGE + 5, 240):
        assert str(number) in str(error.value)
    with pytest.raises(InvalidArgument, match="at most 0"):
        plan_kv_cache([FULL], memory_bytes=1, max_model_len=256, max_num_batched_tokens=64)
    with pytest.raises(InvalidArgument, match="at least 1"):
        plan_kv_cache([FULL], num_blocks=20, max_model_len=0, max_num_batched_tokens=64)


@given(blocks=st.integers(2, 60), step=st.integers(1, 300), window=st.integers(1, 100))
def test_the_longest_that_fits_is_the_longest(blocks: int, step: int, window: int) -> None:
    specs = [FULL, SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, sliding_window=window)]
    groups = group_layers(specs)
    longest = longest_that_fits(groups, blocks, 2048, step)
    assert longest == 0 or blocks_for_request(groups, longest, step) <= blocks - 1
    assert longest == 2048 or blocks_for_request(groups, longest + 1, step) > blocks - 1


def test_bounds_by_kind() -> None:
    heads = {"num_kv_heads": 2, "head_size": 8}
    swa = SlidingWindowSpec(block_size=16, sliding_window=33, **heads)
    assert FULL.max_blocks(1000, 64) == 63 == MLASpec(block_size=16, latent_size=8).max_blocks(1000, 64)
    assert swa.max_blocks(1000, 64) == 7, "32 before the step, 64 in it, cut inside a block"
    assert swa.max_blocks(1000, 1) == 5, "the windows before and after a load"
    assert swa.max_blocks(20, 64) == 2
    assert ChunkedLocalSpec(block_size=16, chunk_size=32, **heads).max_blocks(1000, 64) == 7
    assert ChunkedLocalSpec(block_size=16, chunk_size=32, **heads).max_blocks(1000, 1) == 5
    assert CrossAttentionSpec(block_size=16, max_encoder_len=100, **heads).max_blocks(1000, 64) == 7
    assert MambaSpec(block_size=16, shapes=((2, 2),)).max_blocks(1000, 64) == 1
    assert FULL.max_memory_usage_bytes(1000, 64) == 63 * PAGE
