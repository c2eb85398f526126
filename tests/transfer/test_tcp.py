"""Reads over TCP that end before their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

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
from kvstrata.transfer.regions import Region
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
