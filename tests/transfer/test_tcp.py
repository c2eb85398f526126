"""Reads over TCP that end before their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer import tcp
from kvstrata.transfer.base import Endpoint, Fetch
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.frames import Disconnected, Frame
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.server import Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.tcp import TcpPeer

INCARNATION = 7
SIZE = 512
NAMESPACE = Namespace(group="model/t", block_bytes=SIZE, block_tokens=16)
LOADED = int(BlockStatus.LOADED)


def opened(_: ServerConnection, frame: Frame) -> Reply:
    return Reply(Kind.NAMESPACE_HANDLE, pb.NamespaceHandle(handle=1).SerializeToString())


def answered(payloads: list[bytes], checksums: list[int]) -> Reply:
    message = pb.AcquireOk(
        status=bytes([LOADED]) * len(payloads),
        tier=bytes(len(payloads)),
        checksum=np.array(checksums, np.uint64).tobytes(),
    )
    return Reply(Kind.ACQUIRE_OK, message.SerializeToString(), [memoryview(payload) for payload in payloads])


def fetch(
    serve: Callable[..., object],
    acquire: Callable[[ServerConnection, Frame], Reply],
    count: int,
    back: Callable[[npt.NDArray[np.uint8]], None] = lambda memory: None,
) -> list[int]:
    """Statuses; ``back`` looks at the memory the moment the call is over, well or not."""
    node = serve({Kind.OPEN_NAMESPACE: opened, Kind.ACQUIRE: acquire}, INCARNATION)
    memory = np.zeros((count, SIZE), np.uint8)
    rows = Region(memory.reshape(-1), memory).rows(NAMESPACE)
    with ThreadPoolExecutor(4) as threads:
        peer = TcpPeer(Endpoint("n1", INCARNATION, node.address), Identity.new("client"), threads)  # type: ignore[attr-defined]
        try:
            asked = Fetch(NAMESPACE, "", b"".join(bytes([i]) * 16 for i in range(count)), rows, time.monotonic() + 5)
            return [int(status) for status in peer.fetch(asked).status]
        finally:
            back(memory)
            peer.close()


def test_a_corrupt_block_stays_corrupt_when_those_after_it_do_not_come(
    serve: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RECEIVE_BYTES", SIZE)
    good, bad = b"g" * SIZE, b"b" * SIZE

    def acquire(_: ServerConnection, frame: Frame) -> Reply:
        return answered([bad, good, good], [1, *[xxhash.xxh3_64_intdigest(good)] * 2])

    real = Connection.receive_raw

    def cut_short(self: Connection, views: list[memoryview], deadline: float, filled: Callable[[int], None]) -> None:
        def counted(view: int) -> None:
            filled(view)
            if view == 1:
                self.broken = True
                raise Disconnected("cut off after two blocks")

        real(self, views, deadline, counted)

    monkeypatch.setattr(Connection, "receive_raw", cut_short)
    assert fetch(serve, acquire, 3) == [BlockStatus.CORRUPT, LOADED, BlockStatus.NODE_LOST]


@pytest.mark.parametrize("joined", [1, 2, 9])
def test_of_blocks_that_came_together_the_corrupt_one_is_found(
    serve: Callable[..., object], monkeypatch: pytest.MonkeyPatch, joined: int
) -> None:
    monkeypatch.setattr(tcp, "RECEIVE_BYTES", joined * SIZE)
    good, bad = b"g" * SIZE, b"b" * SIZE

    def acquire(_: ServerConnection, frame: Frame) -> Reply:
        return answered([good, good, bad, good, good], [xxhash.xxh3_64_intdigest(good)] * 5)

    def back(memory: npt.NDArray[np.uint8]) -> None:
        assert (memory[[0, 1, 3, 4]] == good[0]).all()

    assert fetch(serve, acquire, 5, back) == [LOADED, LOADED, BlockStatus.CORRUPT, LOADED, LOADED]


@given(
    rows=st.lists(st.integers(0, 15), max_size=16, unique=True),
    pieces=st.sampled_from([1, 2, 4]),
    joined=st.integers(1, 5 * SIZE),
)
def test_buffers_hold_the_blocks_bytes_in_order(rows: list[int], pieces: int, joined: int) -> None:
    memory = np.arange(16 * SIZE, dtype=np.uint32).astype(np.uint8)
    length = SIZE // pieces
    table = np.array([[(row * SIZE + i * length, length) for i in range(pieces)] for row in rows], np.int64)
    blocks = BlockView(Region(memory, memory), table.reshape(len(rows), pieces, 2), SIZE)
    views, ends = tcp._views(blocks, joined)
    assert b"".join(views) == memory.reshape(16, SIZE)[rows].tobytes()
    assert all(view.nbytes <= max(joined, SIZE) for view in views) and len(ends) == len(views) + 1
    assert ends == [sum(view.nbytes for view in views[:upto]) // SIZE for upto in range(len(ends))]
    if pieces == 1 and joined >= 2 * SIZE and any(b == a + 1 for a, b in pairwise(rows)):
        assert len(views) < len(rows), "neighbours share a buffer"


def test_a_call_that_is_refused_ends_when_all_its_parts_have(
    serve: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a part would still write to memory that the caller has back."""
    monkeypatch.setattr(tcp, "PART_BYTES", 2 * SIZE)
    payload = b"g" * SIZE
    refused, ended = threading.Event(), threading.Event()

    def acquire(_: ServerConnection, frame: Frame) -> Reply:
        if pb.Acquire.FromString(frame.message).hashes[0] == 0:
            refused.set()
            raise FingerprintMismatch("another epoch")
        assert refused.wait(5)
        time.sleep(0.05)  # long enough for a caller that does not wait to be back
        ended.set()
        return answered([payload] * 2, [xxhash.xxh3_64_intdigest(payload)] * 2)

    def back(memory: npt.NDArray[np.uint8]) -> None:
        assert ended.is_set() and (memory[2:] == payload[0]).all(), "the call was over before one of its parts"

    with pytest.raises(FingerprintMismatch):
        fetch(serve, acquire, 4, back)
