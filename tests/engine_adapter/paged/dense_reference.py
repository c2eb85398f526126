"""The same model without a cache, tiles or blocks: every token attends to the whole sequence, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.paged.model.llama_config import LlamaConfig
from kvstrata.engine_adapter.paged.model.weights import LlamaWeights

F64 = npt.NDArray[np.float64]


def logits(config: LlamaConfig, weights: LlamaWeights, token_ids: list[int]) -> F64:
    """[n, vocab] for whole weights (one rank)."""
    hidden = weights.embed[token_ids].astype(np.float64)
    for index, layer in enumerate(weights.layers):
        qkv = _norm(hidden, layer.input_norm, config.rms_norm_eps) @ layer.qkv
        hidden = hidden + _attention(config, qkv, config.sliding_window(index)) @ layer.o
        gate, up = np.split(_norm(hidden, layer.post_norm, config.rms_norm_eps) @ layer.gate_up, 2, axis=1)
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer.down
    return np.asarray(_norm(hidden, weights.norm, config.rms_norm_eps) @ weights.lm_head, np.float64)


def _norm(rows: F64, weight: npt.NDArray[np.float32], eps: float) -> F64:
    return np.asarray(rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + eps) * weight, np.float64)


def _attention(config: LlamaConfig, qkv: F64, window: int) -> F64:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    rows = qkv.reshape(len(qkv), heads + 2 * shared, config.head_dim)
    queries = _rotated(config, rows[:, :heads])
    keys = np.repeat(_rotated(config, rows[:, heads : heads + shared]), heads // shared, axis=1)
    values = np.repeat(rows[:, heads + shared :], heads // shared, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(config.head_dim)
    distance = np.subtract.outer(np.arange(len(qkv)), np.arange(len(qkv)))
    scores[:, (distance < 0) | ((distance >= window) if window else False)] = -np.inf
    chances = np.exp(scores - scores.max(axis=2, keepdims=True))
    chances /= chances.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", chances, values).reshape(len(qkv), -1), np.float64)


def _rotated(config: LlamaConfig, heads: F64) -> F64:
    half = config.head_dim // 2
    angles = np.outer(np.arange(len(heads)), config.rope_theta ** -(np.arange(half) / half))[:, None]
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
