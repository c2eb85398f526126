"""Copies of many pieces: whatever their layout, every byte lands where it should and no other byte changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.transfer import copier
from kvstrata.transfer.copier import SPLIT_BYTES, copy
from kvstrata.transfer.grids import Grid
from kvstrata.transfer.two_threads import run_both


def pieces_of(
    blocks: int, pieces: int, size: int, pad: int, seed: int, jitter: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets of a paged target (piece-major, ``pad`` unused bytes a piece), of a dense source, and lengths."""
    draw = np.random.default_rng(seed)
    slots = draw.permutation(2 * blocks)[:blocks]
    target = (np.arange(pieces)[None, :] * 2 * blocks + slots[:, None]) * (size + pad)
    source = np.arange(blocks * pieces).reshape(blocks, pieces) * size
    if jitter and pieces > 1:
        target[blocks // 2, pieces // 2] += pad // 2
    return target.ravel(), source[draw.permutation(blocks)].ravel(), np.full(blocks * pieces, size)


@given(
    blocks=st.integers(1, 9),
    pieces=st.integers(1, 9),
    size=st.integers(1, 40),
    pad=st.integers(0, 9),
    seed=st.integers(0, 1 << 16),
    jitter=st.booleans(),
)
def test_every_layout_is_copied_exactly(blocks: int, pieces: int, size: int, pad: int, seed: int, jitter: bool) -> None:
    target, source, length = pieces_of(blocks, pieces, size, pad, seed, jitter)
    origin = np.random.default_rng(seed + 1).integers(0, 256, blocks * pieces * size, np.uint8)
    memory = np.zeros(2 * blocks * pieces * (size + pad) + pad, np.uint8)
    expected = memory.copy()
    for to, start in zip(target, source, strict=True):
        expected[to : to + size] = origin[start : start + size]
    copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
    assert np.array_equal(memory, expected)


def test_big_grids_are_split_and_whole() -> None:
    blocks, pieces, size = 65, 16, 8192
    assert blocks * pieces * size > SPLIT_BYTES
    target, source, length = pieces_of(blocks, pieces, size, 64, 3, False)
    origin = np.random.default_rng(1).integers(0, 256, blocks * pieces * size, np.uint8)
    memory = np.zeros(2 * blocks * pieces * (size + 64), np.uint8)
    copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
    for to, start in zip(target, source, strict=True):
        assert np.array_equal(memory[to : to + size], origin[start : start + size])
    assert np.count_nonzero(memory.reshape(-1, size + 64)[:, size:]) == 0


def test_a_paged_layout_is_a_grid_and_what_is_none_is_not() -> None:
    target, source, length = pieces_of(8, 6, 32, 8, 0, False)
    grid = Grid.found_in(target, source, length)
    assert grid is not None and (grid.pieces, len(grid.target)) == (6, 8)
    first, second = grid.halves()
    assert len(first.target) + len(second.target) == 8
    target, source, length = pieces_of(8, 6, 32, 8, 0, True)
    assert Grid.found_in(target, source, length) is None
    assert Grid.found_in(target, source, np.arange(1, 49)) is None
    assert Grid.found_in(-target, source, length) is None


@pytest.mark.parametrize("layout", ["one run", "grid"])
def test_a_big_copy_is_split_where_that_is_worth_it(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    split = []

    def counted(mine: Callable[[], None], others: Callable[[], None]) -> None:
        split.append(mine)
        run_both(mine, others)

    monkeypatch.setattr(copier, "run_both", counted)
    size = 8192 if layout == "grid" else SPLIT_BYTES // 64
    target, source, length = pieces_of(64, SPLIT_BYTES // 64 // size, size, 64, 3, False)
    origin = np.random.default_rng(1).integers(0, 256, SPLIT_BYTES, np.uint8)
    memory = np.zeros(int(target.max()) + size, np.uint8)
    for worth in (False, True):
        monkeypatch.setattr(copier, "worth_it", lambda worth=worth: worth)
        memory[:] = 0
        copy(target + memory.ctypes.data, source + origin.ctypes.data, length)
        for to, start in zip(target, source, strict=True):
            assert np.array_equal(memory[to : to + size], origin[start : start + size])
        assert len(split) == int(worth)
