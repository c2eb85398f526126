"""RMSNorm, SwiGLU and RoPE against their definitions in float64."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvstrata.engine_adapter.paged.model.arrays import HOST
from kvstrata.engine_adapter.paged.model.layers import rms_norm, swiglu
from kvstrata.engine_adapter.paged.model.llama_config import RopeScaling
from kvstrata.engine_adapter.paged.model.rope import Rope, inverse_frequencies
from kvstrata.engine_adapter.paged.model.rows import TILE
from kvstrata.engine_adapter.paged.model.sizes import SIZES

RNG = np.random.default_rng(0)
XP = HOST.xp
TILES = RNG.standard_normal((3, TILE, 24), dtype=np.float32)


def test_rms_norm() -> None:
    weight = RNG.random(24, dtype=np.float32)
    x = TILES.astype(np.float64)
    expected = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(XP, TILES, weight, 1e-5), expected, rtol=1e-5)
    assert not rms_norm(XP, np.zeros_like(TILES), weight, 1e-5).any()


def test_swiglu_even_where_the_gate_is_far_below_zero() -> None:
    gate, up = RNG.standard_normal((2, 24, 10), dtype=np.float32)
    gate[:, 0] *= 1000
    fused = np.ascontiguousarray(np.concatenate([gate, up], axis=1))
    x = TILES.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)
    out = swiglu(XP, TILES, fused)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling(rope_type="linear", factor=4.0), RopeScaling(rope_type="llama3", factor=8.0)]
)
def test_rope_turns_pairs_and_keeps_what_depends_on_distance(scaling: RopeScaling | None) -> None:
    config = msgspec.structs.replace(SIZES["tiny"], rope_scaling=scaling)
    rope = Rope(config)
    q, k = RNG.standard_normal((2, 1, 3, 16), dtype=np.float32)

    def score(at: int, other: int) -> np.float32:
        query, key = q.copy(), k.copy()
        rope.rotate(query, np.array([at]))
        rope.rotate(key, np.array([other]))
        return np.float32((query * key).sum())

    at_zero = q.copy()
    rope.rotate(at_zero, np.array([0]))
    assert np.array_equal(at_zero, q)
    assert score(100, 90) == pytest.approx(score(1010, 1000), abs=1e-3)
    assert score(100, 90) != pytest.approx(score(100, 80), abs=1e-3)
    turned = q.astype(np.float64)
    angles = 77 * inverse_frequencies(config).astype(np.float64)
    first, second = turned[..., :8].copy(), turned[..., 8:].copy()
    turned = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
    mine = q.copy()
    rope.rotate(mine, np.array([77]))
    np.testing.assert_allclose(mine, turned, atol=1e-5)


def test_frequencies() -> None:
    plain = inverse_frequencies(SIZES["tiny"])
    assert plain[0] == 1
    np.testing.assert_allclose(plain, [10_000 ** (-2 * i / 16) for i in range(8)], rtol=1e-6)

    def scaled(**fields: object) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        scaling = msgspec.convert(fields, RopeScaling)
        return inverse_frequencies(msgspec.structs.replace(SIZES["tiny"], rope_scaling=scaling))

    np.testing.assert_allclose(scaled(rope_type="linear", factor=4.0), plain / 4)
    llama3 = scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=1024,
    )
    waves = 2 * np.pi / plain
    assert np.array_equal(llama3[waves < 256], plain[waves < 256])
    np.testing.assert_allclose(llama3[waves > 1024], plain[waves > 1024] / 8, rtol=1e-6)
    between = (waves > 256) & (waves < 1024)
    assert between.any()
    assert ((llama3[between] < plain[between]) & (llama3[between] > plain[between] / 8)).all()
