"""Blocks in small pieces are the same bytes in one piece each, there and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.transfer import checksums as hashing
from kvstrata.transfer.checksums import RangeChecksums, block_checksum, checksums
from kvstrata.transfer.compact import PIECE_BYTES_MIN, blank, compact, in_small_pieces, scatter
from kvstrata.transfer.ranges import cut
from kvstrata.transfer.regions import BlockView, Region


def blocks_of(count: int, lengths: list[int], seed: int = 0) -> BlockView:
    """Random bytes; pieces anywhere, none over another."""
    draw = np.random.default_rng(seed)
    sizes = np.tile(np.array(lengths, np.int64), count)
    order = draw.permutation(len(sizes))
    starts = np.empty(len(sizes), np.int64)
    starts[order] = np.cumsum(sizes[order] + 3) - sizes[order]
    memory = draw.integers(0, 256, int(sizes.sum()) + 3 * len(sizes) + 3, np.uint8)
    table = np.stack([starts, sizes], axis=1).reshape(count, len(lengths), 2)
    return BlockView(Region(memory, memory), table, sum(lengths))


def bytes_of(blocks: BlockView, row: int) -> bytes:
    memory: npt.NDArray[np.uint8] = blocks.region.bytes
    return b"".join(memory[start : start + length].tobytes() for start, length in blocks.table[row].tolist())


shapes = st.tuples(st.integers(1, 6), st.lists(st.integers(1, 40), min_size=2, max_size=9))


@given(shapes)
def test_compacted_blocks_have_the_bytes_and_the_checksums_of_the_pieces(shape: tuple[int, list[int]]) -> None:
    blocks = blocks_of(*shape)
    found = compact(blocks)
    assert found.pieces == 1 and found.region is not blocks.region
    expected = [bytes_of(blocks, row) for row in range(len(blocks))]
    assert [bytes_of(found, row) for row in range(len(blocks))] == expected
    digests = [xxhash.xxh3_64_intdigest(data) for data in expected]
    assert checksums(blocks).tolist() == digests
    assert [block_checksum(blocks, row) for row in range(len(blocks))] == digests


@given(shapes)
def test_what_is_scattered_is_in_the_pieces_and_nowhere_else(shape: tuple[int, list[int]]) -> None:
    blocks, other = blocks_of(*shape), blocks_of(*shape, seed=1)
    before = blocks.region.bytes.copy()
    into = blank(blocks)
    for row in range(len(blocks)):
        start, length = into.table[row, 0].tolist()
        into.region.bytes[start : start + length] = np.frombuffer(bytes_of(other, row), np.uint8)
    scatter(blocks, into)
    named = np.zeros(len(before), np.bool_)
    for start, length in blocks.table.reshape(-1, 2).tolist():
        named[start : start + length] = True
    assert (blocks.region.bytes[~named] == before[~named]).all()
    assert [bytes_of(blocks, row) for row in range(len(blocks))] == [bytes_of(other, row) for row in range(len(blocks))]


def test_ranges_of_blocks_in_small_pieces_are_hashed_in_turn() -> None:
    blocks = blocks_of(3, [8] * 12)
    hashed = RangeChecksums(3)
    for part in cut(blocks, [20, 64, 96]):
        hashed.add(part)
    assert (hashed.values() == checksums(blocks)).all()


def test_more_blocks_than_are_put_together_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(7, [16] * 4)
    expected = checksums(blocks)
    monkeypatch.setattr(hashing, "COMPACTED_BYTES", 2 * blocks.block_bytes)
    assert (checksums(blocks) == expected).all()
    monkeypatch.setattr(hashing, "COMPACTED_BYTES", 1)
    assert (checksums(blocks) == expected).all()


def test_large_pieces_and_whole_blocks_stay_where_they_are() -> None:
    for lengths in ([100], [PIECE_BYTES_MIN, PIECE_BYTES_MIN]):
        blocks = blocks_of(2, lengths)
        assert compact(blocks) is blocks and not in_small_pieces(blocks)
    assert not len(compact(blocks_of(2, [8, 8])[:0]))
