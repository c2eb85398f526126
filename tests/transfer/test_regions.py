"""Regions and block views: what is accepted, and where blocks lie."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.copier import copy, copy_between, copy_into, merge_runs
from kvstrata.transfer.regions import Region, flat_bytes, shareable


def region_of(array: object) -> Region:
    return Region(flat_bytes(array), array)


def space(block_bytes: int) -> Namespace:
    return Namespace("m", block_bytes, 16)


@pytest.mark.parametrize(
    "buffer",
    [np.zeros((4, 64), np.float32), bytearray(1024), memoryview(bytearray(1024)), mmap.mmap(-1, 4096)],
    ids=["numpy", "bytearray", "memoryview", "mmap"],
)
def test_registers_anything_with_a_buffer(buffer: object) -> None:
    region = region_of(buffer)
    assert region.writable and region.nbytes >= 1024
    region.bytes[:] = 7
    assert bytes(memoryview(buffer).cast("B")[:4]) == b"\7\7\7\7"  # type: ignore[arg-type]


def test_bytes_are_read_only() -> None:
    assert not region_of(b"x" * 64).writable


@pytest.mark.parametrize("buffer", [np.zeros((8, 8))[:, ::2], np.zeros(0), 3, "text"])
def test_refuses_what_it_cannot_use(buffer: object) -> None:
    with pytest.raises(InvalidArgument):
        region_of(buffer)


def test_rows_leave_a_short_tail_out() -> None:
    assert len(region_of(bytearray(1000)).rows(space(256))) == 3
    with pytest.raises(InvalidArgument, match="not one block"):
        region_of(bytearray(100)).rows(space(256))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([[[0, 128]]], "adds up to 128"),
        ([[[0, 128], [900, 128]]], "block 0 piece 1"),
        ([[[-1, 128], [0, 128]]], "block 0 piece 0"),
        ([[0, 256]], "shape"),
        ([[[2**62, 256]]], "block 0 piece 0"),
    ],
)
def test_view_names_the_piece_that_is_wrong(offsets: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        region_of(bytearray(1000)).view(space(256), offsets)  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_scatter_then_gather_gives_the_bytes_back(blocks: int, pieces: int, data: st.DataObject) -> None:
    """Pieces shuffled over a region: copying in and out is the identity, and touches nothing else."""
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=pieces, max_size=pieces))
    namespace = space(sum(sizes))
    order = data.draw(st.permutations(range(blocks * pieces)))
    gap = data.draw(st.integers(0, 9))
    table, cursor = np.zeros((blocks * pieces, 2), np.int64), 0
    for place in order:
        table[place] = (cursor, sizes[place % pieces])
        cursor += sizes[place % pieces] + gap
    paged = region_of(np.zeros(cursor, np.uint8))
    view = paged.view(namespace, table.reshape(blocks, pieces, 2))
    image = region_of(np.random.default_rng(0).integers(1, 256, blocks * namespace.block_bytes, dtype=np.uint8))
    rows = image.rows(namespace)
    copy_into(view, rows.table[:, 0, 0] + image.address)
    assert np.count_nonzero(paged.bytes) == image.nbytes
    back = region_of(np.zeros(image.nbytes, np.uint8))
    copy_between(back.rows(namespace), view)
    assert (back.bytes == image.bytes).all()


def test_runs_contiguous_on_both_sides_become_one() -> None:
    target, source, length = (np.array(x, np.int64) for x in ([0, 10, 30], [100, 110, 120], [10, 10, 5]))
    merged = merge_runs(target, source, length)
    assert [part.tolist() for part in merged] == [[0, 30], [100, 120], [20, 5]]


@pytest.mark.parametrize("pieces", [1, 3, 64])
def test_a_copy_split_over_threads_is_whole(pieces: int) -> None:
    step = (9 << 20) // pieces
    source = np.random.default_rng(1).integers(0, 256, step * pieces + 5, dtype=np.uint8)
    target = np.zeros((pieces, step + 64), np.uint8)
    at = np.arange(pieces, dtype=np.int64)
    copy(target.ctypes.data + at * (step + 64), source.ctypes.data + at * step, np.full(pieces, step))
    assert (target[:, :step].ravel() == source[: step * pieces]).all()
    assert not target[:, step:].any()


def test_shareable_memory_cannot_be_shrunk() -> None:
    import os

    flat, mapping, fd = shareable(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    flat[:] = 3
    assert mapping[0] == 3
    os.close(fd)
