"""A host pool as SGLang has them, on numpy, and a client that does as told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.sglang.host_pages import HostPages, Indices
from kvstrata.proto.errors import Unavailable


class ArrayPool:
    """K and V of ``layers`` layers for ``slots`` tokens of ``token_bytes``, as bytes, in one buffer.

    ``layer_first``: [2, layers, slots, token_bytes]; ``page_first``: [2, slots, layers, token_bytes].
    """

    def __init__(self, layout: str = "layer_first", *, page_size: int = 4, layers: int = 3, slots: int = 64) -> None:
        self.layout, self.page_size, self.layers, self.slots = layout, page_size, layers, slots
        self.dtype: object = "torch.bfloat16"
        self.start_layer, self.end_layer, self.token_bytes = 0, layers, 32
        self.bytes: npt.NDArray[np.uint8] = np.zeros(2 * layers * slots * self.token_bytes, np.uint8)

    @property
    def base(self) -> int:
        return int(self.bytes.ctypes.data)

    def get_page_buffer_meta(self, indices: Indices) -> tuple[list[int], list[int]]:
        half, addresses = self.bytes.nbytes // 2, []
        layer_first = self.layout == "layer_first"
        for slot in indices.tolist()[:: self.page_size]:
            for layer in range(self.layers if layer_first else 1):
                row = layer * self.slots + slot if layer_first else slot * self.layers
                key = self.base + row * self.token_bytes
                addresses += [key, key + half]
        piece = self.page_size * self.token_bytes * (1 if layer_first else self.layers)
        return addresses, [piece] * len(addresses)

    def pages(self) -> HostPages:
        return HostPages(self, self.base, np.arange(self.page_size))

    def slots_of(self, *pages: int) -> npt.NDArray[np.int64]:
        return (np.array(pages)[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def tokens(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[slots, 2, layers, token_bytes], a copy, whatever the layout."""
        if self.layout == "layer_first":
            grid = self.bytes.reshape(2, self.layers, self.slots, self.token_bytes)
            return grid[:, :, slots].transpose(2, 0, 1, 3).copy()
        grid = self.bytes.reshape(2, self.slots, self.layers, self.token_bytes)
        return grid[:, slots].transpose(1, 0, 2, 3).copy()

    def fill(self, seed: int) -> ArrayPool:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.nbytes, dtype=np.uint8)
        return self


@dataclass
class Config:
    """What is used of ``HiCacheStorageConfig``."""

    model_name: str | None = "org/model"
    is_mla_model: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1


class AbsentClient:
    """Every call fails the way a pool can."""

    def _fail(self, *_: Any) -> Any:
        raise Unavailable("nobody answers at 127.0.0.1:1")

    lookup = load = store = _fail
