"""What an engine is told: the model, the cache, the step, the ranks, the pool. Travels to ranks as msgpack."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvstrata.engine_adapter.connector.config import LoadPolicy, PoolConfig
from kvstrata.engine_adapter.hashing import HashAlgorithm
from kvstrata.engine_adapter.paged.cache.published_events import KVEventsConfig
from kvstrata.engine_adapter.paged.model.arrays import DEVICES, Device
from kvstrata.proto.errors import InvalidArgument

__all__ = [
    "CacheConfig",
    "Device",
    "Dtype",
    "EngineConfig",
    "KVEventsConfig",
    "LoadPolicy",
    "ModelConfig",
    "PoolConfig",
    "StepConfig",
]

Dtype = Literal["float32", "float16"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``: a folder with ``config.json`` and safetensors, or a named size with seeded random weights."""

    model: str = "tiny"
    seed: int = 0
    tokenizer: str = ""  #: a ``tokenizer.json`` file; the byte-level tokenizer when empty
    max_model_len: int = 0  #: 0: what the model says
    kv_dtype: Dtype = "float32"  #: of the KV cache; weights and arithmetic are float32


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's own KV memory."""

    block_size: int = 16
    num_blocks: int = 0  #: 0: as many as fit in ``memory_bytes``
    memory_bytes: int = 1 << 30  #: per rank
    enable_prefix_caching: bool = True
    hash_algorithm: HashAlgorithm = "sha256"


class StepConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one step."""

    max_num_batched_tokens: int = 256  #: a CPU takes some 0.3 s for them at 13m: what others in the batch wait
    max_num_seqs: int = 64
    max_waiting: int = 4096  #: requests queued; more are refused (Busy)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. ``device``: where its ranks compute; a GPU each for cuda. ``threads``: BLAS threads a rank."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    step: StepConfig = StepConfig()
    pool: PoolConfig = PoolConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    device: Device = "cpu"
    tensor_parallel: int = 1
    threads: int = 1
    name: str = ""  #: shown in logs and in the pool's health

    def validated(self) -> EngineConfig:
        """Return self, or raise :class:`InvalidArgument` naming the field and its bound."""
        for name, value, low, high in (
            ("block_size", self.cache.block_size, 1, BLOCK_SIZE_MAX),
            ("num_blocks", self.cache.num_blocks, 0, 1 << 31),
            ("memory_bytes", self.cache.memory_bytes, 1, 1 << 50),
            ("max_num_batched_tokens", self.step.max_num_batched_tokens, 1, 1 << 20),
            ("max_num_seqs", self.step.max_num_seqs, 1, 1 << 16),
            ("max_waiting", self.step.max_waiting, 1, 1 << 24),
            ("tensor_parallel", self.tensor_parallel, 1, 64),
            ("threads", self.threads, 1, 1024),
            ("max_model_len", self.model.max_model_len, 0, 1 << 24),
            ("kv_shards", self.pool.kv_shards, 0, 1024),
            ("load_deadline_ms", self.pool.load_deadline_ms, 1, 3_600_000),
            ("lookup_deadline_ms", self.pool.lookup_deadline_ms, 1, 60_000),
            ("store_pending_blocks_max", self.pool.store_pending_blocks_max, 0, 1 << 31),
        ):
            if not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}: expected {low} to {high}")
        if self.device not in DEVICES:
            raise InvalidArgument(f"device is {self.device!r}: expected {' or '.join(DEVICES)}")
        if self.kv_events.endpoint and not self.cache.enable_prefix_caching:
            raise InvalidArgument("KV events tell of the prefix cache, and prefix caching is off")
        if self.kv_events.replay and not self.kv_events.endpoint:
            raise InvalidArgument("KV events are sent again only where they are published: name their endpoint")
        if self.cache.num_blocks == 1:
            raise InvalidArgument("num_blocks is 1: at least 2 (block 0 is the null block), or 0 to fill memory_bytes")
        return self


BLOCK_SIZE_MAX: Final = 4096
