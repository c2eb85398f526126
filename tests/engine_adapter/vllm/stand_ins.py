"""Small stand-ins of vLLM's objects: what the connector reads of them, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.base import BlockIds


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    page_size_bytes: int = 128
    num_kv_heads: int = 2
    num_head_slots: int | None = None


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 32


@dataclass
class MambaSpec(FullAttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs:
    """One group whose layers differ in size."""

    kv_cache_specs: dict[str, FullAttentionSpec]
    block_size: int = 16

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())


AnySpec = FullAttentionSpec | UniformTypeKVCacheSpecs


@dataclass
class CacheGroup:
    layer_names: list[str]
    kv_cache_spec: AnySpec


@dataclass
class KVCacheConfig:
    kv_cache_groups: Sequence[CacheGroup]
    num_blocks: int = 8
    kv_cache_layout: str | None = "LBHNC"
    hash_block_size: int | None = 16
    kv_tp_replicas: int = 1


def for_the_scheduler(config: KVCacheConfig) -> KVCacheConfig:
    """What vLLM gives its scheduler: of a group whose layers differ, one layer's spec stands for all."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    told = [next(iter(s.kv_cache_specs.values())) if isinstance(s, UniformTypeKVCacheSpecs) else s for s in specs]
    groups = [CacheGroup(group.layer_names, spec) for group, spec in zip(config.kv_cache_groups, told, strict=True)]
    return replace(config, kv_cache_groups=groups)


@dataclass
class CacheSettings:
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256_cbor"


@dataclass
class ParallelSettings:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1


class HfConfig:
    def __init__(self, **fields: object) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, object]:
        return dict(self.fields)


@dataclass
class ModelConfig:
    model: str
    revision: str | None = None
    quantization: str | None = None
    seed: int = 0
    hf_config: HfConfig = field(default_factory=lambda: HfConfig(hidden_size=64))


@dataclass
class LoadConfig:
    load_format: str


@dataclass
class Drafts:
    """``vllm.config.SpeculativeConfig``, as far as it is read."""

    draft_model_config: ModelConfig | None
    draft_load_config: LoadConfig | None = None
    has_kv: bool = True

    def uses_draft_kv_cache(self) -> bool:
        return self.has_kv


@dataclass
class Lora:
    """``vllm.lora.request.LoRARequest``, as far as it is read."""

    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    lora_name: str = "adapter"


@dataclass
class Request:
    """``vllm.v1.request.Request``, as far as it is read."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: list[bytes]
    cache_salt: str | None = None
    lora_request: Lora | None = None
    trace_headers: dict[str, str] | None = None
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool | None = False


@dataclass
class BlockState:
    tables: dict[str, BlockIds]

    def get_block_ids(self, req_id: str) -> BlockIds | None:
        return self.tables.get(req_id)


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: BlockState | None = None


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


class BlockPool:
    """Counts references as vLLM's does, and notes the order in which blocks became free."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.freed: list[int] = []

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} freed more often than held"
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.freed.append(block.block_id)

    def held(self) -> dict[int, int]:
        return {block.block_id: block.ref_cnt for block in self.blocks if block.ref_cnt}


class ArrayStorage:
    def __init__(self, base: npt.NDArray[np.uint8]) -> None:
        self._base = base

    def data_ptr(self) -> int:
        return self._base.ctypes.data

    def nbytes(self) -> int:
        return self._base.nbytes


class ArrayTensor:
    """A torch tensor's addresses and strides over a numpy array that is a view of ``base``."""

    def __init__(self, array: npt.NDArray[np.float32], base: npt.NDArray[np.uint8]) -> None:
        self.array = array
        self._storage = ArrayStorage(base)

    @property
    def shape(self) -> Sequence[int]:
        return self.array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> Sequence[int]:
        return [step // self.array.itemsize for step in self.array.strides]

    def element_size(self) -> int:
        return self.array.itemsize

    def untyped_storage(self) -> ArrayStorage:
        return self._storage
