"""What a decoder layer does to each token by itself. Arrays are ``[num_tiles, TILE, width]`` (see ``rows``)."""

from __future__ import annotations

import numpy as np

from kvstrata.engine_adapter.paged.model.rows import F32, multiply


def rms_norm(tiles: F32, weight: F32, eps: float) -> F32:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis; ``weight`` [width]."""
    scale = np.mean(np.square(tiles), axis=-1, keepdims=True)
    scale += np.float32(eps)
    np.sqrt(scale, out=scale)
    normed: F32 = tiles / scale
    normed *= weight
    return normed


def swiglu(tiles: F32, gate_up: F32) -> F32:
    """``silu(x @ gate) * (x @ up)``; ``gate_up`` [width, 2 * mlp] is gate beside up. Returns [..., mlp]."""
    both = multiply(tiles, gate_up)
    mlp = gate_up.shape[1] // 2
    gate, up = both[..., :mlp], both[..., mlp:]
    # Contiguous from here on: vector loops treat strided rows otherwise.
    hidden = np.negative(gate, order="C")
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then 0, as it should be
        np.exp(hidden, out=hidden)
    hidden += 1
    np.divide(gate, hidden, out=hidden)
    hidden *= up
    return hidden
