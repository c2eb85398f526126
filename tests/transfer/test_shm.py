"""Reads over shared memory from a node that goes away between its answer and the copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, KVError, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Endpoint, Fetch
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.server import Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.shm import ShmPeer

INCARNATION = 7
LOADED, MISSING = int(BlockStatus.LOADED), int(BlockStatus.MISSING)


def opened(_: ServerConnection, frame: Frame) -> Reply:
    return Reply(Kind.NAMESPACE_HANDLE, pb.NamespaceHandle(handle=1).SerializeToString())


def granted(_: ServerConnection, frame: Frame) -> Reply:
    """Everything but the first block of more than one."""
    count = len(pb.Acquire.FromString(frame.message).hashes) // 16
    status = bytes([MISSING] if count > 1 else []) + bytes([LOADED]) * max(1, count - 1)
    given = status.count(LOADED)
    answer = pb.AcquireOk(
        status=status, tier=bytes(given), lease=1, lease_ms=10_000, rows=SLOT_ROW.pack(0, 0, 4096, 1, 0) * given
    )
    return Reply(Kind.ACQUIRE_OK, answer.SerializeToString())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Unavailable("the node is stopping"), BlockStatus.NODE_LOST),
        (Busy("later"), BlockStatus.LATE),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_what_was_granted_and_could_not_be_copied_is_not_loaded(
    serve: Callable[..., object], count: int, error: KVError, expected: BlockStatus
) -> None:
    def mapped(_: ServerConnection, frame: Frame) -> Reply:
        raise error

    handlers = {Kind.OPEN_NAMESPACE: opened, Kind.ACQUIRE: granted, Kind.MAP_SLABS: mapped}
    node = serve(handlers, INCARNATION)
    peer = ShmPeer(
        Endpoint("n1", INCARNATION, node.address, str(node.unix)),  # type: ignore[attr-defined]
        Identity.new("client"),
    )
    namespace = Namespace(group="model/t", block_bytes=512, block_tokens=16)
    memory = np.zeros((count, 512), np.uint8)
    rows = Region(memory.reshape(-1), memory).rows(namespace)
    try:
        fetched = peer.fetch(Fetch(namespace, "", bytes(16 * count), rows, time.monotonic() + 5, verify="always"))
    finally:
        peer.close()
    lost = [int(expected)] * max(1, count - 1)
    assert fetched.status.tolist() == ([MISSING] if count > 1 else []) + lost
    assert fetched.bytes_moved == 0


def test_a_view_that_cannot_be_had_gives_its_lease_back(serve: Callable[..., object]) -> None:
    def mapped(_: ServerConnection, frame: Frame) -> Reply:
        raise Unavailable("the node is stopping")

    node = serve({Kind.OPEN_NAMESPACE: opened, Kind.ACQUIRE: granted, Kind.MAP_SLABS: mapped}, INCARNATION)
    peer = ShmPeer(
        Endpoint("n1", INCARNATION, node.address, str(node.unix)),  # type: ignore[attr-defined]
        Identity.new("client"),
    )
    try:
        with pytest.raises(Unavailable):
            peer.view(Namespace(group="model/t", block_bytes=512, block_tokens=16), "", bytes(16), time.monotonic() + 5)
        assert peer.link.take_releases() == (1).to_bytes(8, "little")
    finally:
        peer.close()
