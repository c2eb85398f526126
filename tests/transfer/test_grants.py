"""An answer to an acquire as arrays, against the same block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.slabs import Slab

SLOTS = 16
SLOT_BYTES = 64


@dataclass
class Mapped:
    """A slab as a client has it, without memory."""

    address: int
    generations: memoryview

    def check(self, slot: int, offset: int, nbytes: int) -> None:
        if slot >= SLOTS or offset + nbytes > SLOTS * SLOT_BYTES:
            raise ProtocolError("outside")


def mapped(count: int) -> dict[int, Slab]:
    words = np.arange(count * SLOTS, dtype=np.uint64).reshape(count, SLOTS)
    return {i: Mapped((i + 1) << 20, memoryview(words[i])) for i in range(count)}  # type: ignore[misc]


def granted(places: list[tuple[int, int]], shifts: list[int]) -> Granted:
    rows = [
        SLOT_ROW.pack(slab, slot, slot * SLOT_BYTES, slab * SLOTS + slot + shift, 0)
        for (slab, slot), shift in zip(places, shifts, strict=True)
    ]
    answer = pb.AcquireOk(
        status=bytes([BlockStatus.LOADED]) * len(rows), tier=bytes(len(rows)), rows=b"".join(rows), lease=1
    )
    return Granted(answer, 0.0, len(rows))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, SLOTS - 1), st.sampled_from([0, 0, 0, 5])), max_size=40),
    st.booleans(),
)
def test_addresses_and_lost_slots_are_those_of_each_block(rows: list[tuple[int, int, int]], alone: bool) -> None:
    places = [(0 if alone else slab, slot) for slab, slot, _ in rows]
    shifts = [shift for _, _, shift in rows]
    slabs, grant = mapped(4), granted(places, shifts)
    expected = [slabs[slab].address + slot * SLOT_BYTES for slab, slot in places]
    assert grant.addresses(slabs, SLOT_BYTES).tolist() == expected
    assert sorted(grant.changed(slabs.__getitem__)) == [i for i, shift in enumerate(shifts) if shift]


@pytest.mark.parametrize("bad", [(0, SLOTS), (2, SLOTS)])
def test_one_slot_outside_its_slab_refuses_them_all(bad: tuple[int, int]) -> None:
    grant = granted([(0, 1), bad, (1, 2)], [0, 0, 0])
    with pytest.raises(ProtocolError):
        grant.addresses(mapped(3), SLOT_BYTES)
