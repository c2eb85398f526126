"""What makes a group's KV bytes interchangeable, as one readable text, and the layout that carries it.

::

    model=<identity>; kv=float32; pages=1; hash=chain1/sha256/16; group=0 of 2; spec=full(...); layers=8(0-7)

The text is the *group* of a pool namespace; shard, shard count, block bytes, block tokens and the hashes' width
stand beside it there. It depends on nothing of the process or the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvstrata.engine_adapter.connector.kv_shards import shards_per_rank
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout, check_pieces
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MLASpec,
    SlidingWindowSpec,
)
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import GROUP_CHARACTERS_MAX

#: Raise it when the order of the bytes in a pool block changes (see connector/layout.py).
PAGES_VERSION: Final = 1
#: A part longer than this is replaced by its beginning and its digest.
PART_CHARACTERS_MAX: Final = 200


def make_layout(
    kv_config: KVCacheConfig,
    *,
    model_identity: str,
    hasher: BlockHasher,
    tensor_parallel: int,
    kv_dtype: str,
    kv_shards: int = 0,
) -> PoolLayout:
    """How this engine's KV memory maps to blocks of the pool; the same on every rank.

    ``model_identity`` names all that decides the KV of a token but what is in ``kv_config``: weights, revision,
    arithmetic. ``kv_shards``: into how many shards of heads blocks are cut, over all ranks; 0: one a rank. Engines of
    different ``tensor_parallel`` and equal ``kv_shards`` have equal fingerprints. Raises :class:`InvalidArgument` when
    blocks cannot be named by the hasher's hashes, when one buffer cannot hold the groups, when heads cannot be cut
    so, and when a block has too many pieces then.
    """
    if tensor_parallel < 1:
        raise InvalidArgument(f"tensor_parallel is {tensor_parallel}: expected at least 1")
    for group in kv_config.groups:
        if group.spec.block_size % hasher.block_tokens:
            raise InvalidArgument(
                f"a group has blocks of {group.spec.block_size} tokens, which hash blocks of {hasher.block_tokens} "
                "do not divide: hash with a common divisor of all block sizes"
            )
    parts = _parts([group.spec for group in kv_config.groups])
    if kv_config.page_size_bytes % parts:
        raise InvalidArgument(f"a page of {kv_config.page_size_bytes} bytes has no equal K and V halves")
    pooled = [group.spec for group in kv_config.groups if poolable(group.spec)]
    heads = [spec.num_kv_heads if isinstance(spec, FullAttentionSpec) else 0 for spec in pooled]
    each = shards_per_rank(kv_shards, tensor_parallel, heads)
    for group in kv_config.groups:
        if poolable(group.spec):
            check_pieces(len(group.layers) * parts * (group.spec.block_size if each > 1 else 1), each)
    groups = tuple(
        GroupLayout(
            fingerprint=group_fingerprint(
                KVCacheGroup(group.layers, _of_one_shard(group.spec, each)),
                index=index,
                groups=len(kv_config.groups),
                model_identity=model_identity,
                hash_scheme=hasher.scheme,
                kv_dtype=kv_dtype,
            ),
            block_tokens=group.spec.block_size,
            layers=len(group.layers),
            window_tokens=group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else 0,
            poolable=poolable(group.spec),
        )
        for index, group in enumerate(kv_config.groups)
    )
    return PoolLayout(
        groups=groups,
        num_blocks=kv_config.num_blocks,
        num_tensors=kv_config.num_tensors,
        page_bytes=kv_config.page_size_bytes,
        parts=parts,
        hash_block_tokens=hasher.block_tokens,
        hash_bytes=hasher.hash_bytes,
        aligned_tokens=kv_config.aligned_tokens,
        shard_count=tensor_parallel * each,
        shards_per_rank=each,
    )


def group_fingerprint(
    group: KVCacheGroup, *, index: int, groups: int, model_identity: str, hash_scheme: str, kv_dtype: str
) -> str:
    """At most 1024 characters that are equal exactly when the group's bytes are interchangeable (but the shard).
    ``group``: with the heads of one shard."""
    return fingerprint_text(
        ("model", model_identity),
        ("kv", kv_dtype),
        ("pages", str(PAGES_VERSION)),
        ("hash", hash_scheme),
        ("group", f"{index} of {groups}"),
        ("spec", _spec_text(group.spec)),
        ("layers", f"{len(group.layers)}({_ranges(group.layers)})"),
    )


def fingerprint_text(*parts: tuple[str, str]) -> str:
    """``name=value; ...``: one readable text for (name, value) pairs, equal exactly when they are. Long values
    are replaced by their beginning and a digest."""
    # A value that holds a separator could pass for two parts: it is digested, as a long one is.
    text = "; ".join(f"{name}={_shortened(value)}" for name, value in parts)
    assert len(text) <= GROUP_CHARACTERS_MAX, text
    return text


def poolable(spec: KVCacheSpec) -> bool:
    """Whether tokens of a prefix alone decide the block, and a hit needs a leading run or a window of them.

    False for a state (Mamba), an encoder's KV (cross attention), and chunked-local attention, whose tables have no
    blocks before the chunk that a prefix would need.
    """
    return type(spec) in (FullAttentionSpec, SlidingWindowSpec, MLASpec)


def _of_one_shard(spec: KVCacheSpec, shards: int) -> KVCacheSpec:
    """What a rank's spec would be if it had one of its ``shards`` alone."""
    if shards == 1 or not poolable(spec) or not isinstance(spec, FullAttentionSpec):
        return spec
    return msgspec.structs.replace(spec, num_kv_heads=spec.num_kv_heads // shards)


def _parts(specs: Sequence[KVCacheSpec]) -> Literal[1, 2]:
    """1 where all pages are one latent, 2 where all are K and V."""
    kinds = {isinstance(spec, MLASpec) for spec in specs if poolable(spec)}
    if len(kinds) > 1:
        raise InvalidArgument("latent (MLA) and K/V groups cannot share tensors: give them pools of their own")
    return 1 if kinds == {True} else 2


def _spec_text(spec: KVCacheSpec) -> str:
    fields = msgspec.to_builtins(spec)
    assert isinstance(fields, dict)
    kind = fields.pop("kind")
    return f"{kind}({', '.join(f'{name}={fields[name]}' for name in sorted(fields))})"


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3,6,8-9`` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _shortened(value: str) -> str:
    if len(value) <= PART_CHARACTERS_MAX and ";" not in value and "~" not in value:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:40]
    return f"{value[:64].replace(';', ',')}~{digest}"
