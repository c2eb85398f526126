"""What a decoder layer does to each token by itself. Arrays are ``[num_tiles, TILE, width]`` (see ``rows``), of the
module ``xp``."""

from __future__ import annotations

import numpy as np

from kvstrata.engine_adapter.paged.model.arrays import F32, ArrayModule
from kvstrata.engine_adapter.paged.model.rows import multiply


def rms_norm(xp: ArrayModule, tiles: F32, weight: F32, eps: float) -> F32:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis; ``weight`` [width]."""
    scale = xp.mean(xp.square(tiles), axis=-1, keepdims=True)
    scale += np.float32(eps)
    xp.sqrt(scale, out=scale)
    normed: F32 = tiles / scale
    normed *= weight
    return normed


def swiglu(xp: ArrayModule, tiles: F32, gate_up: F32) -> F32:
    """``silu(x @ gate) * (x @ up)``; ``gate_up`` [width, 2 * mlp] is gate beside up. Returns [..., mlp]."""
    both = multiply(xp, tiles, gate_up)
    mlp = gate_up.shape[1] // 2
    gate, up = both[..., :mlp], both[..., mlp:]
    # Contiguous from here on: vector loops treat strided rows otherwise.
    hidden = xp.negative(gate, out=xp.empty(gate.shape, np.float32))
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: the quotient is then 0, as it should be
        xp.exp(hidden, out=hidden)
    hidden += 1
    xp.divide(gate, hidden, out=hidden)
    hidden *= up
    return hidden
