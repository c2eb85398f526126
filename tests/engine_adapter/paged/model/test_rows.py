"""Every token is at row position % TILE of a tile, alone there, and comes back as it went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.engine_adapter.paged.model.arrays import HOST
from kvstrata.engine_adapter.paged.model.rows import TILE, Batch, GroupBatch, RowLayout, multiply

POSITIONS = st.lists(st.integers(0, 10_000), max_size=100)


@given(POSITIONS)
def test_rows(positions: list[int]) -> None:
    where = np.array(positions, np.int64)
    layout = RowLayout(where)
    assert np.array_equal(layout.rows % TILE, where % TILE)
    assert len(set(layout.rows.tolist())) == len(positions)
    assert layout.num_tiles == max(np.bincount(where % TILE), default=0)
    values = np.random.default_rng(0).random((len(positions), 3), dtype=np.float32) + 1
    tiles = layout.scatter(values)
    assert tiles.shape == (layout.num_tiles, TILE, 3)
    assert np.array_equal(layout.gather(tiles), values)
    assert np.count_nonzero(tiles) == values.size


def test_a_lone_prefill_fills_its_tiles() -> None:
    assert RowLayout(np.arange(1024)).num_tiles == 64
    assert RowLayout(np.arange(5, 37)).num_tiles == 2


@settings(deadline=None)
@given(POSITIONS.filter(bool), st.integers(0, 2**32))
def test_a_row_of_a_product_depends_on_its_position_alone(positions: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((40, 24), dtype=np.float32)
    where = np.array(positions)
    values = rng.standard_normal((len(positions), 40), dtype=np.float32)
    together = RowLayout(where).gather(multiply(HOST.xp, RowLayout(where).scatter(values), weight))
    index = int(rng.integers(len(positions)))
    lonely = RowLayout(where[index : index + 1])
    assert np.array_equal(
        lonely.gather(multiply(HOST.xp, lonely.scatter(values[index : index + 1]), weight))[0], together[index]
    )


def test_a_batch_says_what_does_not_fit() -> None:
    def batch(
        positions: list[int],
        *,
        spans: list[tuple[int, int]],
        slots: int | None = None,
        tables: int = 1,
        group: int = 0,
        row: int = 0,
        tokens: int | None = None,
    ) -> Batch:
        n = len(positions)
        part = GroupBatch(np.zeros(n if slots is None else slots, np.int64), [np.zeros(9, np.int64)] * tables)
        return Batch(
            np.zeros(n if tokens is None else tokens, np.int64),
            np.array(positions, np.int64),
            spans,
            [part],
            [group],
            np.array([row]),
        )

    good = batch([7, 8, 3], spans=[(0, 2), (2, 3)], tables=2)
    good.check()
    assert good.context_starts == [7, 3]
    assert good.context_ends == [9, 4]
    for match, bad in (
        ("2 positions", batch([0, 1], spans=[(0, 2)], tokens=3)),
        ("adjacent", batch([0, 1], spans=[(1, 2)])),
        ("not empty", batch([0, 1], spans=[(0, 0), (0, 2)], tables=2)),
        ("cover 1 of 2", batch([0, 1], spans=[(0, 1)])),
        ("not consecutive", batch([0, 2], spans=[(0, 2)])),
        ("negative", batch([-1, 0], spans=[(0, 2)])),
        ("1 slots for 2", batch([0, 1], spans=[(0, 2)], slots=1)),
        ("block table", batch([0, 1], spans=[(0, 2)], tables=2)),
        ("without a group", batch([0, 1], spans=[(0, 2)], group=1)),
        ("not here", batch([0, 1], spans=[(0, 2)], row=2)),
    ):
        with pytest.raises(AssertionError, match=match):
            bad.check()
