"""The views of a rank's KV memory lie where the pool's layout says they do."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.engine_adapter.connector.fingerprint import make_layout
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.cache.capacity import plan_kv_cache
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig, KVCacheGroup, MLASpec
from kvstrata.engine_adapter.paged.config import Dtype
from kvstrata.engine_adapter.paged.model.sizes import named_config
from kvstrata.engine_adapter.paged.ranks.kv_memory import KVMemory, layer_places
from kvstrata.proto.errors import InvalidArgument


def planned(name: str, dtype: str) -> KVCacheConfig:
    specs = named_config(name).layer_specs(16, dtype)
    return plan_kv_cache(specs, num_blocks=40, max_model_len=128, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", ["tiny", "tiny-swa"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_block_is_where_its_descriptors_point(name: str, dtype: Dtype) -> None:
    config = planned(name, dtype)
    hasher = BlockHasher(16)
    layout = make_layout(config, model_identity="m", hasher=hasher, tensor_parallel=1, kv_dtype=dtype)
    memory = KVMemory(config)
    assert memory.buffer.nbytes == layout.memory_bytes
    assert not memory.buffer.any()
    for index, group in enumerate(config.groups):
        for slot, layer in enumerate(group.layers):
            for block in (1, 39):
                memory.buffer[:] = 0
                memory.layers[layer][0, block] = 1
                memory.layers[layer][1, block] = 2
                pieces = layout.descriptors(index)[block]
                found = [memory.buffer[start : start + length].view(dtype) for start, length in pieces]
                assert (found[2 * slot] == 1).all() and (found[2 * slot + 1] == 2).all()
                assert np.count_nonzero(memory.buffer.view(dtype)) == sum(map(len, found[2 * slot : 2 * slot + 2]))


def test_given_memory_is_used_as_it_is() -> None:
    config = planned("tiny", "float32")
    buffer = np.zeros(config.num_blocks * config.block_bytes, np.uint8)
    KVMemory(config, buffer).layers[1][1, 39, 15] = 1
    assert buffer[-2 * 16 * 4 :].view(np.float32).all()
    with pytest.raises(InvalidArgument, match=f"KV memory of {len(buffer)} bytes expected"):
        KVMemory(config, buffer[1:])


def test_what_the_model_cannot_have_is_refused() -> None:
    mla = MLASpec(block_size=16, latent_size=8)
    config = KVCacheConfig(num_blocks=4, groups=(KVCacheGroup((0,), mla),), max_model_len=16, max_num_batched_tokens=16)
    with pytest.raises(InvalidArgument, match="MLASpec"):
        KVMemory(config)
    twice = KVCacheConfig(
        num_blocks=4, groups=(KVCacheGroup((0, 2), mla),), max_model_len=16, max_num_batched_tokens=16
    )
    with pytest.raises(InvalidArgument, match=r"\[0, 2\]"):
        layer_places(twice)
