"""From vLLM's KV cache configuration to the pool's layout: groups, block sizes, windows, fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from kvstrata.engine_adapter.connector.fingerprint import fingerprint_text
from kvstrata.engine_adapter.connector.kv_shards import shards_per_rank
from kvstrata.engine_adapter.connector.layout import GroupLayout, PoolLayout
from kvstrata.engine_adapter.vllm.identity import Identity
from kvstrata.proto.errors import InvalidArgument

#: Raise it when the order of the bytes in a pool block changes (see geometry.py).
PAGES_VERSION = 1

#: vLLM's specs whose blocks a prefix of tokens alone decides, by name: full attention, and sliding windows.
FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOW = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})


class Spec(Protocol):
    """What is read of ``vllm.v1.kv_cache_interface.KVCacheSpec``."""

    block_size: int

    @property
    def page_size_bytes(self) -> int: ...


class Group(Protocol):
    """What is read of ``KVCacheGroupSpec``."""

    layer_names: list[str]
    kv_cache_spec: Spec


class CacheConfig(Protocol):
    """What is read of ``KVCacheConfig``."""

    num_blocks: int
    kv_cache_groups: Sequence[Group]
    kv_cache_layout: str | None
    hash_block_size: int | None


def layer_specs(spec: Spec) -> list[Spec]:
    """The specs of a group's layers that differ: a group of one type may hold several sizes."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, dict) else [spec]


def poolable(spec: Spec) -> bool:
    """Whether tokens of a prefix alone decide the group's blocks. False for a state (Mamba) or an encoder's KV."""
    return all(
        type(each).__name__ in FULL | WINDOW and not getattr(each, "non_causal", False) for each in layer_specs(spec)
    )


def window_tokens(spec: Spec) -> int:
    """0 where a hit needs every block; else the window, the widest of the group's."""
    specs = layer_specs(spec)
    if any(type(each).__name__ not in WINDOW for each in specs):
        return 0
    return max(getattr(each, "sliding_window", 0) + getattr(each, "extra_retained_tokens", 0) for each in specs)


def kv_heads(group: Group) -> dict[str, int]:
    """KV heads that a rank has of each layer of a group; 0 where KV has no heads that could be told apart."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    specs = specs if isinstance(specs, dict) else dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: _heads(specs[name]) for name in group.layer_names}


def _heads(spec: Spec) -> int:
    """Slots of the cache that a layout counts by itself are no heads, also where they are as many: planes of K and V,
    say, with all heads in each."""
    heads: int = getattr(spec, "num_kv_heads", 0)
    apart = "MLA" not in type(spec).__name__ and getattr(spec, "num_head_slots", None) is None
    return heads if apart else 0


def rank_shards(config: CacheConfig, tensor_parallel: int, kv_shards: int) -> int:
    """Shards that a rank cuts the heads of a block into, for ``kv_shards`` over all ranks (0: one a rank).

    Raises :class:`InvalidArgument`, with what to choose instead, where they cannot be cut so.
    """
    replicas = max(1, getattr(config, "kv_tp_replicas", 1))
    if replicas > 1 and kv_shards:
        raise InvalidArgument(
            f"kv_shards is {kv_shards}, and {replicas} ranks each hold the same KV (MLA's), which is stored once and "
            "shared by engines of any tensor-parallel size: leave kv_shards out"
        )
    pooled = [group for group in config.kv_cache_groups if poolable(group.kv_cache_spec)]
    heads = {count for group in pooled for count in kv_heads(group).values()}
    each = shards_per_rank(kv_shards, tensor_parallel // replicas, sorted(heads))
    if any(group.kv_cache_spec.page_size_bytes % each for group in pooled):
        raise InvalidArgument(f"kv_shards is {kv_shards}: pages have parts that are no heads': leave kv_shards out")
    return each


def make_layout(
    config: CacheConfig,
    identity: Identity,
    *,
    hash_bytes: int,
    tensor_parallel: int,
    kv_shards: int = 0,
    block_bytes: Sequence[int] = (),
) -> PoolLayout:
    """The same for the scheduler and all ranks, but for ``block_bytes``, which a rank knows of its tensors (one entry
    a group) and the scheduler takes from the specs; and but for a group whose layers differ in size, of which vLLM
    tells the scheduler one layer's spec: its fingerprint and its bytes are the ranks' to say. KV that ranks hold alike,
    as vLLM counts it (of MLA, in 0.32), is one shard, so that engines of several sizes share it; other KV they share
    with equal ``kv_shards``, see :func:`rank_shards`, which raises."""
    groups = config.kv_cache_groups
    replicas = max(1, getattr(config, "kv_tp_replicas", 1))
    each = rank_shards(config, tensor_parallel, kv_shards)
    shards = tensor_parallel // replicas * each
    hash_block_tokens = config.hash_block_size or math.gcd(*(group.kv_cache_spec.block_size for group in groups))
    return PoolLayout(
        groups=tuple(
            GroupLayout(
                fingerprint=_fingerprint(config, index, identity, shards, each),
                block_tokens=group.kv_cache_spec.block_size,
                layers=len(group.layer_names),
                window_tokens=window_tokens(group.kv_cache_spec),
                poolable=poolable(group.kv_cache_spec),
                block_bytes=block_bytes[index] if block_bytes else _block_bytes(group),
            )
            for index, group in enumerate(groups)
        ),
        num_blocks=config.num_blocks,
        num_tensors=1,
        page_bytes=1,  # of no meaning: the engine's memory has tables of its own, and groups their block_bytes
        parts=1,
        hash_block_tokens=hash_block_tokens,
        hash_bytes=hash_bytes,
        aligned_tokens=math.lcm(*(group.kv_cache_spec.block_size for group in groups)),
        shard_count=shards,
        shards_per_rank=each,
        replicas=replicas,
    )


def _block_bytes(group: Group) -> int:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if isinstance(inner, dict):  # its page is all of its layers' together
        return group.kv_cache_spec.page_size_bytes
    return len(group.layer_names) * group.kv_cache_spec.page_size_bytes


def _fingerprint(config: CacheConfig, index: int, identity: Identity, shards: int, each: int) -> str:
    """``each`` of ``shards`` on a rank. What it says of a page is of one shard's, so that it is equal for engines that
    have one a rank."""
    group = config.kv_cache_groups[index]
    spec = group.kv_cache_spec
    page_bytes = spec.page_size_bytes // each
    kinds = "+".join(sorted({type(each).__name__ for each in layer_specs(spec)}))
    return fingerprint_text(
        ("model", identity.model),
        ("kv", identity.kv),
        ("pages", f"vllm/{PAGES_VERSION} {config.kv_cache_layout}"),
        ("hash", identity.hashes),
        ("group", f"{index} of {len(config.kv_cache_groups)}"),
        ("spec", f"{kinds}({spec.block_size} tokens, {page_bytes} bytes, window {window_tokens(spec)})"),
        ("shards", str(shards)),
        ("layers", ",".join(group.layer_names)),
    )
