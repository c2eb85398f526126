"""From vLLM's KV cache groups to the pool's layout, and what engines must agree on to share blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.vllm.identity import Identity, engine_identity, model_identity, weights_digest
from kvstrata.engine_adapter.vllm.layout import kv_heads, make_layout
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.vllm.stand_ins import (
    CacheGroup,
    Drafts,
    FullAttentionSpec,
    HfConfig,
    KVCacheConfig,
    LoadConfig,
    MLAAttentionSpec,
    ModelConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


@dataclass
class OlderDrafts:
    """``SpeculativeConfig`` of a vLLM that has less."""

    draft_model_config: ModelConfig | None


IDENTITY = Identity(model="m", kv="float32/auto/cpu", hashes="vllm 0.32/sha256_cbor")


def layout_of(
    *groups: CacheGroup,
    identity: Identity = IDENTITY,
    kv_layout: str = "LBHNC",
    ranks: int = 2,
    replicas: int = 1,
    kv_shards: int = 0,
) -> PoolLayout:
    config = KVCacheConfig(list(groups), kv_cache_layout=kv_layout, kv_tp_replicas=replicas)
    return make_layout(config, identity, hash_bytes=32, tensor_parallel=ranks, kv_shards=kv_shards)


def test_one_group() -> None:
    layout = layout_of(CacheGroup(["a", "b"], FullAttentionSpec()))
    assert layout.block_bytes(0) == 256
    assert (layout.hash_block_tokens, layout.hash_bytes, layout.aligned_tokens, layout.shard_count) == (16, 32, 16, 2)
    assert layout.groups[0].poolable and layout.groups[0].window_tokens == 0


def test_a_window_beside_full_attention() -> None:
    layout = layout_of(
        CacheGroup(["a"], FullAttentionSpec(block_size=32)), CacheGroup(["b"], SlidingWindowSpec(block_size=16))
    )
    assert [group.window_tokens for group in layout.groups] == [0, 32]
    assert layout.aligned_tokens == 32
    assert layout.groups[0].fingerprint != layout.groups[1].fingerprint


def test_layers_of_several_sizes_in_one_group() -> None:
    specs = {"a": MLAAttentionSpec(page_size_bytes=100), "b": MLAAttentionSpec(page_size_bytes=28)}
    layout = layout_of(CacheGroup(["a", "b"], UniformTypeKVCacheSpecs(specs)))
    assert layout.block_bytes(0) == 128 and layout.groups[0].poolable


def test_a_rank_says_how_many_bytes_its_blocks_have() -> None:
    config = KVCacheConfig([CacheGroup(["a", "b"], FullAttentionSpec())])
    layout = make_layout(config, IDENTITY, hash_bytes=32, tensor_parallel=1, block_bytes=[4096])
    assert layout.block_bytes(0) == 4096


@pytest.mark.parametrize(
    "other",
    [
        layout_of(CacheGroup(["a"], FullAttentionSpec()), identity=Identity("n", IDENTITY.kv, IDENTITY.hashes)),
        layout_of(CacheGroup(["a"], FullAttentionSpec()), identity=Identity("m", "bfloat16", IDENTITY.hashes)),
        layout_of(CacheGroup(["a"], FullAttentionSpec()), identity=Identity("m", IDENTITY.kv, "vllm 0.31")),
        layout_of(CacheGroup(["a"], FullAttentionSpec()), kv_layout="LBNHC"),
        layout_of(CacheGroup(["b"], FullAttentionSpec())),
        layout_of(CacheGroup(["a"], FullAttentionSpec(block_size=32))),
        layout_of(CacheGroup(["a"], FullAttentionSpec(page_size_bytes=256))),
        layout_of(CacheGroup(["a"], FullAttentionSpec()), ranks=4),
        layout_of(CacheGroup(["a"], SlidingWindowSpec())),
        layout_of(CacheGroup(["a"], FullAttentionSpec()), CacheGroup(["b"], FullAttentionSpec())),
    ],
)
def test_whatever_differs_shares_nothing(other: PoolLayout) -> None:
    mine = layout_of(CacheGroup(["a"], FullAttentionSpec()))
    assert other.groups[0].fingerprint != mine.groups[0].fingerprint


def test_kv_that_ranks_hold_alike_is_one_shard_for_engines_of_any_size() -> None:
    four = layout_of(CacheGroup(["a"], MLAAttentionSpec()), ranks=4, replicas=4)
    one = layout_of(CacheGroup(["a"], MLAAttentionSpec()), ranks=1)
    assert (four.shard_count, four.replicas, four.ranks) == (1, 4, 4)
    assert four.groups[0].fingerprint == one.groups[0].fingerprint
    pairs = layout_of(CacheGroup(["a"], FullAttentionSpec()), ranks=4, replicas=2)
    assert (pairs.shard_count, pairs.ranks) == (2, 4)


def make_folder(path: Path, weights: bytes) -> str:
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    (path / "model.safetensors").write_bytes(weights)
    return str(path)


def test_weights_are_told_by_content_not_by_path(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 512
    one = model_identity(ModelConfig(make_folder(tmp_path / "one", weights)), "auto")
    two = model_identity(ModelConfig(make_folder(tmp_path / "two", weights)), "auto")
    changed = model_identity(ModelConfig(make_folder(tmp_path / "three", weights[:-1] + b"x")), "auto")
    assert one == two != changed


def test_small_and_empty_files_are_read_whole(tmp_path: Path) -> None:
    digests = {weights_digest(Path(make_folder(tmp_path / str(size), b"x" * size))) for size in (0, 1, 2)}
    assert len(digests) == 3


def test_a_name_counts_with_its_revision() -> None:
    plain, revised = ModelConfig("org/model"), ModelConfig("org/model", revision="abc")
    assert model_identity(plain, "auto") != model_identity(revised, "auto")
    quantized = ModelConfig("org/model", quantization="fp8")
    assert model_identity(plain, "auto") != model_identity(quantized, "auto")


def test_an_overridden_configuration_is_another_model_and_a_version_is_not() -> None:
    base = ModelConfig("org/model", hf_config=HfConfig(rope_theta=1e4, transformers_version="4"))
    same = ModelConfig("org/model", hf_config=HfConfig(rope_theta=1e4, transformers_version="5"))
    other = ModelConfig("org/model", hf_config=HfConfig(rope_theta=5e5, transformers_version="4"))
    assert model_identity(base, "auto") == model_identity(same, "auto") != model_identity(other, "auto")


def test_a_namespace_replaces_name_and_weights_only() -> None:
    one, two = ModelConfig("org/one"), ModelConfig("org/two")
    assert model_identity(one, "auto", "ours") == model_identity(two, "auto", "ours")
    assert model_identity(one, "auto", "ours") != model_identity(one, "auto", "theirs")


def test_random_weights_are_told_by_their_seed() -> None:
    one, two = ModelConfig("org/one"), ModelConfig("org/one", seed=1)
    assert model_identity(one, "dummy") != model_identity(two, "dummy")
    assert model_identity(one, "dummy", ranks=1) != model_identity(one, "dummy", ranks=2), "each rank draws its own"
    assert model_identity(one, "auto", ranks=1) == model_identity(one, "auto", ranks=2)


def test_a_model_that_drafts_counts_where_its_kv_is_in_the_blocks(tmp_path: Path) -> None:
    model, one, other = (ModelConfig(make_folder(tmp_path / name, name.encode())) for name in ("model", "one", "other"))
    alone = engine_identity(model, None, "auto")
    assert alone == model_identity(model, "auto")
    assert engine_identity(model, Drafts(one, has_kv=False), "auto") == alone, "it looks words up, say"
    both = {engine_identity(model, Drafts(drafter), "auto") for drafter in (one, other)}
    assert len(both | {alone}) == 3


def test_a_model_that_drafts_for_itself_may_be_another_by_revision_quantization_and_how_it_is_loaded() -> None:
    model = ModelConfig("org/model", revision="r1")
    drafts = [
        Drafts(model),
        Drafts(ModelConfig("org/model", revision="r2")),
        Drafts(ModelConfig("org/model", revision="r1", quantization="fp8")),
        Drafts(model, LoadConfig("dummy")),
    ]
    found = [engine_identity(model, each, "auto") for each in drafts]
    assert len({*found, engine_identity(model, None, "auto")}) == 5
    assert engine_identity(model, Drafts(model, LoadConfig("safetensors")), "auto") == found[0]
    named = [engine_identity(model, each, "auto", "ours") for each in drafts[:2]]
    assert named[0] == named[1], "the namespace stands for both models"


def test_a_vllm_that_does_not_tell_where_drafts_have_their_kv_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="speculative config has no draft_load_config, uses_draft_kv_cache"):
        engine_identity(ModelConfig("org/model"), OlderDrafts(None), "auto")  # type: ignore[arg-type]


def spec_of(heads: int, **more: int) -> FullAttentionSpec:
    return FullAttentionSpec(page_size_bytes=64 * heads, num_kv_heads=heads, **more)


def test_engines_of_every_size_with_equal_shards_share_blocks() -> None:
    plans = {
        ranks: layout_of(CacheGroup(["a", "b"], spec_of(8 // ranks)), ranks=ranks, kv_shards=8)
        for ranks in (1, 2, 4, 8)
    }
    without = layout_of(CacheGroup(["a", "b"], spec_of(1)), ranks=8)
    for ranks, plan in plans.items():
        assert (plan.shard_count, plan.shards_per_rank, plan.ranks) == (8, 8 // ranks, ranks)
        assert plan.groups[0].fingerprint == without.groups[0].fingerprint, "what was stored without it is of no use"
        assert plan.shard_bytes(0) == without.block_bytes(0) == 128
    assert layout_of(CacheGroup(["a", "b"], spec_of(8)), ranks=1).groups[0].fingerprint != without.groups[0].fingerprint


def test_shards_of_layers_that_differ_in_heads() -> None:
    specs = {"a": spec_of(4), "b": spec_of(2)}
    assert kv_heads(CacheGroup(["a", "b"], UniformTypeKVCacheSpecs(specs))) == {"a": 4, "b": 2}
    plan = layout_of(CacheGroup(["a", "b"], UniformTypeKVCacheSpecs(specs)), ranks=2, kv_shards=4)
    assert (plan.shard_bytes(0), plan.shards_per_rank) == (3 * 64, 2)


@pytest.mark.parametrize(
    ("group", "ranks", "replicas", "kv_shards", "expected"),
    [
        (CacheGroup(["a"], spec_of(2)), 2, 1, 3, "a multiple of the tensor-parallel size"),
        (CacheGroup(["a"], spec_of(1)), 8, 1, 16, "the 1 KV heads of a rank cannot be cut into 2"),
        (CacheGroup(["a"], MLAAttentionSpec(num_kv_heads=1)), 1, 1, 2, "MLA.*leave kv_shards out"),
        (CacheGroup(["a"], MLAAttentionSpec(num_kv_heads=1)), 2, 2, 2, "each hold the same KV.*leave kv_shards out"),
        (CacheGroup(["a"], spec_of(4, num_head_slots=8)), 1, 1, 2, "without heads of its own"),
        (CacheGroup(["a"], spec_of(2, num_head_slots=2)), 4, 1, 8, "without heads of its own"),
        (
            CacheGroup(["a"], FullAttentionSpec(page_size_bytes=129, num_kv_heads=2)),
            1,
            1,
            2,
            "parts that are no heads'",
        ),
    ],
)
def test_heads_that_cannot_be_cut_are_refused(
    group: CacheGroup, ranks: int, replicas: int, kv_shards: int, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        layout_of(group, ranks=ranks, replicas=replicas, kv_shards=kv_shards)
