"""Extents of device memory grow to the allocations that they lie in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.allocations import whole_allocations
from tests.transfer.gpu.fake_device import FakeDevice, fake_device


@pytest.fixture(scope="module")
def device() -> Iterator[FakeDevice]:
    with fake_device(1 << 20) as one:
        yield one


class Ranges:
    """A runtime that knows allocations alone: ``sizes`` one after the other from 1000 on, without a gap."""

    def __init__(self, sizes: list[int]) -> None:
        self.ranges = [(1000 + sum(sizes[:n]), size) for n, size in enumerate(sizes)]

    def allocation(self, address: int) -> tuple[int, int]:
        for base, size in self.ranges:
            if base <= address < base + size:
                return base, size
        raise InvalidArgument(f"{address} lies in no allocation")


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    extents=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=4),
)
def test_every_byte_is_covered_and_no_allocation_more(sizes: list[int], extents: list[tuple[int, int]]) -> None:
    runtime, end = Ranges(sizes), 1000 + sum(sizes)
    asked = [(1000 + start, size) for start, size in extents]
    if any(start + size > end for start, size in asked):
        with pytest.raises(InvalidArgument, match="no allocation"):
            whole_allocations(runtime, asked)  # type: ignore[arg-type]
        return
    touched = {at for start, size in asked for at in range(start, start + size)}
    expected = [(base, size) for base, size in runtime.ranges if touched & set(range(base, base + size))]
    assert whole_allocations(runtime, asked) == expected  # type: ignore[arg-type]


def test_arrays_on_a_device(device: FakeDevice) -> None:
    first, second = device.empty(5000), device.empty(7000)
    inside = [(second.address + 10, 100), (first.address + 4000, 1000), (second.address + 6999, 1)]
    assert whole_allocations(device.runtime, inside) == [(first.address, 5000), (second.address, 7000)]
    with pytest.raises(InvalidArgument, match="no allocation"):
        whole_allocations(device.runtime, [(first.address + 4000, 1001)])
