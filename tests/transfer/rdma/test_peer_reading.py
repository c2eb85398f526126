"""Which bytes a read over rails names: the pieces of a range of blocks, and the generation words of their slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.rdma.opening import Opened
from kvstrata.transfer.rdma.reading import GAP_WORDS, WORD_BYTES, Reading, Words, pieces_between
from kvstrata.transfer.regions import Region

SLOTS = 5000


@dataclass
class Flat:
    """Stands for scratch: memory, and where it is."""

    bytes: np.ndarray  # type: ignore[type-arg]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, SLOTS - 1)), min_size=1, max_size=200, unique=True))
def test_words_are_those_of_the_slots_in_their_order(rows: list[tuple[int, int]]) -> None:
    tables = [np.arange(SLOTS, dtype=np.uint64) * np.uint64(3) + np.uint64(slab) for slab in range(3)]
    slabs = np.array([(table.ctypes.data, table.nbytes) for table in tables], np.uint64)
    slab, slot = np.array(rows, np.int64).T
    words = Words(slabs, slab, slot)
    scratch = np.zeros(words.nbytes, np.uint8)
    for source, to, length in zip(words.remote, words.offset, words.length, strict=True):
        assert to >= 0 and to + length <= words.nbytes
        ctypes.memmove(scratch.ctypes.data + int(to), int(source), int(length))
    got = words.read_from(Flat(scratch))  # type: ignore[arg-type]
    assert got.tolist() == [int(tables[a][b]) for a, b in rows]
    assert words.nbytes <= len(rows) * (GAP_WORDS + 1) * WORD_BYTES, "no more than the gaps that are worth it"


@settings(deadline=None)
@given(st.data())
def test_pieces_of_a_range_are_its_bytes(data: st.DataObject) -> None:
    size, count = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4))
    memory = np.arange(4096, dtype=np.uint16).astype(np.uint8)
    table, at = [], 0
    for _ in range(count):
        cuts = sorted(data.draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=1)) if size > 1 else [])
        row = []
        for length in np.diff([0, *cuts, size]).tolist():
            at += data.draw(st.integers(0, 5))
            row.append((at, length))
            at += length
        table.append(row)
    blocks = Region(memory, memory).view(Namespace("m", size, 16), np.array(table, np.int64))
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low + 1, size))
    address, (block, offset), length = pieces_between(blocks, low, high)
    assert (length > 0).all()
    images = [np.concatenate([memory[a : a + n] for a, n in row]) for row in table]
    found: list[list[int]] = [[] for _ in range(count)]
    for a, b, o, n in zip(address.tolist(), block.tolist(), offset.tolist(), length.tolist(), strict=True):
        assert o == low + len(found[b]), "in order, none left out"
        found[b] += memory[a - memory.ctypes.data :][:n].tolist()
    assert found == [image[low:high].tolist() for image in images]


@pytest.mark.parametrize(
    "row",
    [
        (2, 0, 4096, 1, 0),  # no such slab
        (0, 0, 65536 - 99, 1, 0),  # beyond its end
        (0, 0, (1 << 64) - 50, 1, 0),
        (0, 8192, 4096, 1, 0),  # its generation word is
        (0, (1 << 32) - 1, 4096, 1, 0),
    ],
)
def test_a_slot_outside_the_nodes_slabs_is_read_by_nobody(row: tuple[int, ...]) -> None:
    reply = pb.AcquireOk(status=bytes([BlockStatus.LOADED]), tier=b"\0", rows=SLOT_ROW.pack(*row), lease=1, lease_ms=9)
    memory = np.zeros(100, np.uint8)
    blocks = Region(memory, memory).rows(Namespace("m", 100, 16))
    opened = Opened(None, "node", np.array([[4096, 65536], [1 << 20, 65536]], np.uint64), 0)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="node named"):
        Reading(opened, Granted(reply, 0.0, 1), blocks, 0.0)
