"""Blocks cut by heads: engines of every tensor-parallel size have the same bytes in each shard."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.connector import layout as connector_layout
from kvstrata.engine_adapter.connector.fingerprint import make_layout
from kvstrata.engine_adapter.connector.kv_shards import SHARDS_PER_RANK_MAX, shards_per_rank
from kvstrata.engine_adapter.connector.layout import BlockPieces, PoolLayout
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.ranks.kv_memory import KVMemory
from kvstrata.proto.errors import InvalidArgument

BLOCKS = 4
Bytes = npt.NDArray[np.uint8]


def cache_of(heads: int, head_size: int, layers: tuple[int, ...]) -> KVCacheConfig:
    """One group of full attention and, where there are two, one of windows whose blocks are half as long and twice
    as wide."""
    specs: list[KVCacheSpec] = [FullAttentionSpec(block_size=8, num_kv_heads=heads, head_size=head_size)]
    specs.append(SlidingWindowSpec(block_size=4, num_kv_heads=heads, head_size=2 * head_size, sliding_window=16))
    first, groups = 0, []
    for count, spec in zip(layers, specs, strict=False):
        groups.append(KVCacheGroup(tuple(range(first, first + count)), spec))
        first += count
    return KVCacheConfig(num_blocks=BLOCKS, groups=tuple(groups), max_model_len=64, max_num_batched_tokens=16)


def layout_of(cache: KVCacheConfig, ranks: int, kv_shards: int = 0) -> PoolLayout:
    return make_layout(
        cache,
        model_identity="m",
        hasher=BlockHasher(4),
        tensor_parallel=ranks,
        kv_dtype="float32",
        kv_shards=kv_shards,
    )


def gathered(memory: Bytes, rows: npt.NDArray[np.int64]) -> bytes:
    return b"".join(memory[start : start + length].tobytes() for start, length in rows.tolist())


def shards_of(
    heads: int, head_size: int, layers: tuple[int, ...], ranks: int, kv_shards: int, group: int
) -> dict[tuple[int, int], bytes]:
    """Bytes of each (shard, block) as ranks of one engine find them. What a head's numbers are is the model's."""
    found: dict[tuple[int, int], bytes] = {}
    for rank in range(ranks):
        cache = cache_of(heads // ranks, head_size, layers)
        plan = layout_of(cache, ranks, kv_shards)
        kv = KVMemory(cache)
        for layer in cache.groups[group].layers:
            pages = kv.layers[layer]  # [2, blocks, tokens, heads, head size]
            whole = np.arange(pages[..., :1, :].size * heads, dtype=np.float32) + 1e6 * layer
            whole = whole.reshape(*pages.shape[:3], heads, pages.shape[4])
            pages[...] = whole[..., rank * heads // ranks : (rank + 1) * heads // ranks, :]
        for index, shard in enumerate(plan.shards(rank)):
            if plan.shards_per_rank == 1:
                rows = plan.descriptors(group)
            else:
                rows = plan.shard_pieces(group, index).rows(np.arange(BLOCKS))
            assert (rows[:, :, 1].sum(axis=1) == plan.shard_bytes(group)).all()
            found |= {(shard, block): gathered(kv.buffer, rows[block]) for block in range(BLOCKS)}
    return found


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([4, 8]),
    head_size=st.sampled_from([2, 6]),
    layers=st.sampled_from([(1,), (3,), (2, 2), (3, 1)]),
    kv_shards=st.sampled_from([1, 2, 4]),
    group=st.integers(0, 1),
)
def test_engines_of_every_size_have_the_same_bytes_in_each_shard(
    heads: int, head_size: int, layers: tuple[int, ...], kv_shards: int, group: int
) -> None:
    group = min(group, len(layers) - 1)
    sizes = [ranks for ranks in (1, 2, 4) if ranks <= kv_shards]
    # As many ranks as shards: what engines have stored that know nothing of this.
    expected = shards_of(heads, head_size, layers, kv_shards, 0, group)
    assert sorted(expected) == [(shard, block) for shard in range(kv_shards) for block in range(BLOCKS)]
    plain = layout_of(cache_of(heads // kv_shards, head_size, layers), kv_shards)
    for ranks in sizes:
        assert shards_of(heads, head_size, layers, ranks, kv_shards, group) == expected
        plan = layout_of(cache_of(heads // ranks, head_size, layers), ranks, kv_shards)
        assert plan.groups == plain.groups, "another fingerprint"
        assert (plan.shard_count, plan.ranks) == (kv_shards, ranks)
        assert plan.shard_bytes(group) == plain.block_bytes(group)
        assert plan.layer_ends(group) == plain.layer_ends(group)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([4, 8]), layers=st.sampled_from([(1,), (3, 2)]), each=st.sampled_from([2, 4]), data=st.data()
)
def test_shards_name_each_byte_of_a_block_once(
    heads: int, layers: tuple[int, ...], each: int, data: st.DataObject
) -> None:
    group = data.draw(st.integers(0, len(layers) - 1))
    plan = layout_of(cache_of(heads, 4, layers), 1, each)
    block = data.draw(st.integers(0, BLOCKS - 1))

    def named(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(start, start + length) for start, length in rows.tolist()])

    pieces = [plan.shard_pieces(group, index).rows(np.array([block]))[0] for index in range(each)]
    found = np.concatenate([named(rows) for rows in pieces])
    assert len(np.unique(found)) == len(found)
    assert (np.sort(found) == np.sort(named(plan.descriptors(group)[block]))).all()


def test_neighbours_that_touch_in_every_block_are_one_piece() -> None:
    eight = np.full(3, 8, np.int64)
    whole = BlockPieces(np.array([0, 8, 32]), np.full(3, 64), eight)
    other = BlockPieces(np.array([40, 48, 56]), np.array([64, 32, 32]), eight)
    joined = BlockPieces.joined([whole, other])
    assert joined.rows(np.array([0, 1])).tolist() == [
        [[0, 16], [32, 16], [48, 16]],
        [[64, 16], [96, 16], [80, 16]],
    ]


def test_without_it_nothing_is_other_than_before() -> None:
    cache = cache_of(2, 4, (2,))
    for kv_shards in (0, 2):
        plan = layout_of(cache, 2, kv_shards)
        assert plan == layout_of(cache, 2) and plan.shards_per_rank == 1
        assert "num_kv_heads=2" in plan.groups[0].fingerprint
    assert layout_of(cache, 1, 2).groups != layout_of(cache, 1).groups


@pytest.mark.parametrize(
    ("kv_shards", "ranks", "heads", "expected"),
    [
        (3, 2, [4], "kv_shards is 3: expected a multiple of the tensor-parallel size, which is 2: choose the largest"),
        (2, 4, [1], "expected a multiple of the tensor-parallel size, which is 4"),
        (8, 2, [2], "the 2 KV heads of a rank cannot be cut into 4 shards: choose a multiple of 2 that divides 4"),
        (8, 4, [1], "the 1 KV heads of a rank"),  # fewer heads than ranks: several ranks have the same one
        (4, 2, [4, 3], "the 3 KV heads of a rank"),
        (4, 2, [0], "MLA.*leave kv_shards out"),
        (64, 1, [64], f"at most {SHARDS_PER_RANK_MAX} for each of 1 ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_to_choose(
    kv_shards: int, ranks: int, heads: list[int], expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        shards_per_rank(kv_shards, ranks, heads)


def test_blocks_in_more_pieces_than_a_call_may_name_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call would be."""
    cache, tokens = cache_of(4, 4, (3,)), 8
    monkeypatch.setattr(connector_layout, "PIECES_MAX", 3 * 2 * tokens)
    assert len(layout_of(cache, 1, 2).shard_pieces(0, 0).offsets) == 3 * 2 * tokens
    monkeypatch.setattr(connector_layout, "PIECES_MAX", 3 * 2 * tokens - 1)
    with pytest.raises(InvalidArgument, match=r"in 48 pieces, and 47 is the most.*leave kv_shards out"):
        layout_of(cache, 1, 2)
    layout_of(cache, 2, 2)
    monkeypatch.setattr(connector_layout, "PIECES_MAX", 3 * 2 - 1)
    with pytest.raises(InvalidArgument, match=r"in 6 pieces.*: choose smaller blocks"):
        layout_of(cache, 1)


def test_a_latent_cannot_be_cut() -> None:
    group = KVCacheGroup((0, 1), MLASpec(block_size=4, latent_size=32))
    cache = KVCacheConfig(num_blocks=BLOCKS, groups=(group,), max_model_len=64, max_num_batched_tokens=16)
    assert layout_of(cache, 1).parts == 1
    with pytest.raises(InvalidArgument, match="MLA"):
        layout_of(cache, 1, 2)
