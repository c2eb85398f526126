"""Blocks cut in byte ranges, and the ranges of a same-host read: in place, in order, under a lease that stands."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer import shm
from kvstrata.transfer.base import Fetch, Mask
from kvstrata.transfer.copier import copy_range
from kvstrata.transfer.ranges import cut, tell_whole
from kvstrata.transfer.regions import Region

LOADED, MISSING = int(BlockStatus.LOADED), int(BlockStatus.MISSING)


def namespace(block_bytes: int) -> Namespace:
    return Namespace(group="model/ranges", block_bytes=block_bytes, block_tokens=16)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """Lengths of a block's pieces, blocks, ends of its ranges."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    inner = draw(st.sets(st.integers(1, sum(lengths)), max_size=6))
    return lengths, draw(st.integers(1, 4)), sorted(inner | {sum(lengths)})


@given(layouts())
def test_the_ranges_of_a_view_are_the_view(layout: tuple[list[int], int, list[int]]) -> None:
    lengths, count, ends = layout
    check_ranges(lengths, count, ends)


@pytest.mark.parametrize("count", [1, 12, 300])
def test_many_blocks_a_range_at_a_time(count: int) -> None:
    """Enough of them that a piece of all blocks is one copy."""
    check_ranges([32] * 6, count, [64, 128, 192])


def check_ranges(lengths: list[int], count: int, ends: list[int]) -> None:
    size = sum(lengths)
    memory = np.zeros(count * size, np.uint8)
    offsets = np.empty((count, len(lengths), 2), np.int64)
    offsets[:, :, 1] = lengths
    # As in a paged cache: all first pieces, then all second ones.
    before = np.cumsum([0, *lengths[:-1]]) * count
    offsets[:, :, 0] = before[None, :] + np.arange(count)[:, None] * np.asarray(lengths)[None, :]
    view = Region(memory, memory).view(namespace(size), offsets)
    image = np.random.default_rng(1).integers(1, 255, (count, size), dtype=np.uint8)
    source = np.arange(count, dtype=np.int64) * size + image.ctypes.data
    expected = np.zeros_like(memory)
    for block, pieces in enumerate(offsets):
        data = image[block]
        for start, length in pieces:
            expected[start : start + length], data = data[:length], data[length:]
    seen = 0
    for part, end in zip(cut(view, ends), ends, strict=True):
        copy_range(part, source + seen)
        seen = end
        done = int(np.count_nonzero(memory == expected))
        assert done >= count * end and np.count_nonzero(memory) == count * end
    assert (memory == expected).all()


def test_blocks_that_are_cut_differently_come_whole() -> None:
    memory = np.zeros(64, np.uint8)
    view = Region(memory, memory).view(namespace(16), [[[0, 8], [8, 8]], [[16, 4], [20, 12]]])
    assert [len(part) for part in cut(view, (8, 16))] == [2] and cut(view, (8, 16))[0].block_bytes == 16


def fetch_ranges(
    before_range: Callable[[int, FakeSlab], None], lease_s: float = 9.0
) -> tuple[list[tuple[int, list[bool], int]], list[int], npt.NDArray[np.uint8]]:
    """Three asked blocks of two ranges, the middle one missing; what was told, the statuses, and the rows."""
    slab = FakeSlab(3)
    peer = shm.ShmPeer.__new__(shm.ShmPeer)
    peer.tamper, peer._sampler = None, shm.Sampler()
    peer.slabs = FakeSlabs(slab)  # type: ignore[assignment]
    peer.index = NoIndex()  # type: ignore[assignment]
    rows = np.zeros(3, np.dtype([("slab", "<u4"), ("slot", "<u4"), ("offset", "<u8"), ("gen", "<u8"), ("sum", "<u8")]))
    rows["slot"], rows["offset"] = np.arange(3), np.arange(3) * 64
    answer = pb.AcquireOk(
        status=bytes([LOADED, MISSING, LOADED]), tier=bytes(2), lease=5, lease_ms=int(lease_s * 1e3),
        rows=rows[[0, 2]].tobytes(),
    )  # fmt: skip
    peer.link = FakeLink(answer)  # type: ignore[assignment]
    memory = np.zeros((3, 64), np.uint8)
    told: list[tuple[int, list[bool], int]] = []

    def landed(part: int, mask: Mask) -> None:
        told.append((part, mask.tolist(), int(np.count_nonzero(memory[0]))))
        before_range(part + 1, slab)

    blocks = Region(memory.reshape(-1), memory).rows(namespace(64))
    request = Fetch(namespace(64), "", bytes(48), blocks, time.monotonic() + 5, "never", 0, (16, 64), landed)
    fetched = peer.fetch(request)
    assert peer.link.returned == [5]  # type: ignore[attr-defined]
    return told, fetched.status.tolist(), memory


class FakeSlab:
    def __init__(self, slots: int) -> None:
        self.bytes = np.full(slots * 64, 7, np.uint8)
        self.address = self.bytes.ctypes.data
        self.generations = [0] * slots

    def check(self, slot: int, offset: int, nbytes: int) -> None:
        assert slot < len(self.generations) and offset + nbytes <= len(self.bytes)


class FakeSlabs:
    def __init__(self, slab: FakeSlab) -> None:
        self._slab = slab

    def get(self, index: int) -> FakeSlab:
        return self._slab

    def ensure(self, indexes: set[int]) -> dict[int, FakeSlab]:
        return dict.fromkeys(indexes, self._slab)


class NoIndex:
    def learn(self, *_: object) -> None:
        return


class FakeLink:
    def __init__(self, answer: pb.AcquireOk) -> None:
        self.returned: list[int] = []
        self._answer = answer

    def acquire(self, *_: object) -> tuple[pb.AcquireOk, float]:
        return self._answer, time.monotonic()

    def give_back(self, lease: int) -> None:
        self.returned.append(lease)


def test_each_range_is_told_when_it_is_in_place_and_no_later() -> None:
    told, status, memory = fetch_ranges(lambda *_: None)
    assert told == [(0, [True, False, True], 16), (1, [True, False, True], 64)]
    assert status == [LOADED, MISSING, LOADED] and (memory[[0, 2]] == 7).all() and not memory[1].any()


def test_a_slot_that_is_used_again_meanwhile_is_told_of_no_more() -> None:
    def reuse(part: int, slab: FakeSlab) -> None:
        slab.generations[2] = 1

    told, status, _ = fetch_ranges(reuse)
    assert [mask for _, mask, _ in told] == [[True, False, True], [True, False, False]]
    assert status == [LOADED, MISSING, BlockStatus.LEASE_LOST]


def test_nothing_is_told_under_a_lease_that_has_ended() -> None:
    told, status, _ = fetch_ranges(lambda *_: None, lease_s=0.0)
    assert not any(any(mask) for _, mask, _ in told)
    assert status == [BlockStatus.LEASE_LOST, MISSING, BlockStatus.LEASE_LOST]


def test_what_comes_whole_tells_of_all_ranges_at_once() -> None:
    told: list[tuple[int, list[bool]]] = []
    memory = np.zeros(32, np.uint8)
    blocks = Region(memory, memory).rows(namespace(16))
    request = Fetch(
        namespace(16), "", bytes(32), blocks, 0.0, parts=(4, 16), landed=lambda k, mask: told.append((k, mask.tolist()))
    )
    tell_whole(request, np.array([LOADED, MISSING], np.uint8))
    assert told == [(0, [True, False]), (1, [True, False])]
