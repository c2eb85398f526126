"""Rotary position embedding, the rotate-half kind."""

from __future__ import annotations

import numpy as np

from kvstrata.engine_adapter.paged.model.arrays import F32, HOST, I64, Arrays
from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> F32:
    """Radians a position for each pair of a head's elements, [head_dim / 2]."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (np.float32(1) / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor = np.float32(scaling.factor)
    if scaling.rope_type == "linear":
        return np.divide(frequencies, factor)
    # How many whole turns a frequency makes over the trained length says how much of it is kept.
    turns = scaling.original_max_position_embeddings * frequencies / np.float32(2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0, 1).astype(np.float32)
    blend: F32 = kept * frequencies + (1 - kept) * frequencies / factor
    return blend


class Rope:
    """Cosines and sines of every position of the model, made once: the same bits for a position, always.

    Computed on the host. ``max_position_embeddings * head_dim * 4`` bytes.
    """

    def __init__(self, config: LlamaConfig, arrays: Arrays = HOST) -> None:
        positions = np.arange(config.max_position_embeddings, dtype=np.float32)
        angles = np.outer(positions, inverse_frequencies(config)).astype(np.float64)
        self.cos: F32 = arrays.to_device(np.cos(angles).astype(np.float32))
        self.sin: F32 = arrays.to_device(np.sin(angles).astype(np.float32))

    def rotate(self, heads: F32, positions: I64) -> None:
        """Turn ``heads`` [n, num_heads, head_dim] in place, by the position of each of n tokens."""
        half = heads.shape[-1] // 2
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        first, second = heads[..., :half], heads[..., half:]
        turned = first * cos - second * sin
        second *= cos
        second += first * sin
        first[...] = turned
