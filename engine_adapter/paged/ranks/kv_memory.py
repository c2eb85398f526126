"""The KV memory of one rank: one buffer, seen as a tensor a layer.

::

    buffer:        tensor 0 | tensor 1 | ...                     as connector/layout.py describes it to the pool
    tensor:        [2, num_blocks, block_size, num_kv_heads, head_size]       K of all block ids, then V
    layer l:       the tensor of l's place in its group: the i-th layers of all groups share tensor i

Groups that share a tensor may cut a page differently; a block id is one group's at a time.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import FullAttentionSpec, KVCacheConfig
from kvstrata.engine_adapter.paged.model.arrays import HOST, Arrays
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.proto.errors import InvalidArgument


class KVMemory:
    """``buffer``: flat uint8 of the whole memory, an array of ``arrays``, all zeros; None: allocated here.

    ``layers``: each layer's view of it, in the order of the model. The buffer must outlive the views: whoever
    gave it keeps it mapped until the engine is closed.
    """

    def __init__(
        self, config: KVCacheConfig, buffer: npt.NDArray[np.uint8] | None = None, arrays: Arrays = HOST
    ) -> None:
        expected = config.num_blocks * config.block_bytes
        if buffer is None:
            buffer = _host_memory(expected) if arrays.on_host else arrays.xp.zeros(expected, np.uint8)
        if buffer.nbytes != expected or buffer.ndim != 1 or buffer.dtype != np.uint8:
            raise InvalidArgument(f"KV memory of {expected} bytes expected, got {buffer.dtype} {buffer.shape}")
        self.buffer = buffer
        self.layers: list[KV] = [self._view(config, *place) for place in layer_places(config)]

    def _view(self, config: KVCacheConfig, group: int, tensor: int) -> KV:
        spec = config.groups[group].spec
        if not isinstance(spec, FullAttentionSpec):
            raise InvalidArgument(f"KV cache group {group} is {type(spec).__name__}: the model has K and V of heads")
        size = config.num_blocks * config.page_size_bytes
        pages = self.buffer[tensor * size : (tensor + 1) * size]
        shape = (2, config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        return (pages.view(np.float16) if spec.dtype == "float16" else pages.view(np.float32)).reshape(shape)


def _host_memory(size: int) -> npt.NDArray[np.uint8]:
    # Populated at once, as a pool's memory is: the first touch of a page costs more than computing it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


def layer_places(config: KVCacheConfig) -> list[tuple[int, int]]:
    """(group, tensor) of each layer of the model."""
    places = {
        layer: (index, tensor) for index, group in enumerate(config.groups) for tensor, layer in enumerate(group.layers)
    }
    if sorted(places) != list(range(len(places))):
        raise InvalidArgument(f"KV cache groups name the layers {sorted(places)}: expected each layer once")
    return [places[layer] for layer in range(len(places))]
