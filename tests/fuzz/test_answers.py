"""What a client makes of answers that decode and mean nothing: arrays of the right size, or a ProtocolError."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvstrata.client.locations import decode_lookup, decode_place
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.replies import elements, flags, statuses
from tests.fuzz.messages import Maker

COUNTS = pytest.mark.parametrize(
    "count", [pytest.param(3000, id="ci"), pytest.param(300_000, id="long", marks=pytest.mark.long)]
)
KNOWN = {int(status) for status in BlockStatus}


def packed(chance: random.Random, kind: type[np.generic]) -> list[bytes]:
    """Arrays that often add up to eight."""
    return [np.array([chance.randrange(9) for _ in range(size)], kind).tobytes() for size in (0, 1, 2, 3, 8)]


@COUNTS
def test_where_blocks_are(seed: int, count: int) -> None:
    chance = random.Random(seed)
    read = 0
    for _ in range(count):
        make = Maker(
            chance,
            {
                "run_code": packed(chance, np.uint16),
                "run_length": [np.array(each, np.uint32).tobytes() for each in ([8], [4, 4], [1, 7], [1, 2, 5], [])],
                "run_state": packed(chance, np.uint8),
                "present": [b"", b"\xff", b"\x01\x02"],
                "hit_blocks": [0, 3, 8],
                "shard_hit_blocks": [0, 3, 8],
                "nodes": [],
            },
        )
        try:
            located = decode_lookup(make.message(pb.LookupOk), 8)
        except ProtocolError:
            pass
        else:
            read += 1
            assert len(located.codes) == len(located.present) == 8 and 0 <= located.hit_blocks <= 8
            assert all((code - 1) >> 2 < len(located.nodes) for code in located.codes.tolist() if code)
        try:
            placed = decode_place(make.message(pb.PlaceOk), 8)
        except ProtocolError:
            continue
        assert len(placed.codes) == len(placed.states) == 8
    assert read, "some of them mean something"


@COUNTS
def test_what_a_node_grants(seed: int, count: int) -> None:
    chance = random.Random(seed)
    loaded = bytes([BlockStatus.LOADED])
    make = Maker(
        chance,
        {
            "status": [loaded * 4, loaded * 2 + b"\x14\x63", b"\x63" * 4, loaded],
            "tier": [b"\x00" * 4, b"\x00\x01", b""],
            "rows": [b"", b"r" * 32 * 4, b"r" * 32 * 2],
            "checksum": [b"c" * 8 * 4, b"c" * 8 * 2, b""],
        },
    )
    granted = 0
    for _ in range(count):
        try:
            got = Granted(make.message(pb.AcquireOk), time.monotonic(), 4)
        except ProtocolError:
            continue
        granted += 1
        assert len(got.status) == 4 and set(got.status.tolist()) <= KNOWN
        assert got.count == len(got.positions) == len(got.tier) == len(got.checksum)
    assert granted


def test_a_status_of_a_newer_version_is_a_refusal_or_a_miss() -> None:
    got = statuses(bytes([BlockStatus.STORED, 9, 99, 0]), 4, BlockStatus.REFUSED)
    assert got.tolist() == [BlockStatus.STORED, BlockStatus.REFUSED, BlockStatus.REFUSED, BlockStatus.REFUSED]
    with pytest.raises(ProtocolError, match="3 statuses for 4 blocks"):
        statuses(b"\x01" * 3, 4, BlockStatus.REFUSED)
    with pytest.raises(ProtocolError, match="flags"):
        flags(b"\x01", 2)
    assert not flags(b"", 2).any() and flags(b"\x02\x00", 2).tolist() == [True, False]
    with pytest.raises(ProtocolError, match="8-byte"):
        elements(b"\x00" * 9, np.uint64)
