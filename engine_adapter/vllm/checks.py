"""What must hold at the start: settings under which no block would ever be found again are refused, with the remedy."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata.engine_adapter.vllm.layout import CacheConfig, poolable, rank_shards
from kvstrata.proto.errors import InvalidArgument

#: Hash algorithms that give equal bytes in every process, and the width of their hashes.
HASH_BYTES: Final = {"sha256_cbor": 32, "xxhash_cbor": 16}
#: Not cryptographic: vLLM seeds these anew in each process, unless PYTHONHASHSEED says how.
SEEDED: Final = frozenset({"xxhash_cbor"})
SEED_VARIABLE: Final = "PYTHONHASHSEED"


class CacheSettings(Protocol):
    """What is read of vLLM's ``CacheConfig``."""

    enable_prefix_caching: bool
    prefix_caching_hash_algo: str


class ParallelSettings(Protocol):
    """What is read of ``ParallelConfig``."""

    tensor_parallel_size: int
    pipeline_parallel_size: int


@dataclass(slots=True)
class Findings:
    """``refused``: nothing would ever be found, or the wrong thing. ``warnings``: it will work, with a catch."""

    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def raise_refused(self) -> None:
        """Raise :class:`InvalidArgument` with all of them."""
        if self.refused:
            raise InvalidArgument("kvstrata cannot work with these settings: " + "; ".join(self.refused))


def check_start(
    cache: CacheSettings,
    parallel: ParallelSettings,
    kv: CacheConfig,
    *,
    failure_policy: str,
    loads: bool,
    kv_shards: int = 0,
) -> Findings:
    """Look at everything, so that one start names all that is to be changed."""
    found = Findings()
    _check_hashes(cache, found)
    _check_parallel(parallel, found)
    _check_groups(kv, found)
    try:
        rank_shards(kv, parallel.tensor_parallel_size, kv_shards)
    except InvalidArgument as error:
        found.refused.append(str(error))
    if loads and failure_policy != "recompute":
        found.warnings.append(
            f"kv_load_failure_policy is {failure_policy!r}: a request ends in an error when the pool loses a block "
            'under it. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    return found


def _check_hashes(cache: CacheSettings, found: Findings) -> None:
    if not cache.enable_prefix_caching:
        found.refused.append("prefix caching is off, so blocks have no hashes: start with --enable-prefix-caching")
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in HASH_BYTES:
        found.refused.append(
            f"prefix_caching_hash_algo is {algorithm!r}, whose hashes depend on the process: "
            "start with --prefix-caching-hash-algo sha256_cbor"
        )
    elif algorithm in SEEDED and os.environ.get(SEED_VARIABLE, "random") == "random":
        found.refused.append(
            f"{algorithm} is seeded at random: set {SEED_VARIABLE} to one number for all instances, or start with "
            "--prefix-caching-hash-algo sha256_cbor"
        )


def _check_parallel(parallel: ParallelSettings, found: Findings) -> None:
    if parallel.pipeline_parallel_size > 1:
        found.refused.append("pipeline parallelism is not supported: use --tensor-parallel-size")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.refused.append(f"{name} above 1 is not supported")


def _check_groups(kv: CacheConfig, found: Findings) -> None:
    if not kv.kv_cache_groups:
        found.refused.append("the model has no KV cache")
    kinds = {type(group.kv_cache_spec).__name__ for group in kv.kv_cache_groups if not poolable(group.kv_cache_spec)}
    if kinds:
        found.refused.append(
            f"layers of kind {', '.join(sorted(kinds))}: only full attention, sliding windows and MLA are "
            "supported, whose blocks a prefix alone determines. Start without --kv-transfer-config"
        )
    hash_tokens = kv.hash_block_size
    if hash_tokens and any(group.kv_cache_spec.block_size % hash_tokens for group in kv.kv_cache_groups):
        found.refused.append(f"blocks are hashed by {hash_tokens} tokens, which do not divide all block sizes")
