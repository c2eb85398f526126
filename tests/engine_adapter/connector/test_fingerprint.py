"""The namespace's fingerprint: readable, stable, and another for every difference that matters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvstrata.engine_adapter.connector.fingerprint import make_layout
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import GROUP_CHARACTERS_MAX, Namespace


def full(**change: object) -> FullAttentionSpec:
    return FullAttentionSpec(**({"block_size": 16, "num_kv_heads": 2, "head_size": 32} | change))  # type: ignore[arg-type]


def window(tokens: int = 64, **change: object) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        **({"block_size": 16, "num_kv_heads": 2, "head_size": 32, "sliding_window": tokens} | change)  # type: ignore[arg-type]
    )


def config(*groups: tuple[tuple[int, ...], KVCacheSpec]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        groups=tuple(KVCacheGroup(layers, spec) for layers, spec in groups),
        max_model_len=512,
        max_num_batched_tokens=64,
    )


def layout(*groups: tuple[tuple[int, ...], KVCacheSpec], **change: object) -> PoolLayout:
    values = {
        "model_identity": "random/tiny/0/512/numerics1",
        "hasher": BlockHasher(16),
        "tensor_parallel": 1,
        "kv_dtype": "float32",
    }
    return make_layout(config(*(groups or (((0, 1, 2, 3), full()),))), **(values | change))  # type: ignore[arg-type]


def identity(made: PoolLayout, group: int = 0) -> bytes:
    """What the pool compares: all of a namespace."""
    return (
        Namespace(
            group=made.groups[group].fingerprint,
            block_bytes=made.block_bytes(group),
            block_tokens=made.groups[group].block_tokens,
            hash_bytes=made.hash_bytes,
            shard_count=made.shard_count,
        )
        .validated()
        .identity
    )


def test_the_text_is_readable_and_complete() -> None:
    made = layout(((0, 1, 2, 5), full()), ((3, 4), window()))
    assert made.groups[0].fingerprint == (
        "model=random/tiny/0/512/numerics1; kv=float32; pages=1; hash=chain1/sha256/16; group=0 of 2; "
        "spec=full(block_size=16, dtype=float32, head_size=32, num_kv_heads=2); layers=4(0-2,5)"
    )
    assert "spec=sliding_window(" in made.groups[1].fingerprint and "sliding_window=64" in made.groups[1].fingerprint
    assert [(g.layers, g.window_tokens, g.poolable) for g in made.groups] == [(4, 0, True), (2, 64, True)]
    assert (made.num_tensors, made.parts, made.hash_bytes, made.aligned_tokens) == (4, 2, 32, 16)


def test_any_difference_that_matters_gives_another_key() -> None:
    layers = (0, 1, 2, 3)
    made = [
        layout(),
        layout(model_identity="random/tiny/1/512/numerics1"),
        layout(model_identity="random/tiny/0/512/numerics2"),
        layout(kv_dtype="float16"),
        layout((layers, full(dtype="float16", head_size=64)), kv_dtype="float32"),
        layout((layers, full(num_kv_heads=4, head_size=16))),
        layout((layers, full(block_size=32, head_size=16)), hasher=BlockHasher(16)),
        layout((layers, window())),
        layout((layers, window(65))),
        layout(((0, 1, 2, 4), full())),
        layout(((0, 1, 2), full())),
        layout((layers, full()), ((4,), full())),
        layout(hasher=BlockHasher(8)),
        layout(hasher=BlockHasher(16, "xxh3-128")),
        layout(tensor_parallel=2),
        layout((layers, MLASpec(block_size=16, latent_size=128))),
    ]
    assert len({identity(one) for one in made}) == len(made)
    two = layout(((0, 1), full()), ((2, 3), full()))
    assert identity(two, 0) != identity(two, 1)


def test_what_does_not_matter_gives_the_same_key() -> None:
    bigger = KVCacheConfig(
        num_blocks=999,
        groups=(KVCacheGroup((0, 1, 2, 3), full()),),
        max_model_len=4096,
        max_num_batched_tokens=512,
    )
    made = make_layout(
        bigger,
        model_identity="random/tiny/0/512/numerics1",
        hasher=BlockHasher(16),
        tensor_parallel=1,
        kv_dtype="float32",
    )
    assert identity(made) == identity(layout())


def test_long_and_odd_parts_are_digested_and_stay_apart() -> None:
    names = ["m" * 5000, "m" * 5001, "a; kv=float16", "a", "x~y"]
    texts = [layout(model_identity=name).groups[0].fingerprint for name in names]
    assert len(set(texts)) == len(names) and max(map(len, texts)) <= GROUP_CHARACTERS_MAX
    assert all(text.count("; ") == 6 for text in texts)
    # A name that looks like the digest of another is digested itself.
    assert layout(model_identity=texts[0].split("; ")[0].removeprefix("model=")).groups[0].fingerprint != texts[0]
    odd = layout((tuple(range(0, 2000, 2)), full()), model_identity="m" * 5000, kv_dtype="d" * 300)
    assert len(odd.groups[0].fingerprint) <= GROUP_CHARACTERS_MAX


@pytest.mark.parametrize(
    "spec",
    [
        MambaSpec(block_size=16, shapes=((64, 32),)),
        CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, max_encoder_len=100),
        ChunkedLocalSpec(block_size=16, num_kv_heads=2, head_size=32, chunk_size=64),
    ],
)
def test_what_a_prefix_does_not_determine_is_not_pooled(spec: KVCacheSpec) -> None:
    made = layout(((0, 1), full()), ((2,), spec))
    assert [group.poolable for group in made.groups] == [True, False]


def test_latents_are_one_part() -> None:
    assert layout(((0,), MLASpec(block_size=16, latent_size=128))).parts == 1


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: layout(((0,), full(block_size=8)), hasher=BlockHasher(16)), "do not divide"),
        (lambda: layout(((0,), full()), ((1,), MLASpec(block_size=16, latent_size=128))), "MLA"),
        (lambda: layout(tensor_parallel=0), "tensor_parallel"),
    ],
)
def test_what_cannot_be_named_is_refused(build: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        build()  # type: ignore[operator]


PROBE = """
from kvstrata.engine_adapter.connector.fingerprint import make_layout
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import *
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheGroup
groups = (
    KVCacheGroup((0, 2), FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32)),
    KVCacheGroup((1, 3), SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=32, sliding_window=64)),
)
made = make_layout(
    KVCacheConfig(num_blocks=10, groups=groups, max_model_len=512, max_num_batched_tokens=64),
    model_identity="m" * 999, hasher=BlockHasher(16), tensor_parallel=2, kv_dtype="float32",
)
print(*[group.fingerprint for group in made.groups], sep="\\n")
"""


def test_the_key_does_not_depend_on_the_process() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(seen) == 1 and "group=1 of 2" in seen.pop()
