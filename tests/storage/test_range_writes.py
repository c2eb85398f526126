"""Blocks that come to a node range by range while their writer still makes them: over real sockets, by every way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.base import Fetch, Peer, Push
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.shm import ShmTransport
from tests.waiting import until

from .conftest import keys, payload
from .test_channel import NAMESPACE, endpoint, raw, region_of, reserve, soon, way  # noqa: F401  (fixtures)

SIZE = NAMESPACE.block_bytes
PARTS = (1000, 1001, 4000, SIZE)
COUNT = 12


@dataclass
class Maker:
    """Fills a region range by range: a range is there when it is asked for, and not before."""

    source: Region
    image: np.ndarray
    fails_at: int = -1
    asked: list[int] = field(default_factory=list)
    then: Callable[[int], None] = lambda part: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def written(self, part: int, deadline: float) -> bool:
        assert deadline > time.monotonic()
        with self.lock:
            self.asked.append(part)
            if part == self.fails_at:
                return False
            low = (0, *PARTS)[part]
            rows = self.source.bytes.reshape(COUNT, SIZE)
            rows[:, low : PARTS[part]] = self.image[:, low : PARTS[part]]
            if part == len(PARTS) - 1:
                rows[:] = self.image
        self.then(part)
        return True


@pytest.fixture
def maker(way: tuple[Peer, bool]) -> Maker:  # noqa: F811
    source = region_of(range(COUNT), mapped=way[1])
    image = source.bytes.reshape(COUNT, SIZE).copy()
    source.bytes[:] = 0xEE
    return Maker(source, image)


@pytest.fixture
def peer(way: tuple[Peer, bool]) -> Peer:  # noqa: F811
    return patient(way[0])


def patient(peer: Peer) -> Peer:
    """Of a node that a busy machine keeps silent."""
    peer.link.channel.silence_s = 4.0  # type: ignore[attr-defined]
    return peer


def pieces(region: Region) -> BlockView:
    """Blocks in five pieces each, as layers lie; ranges end inside pieces and between them."""
    cuts = np.array([0, 17, 1000, 1001, 4999, SIZE])
    table = np.empty((COUNT, 5, 2), np.int64)
    table[:, :, 0] = np.arange(COUNT)[:, None] * SIZE + cuts[:-1]
    table[:, :, 1] = np.diff(cuts)
    return region.view(NAMESPACE, table)


def push(peer: Peer, maker: Maker, blocks: BlockView | None = None) -> list[int]:
    view = maker.source.rows(NAMESPACE) if blocks is None else blocks
    request = Push(NAMESPACE, "", keys(range(COUNT)), view, soon(), parts=PARTS, written=maker.written)
    return [int(status) for status in peer.push(request).status]


def loaded(peer: Peer) -> tuple[list[int], np.ndarray]:
    target = Region(np.zeros(COUNT * SIZE, np.uint8), None)
    got = peer.fetch(Fetch(NAMESPACE, "", keys(range(COUNT)), target.rows(NAMESPACE), soon(), "always"))
    return [int(status) for status in got.status], target.bytes.reshape(COUNT, SIZE)


def idle(running: StorageNode) -> bool:
    with running.lock:
        running.state.check()
        return len(running.state.reservations) == 0


@pytest.mark.parametrize("in_pieces", [False, True])
def test_blocks_are_stored_as_they_are_made(running: StorageNode, peer: Peer, maker: Maker, in_pieces: bool) -> None:
    assert push(peer, maker, pieces(maker.source) if in_pieces else None) == [BlockStatus.STORED] * COUNT
    assert sorted(set(maker.asked)) == list(range(len(PARTS)))
    status, rows = loaded(peer)
    assert status == [BlockStatus.LOADED] * COUNT and (rows == maker.image).all()
    assert running.state.counts.bytes_in == COUNT * SIZE
    assert idle(running)


def test_blocks_that_are_there_are_left_out_of_the_later_ranges(running: StorageNode, peer: Peer, maker: Maker) -> None:
    there = region_of(range(3, 5))
    peer.push(Push(NAMESPACE, "", keys(range(3, 5)), there.rows(NAMESPACE), soon()))
    expected = [BlockStatus.ALREADY_PRESENT if 3 <= n < 5 else BlockStatus.STORED for n in range(COUNT)]
    assert push(peer, maker) == expected
    status, rows = loaded(peer)
    assert status == [BlockStatus.LOADED] * COUNT and (rows == maker.image).all()
    assert push(peer, maker) == [BlockStatus.ALREADY_PRESENT] * COUNT


@pytest.mark.parametrize("fails_at", range(len(PARTS)))
def test_what_its_writer_gives_up_is_gone_at_once(
    running: StorageNode, peer: Peer, maker: Maker, fails_at: int
) -> None:
    maker.fails_at = fails_at
    assert push(peer, maker) == [BlockStatus.ABORTED] * COUNT
    assert idle(running), "the slots wait for the reservation's deadline"
    assert loaded(peer)[0] == [BlockStatus.MISSING] * COUNT
    maker.fails_at = -1
    assert push(peer, maker) == [BlockStatus.STORED] * COUNT


def test_a_reservation_that_ends_on_the_way_takes_the_blocks_with_it(
    running: StorageNode, peer: Peer, maker: Maker
) -> None:
    def end(part: int) -> None:
        if part == 2:
            with running.lock:
                running.state.expire(time.monotonic() + 60)

    maker.then = end
    assert push(peer, maker) == [BlockStatus.ABORTED] * COUNT
    assert loaded(peer)[0] == [BlockStatus.MISSING] * COUNT
    assert idle(running)


def test_a_node_that_goes_on_the_way_is_lost(running: StorageNode, peer: Peer, maker: Maker) -> None:
    def stop(part: int) -> None:
        if part == 2:
            running.stop()

    maker.then = stop
    assert push(peer, maker) == [BlockStatus.NODE_LOST] * COUNT


@pytest.mark.parametrize("fails_at", [-1, len(PARTS) - 1])
def test_a_stage_takes_what_is_written_whole(
    running: StorageNode, maker: Maker, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the node cannot read is copied once more, when all of it is there."""
    maker.fails_at = fails_at
    peer = ShmTransport(Identity.new()).connect(endpoint(running))
    patient(peer)
    method = peer.method
    monkeypatch.setattr(peer, "method", lambda region: "" if region is maker.source else method(region))
    stored = fails_at < 0
    assert push(peer, maker) == [BlockStatus.STORED if stored else BlockStatus.ABORTED] * COUNT
    assert maker.asked == [len(PARTS) - 1]
    status, rows = loaded(peer)
    assert status == [BlockStatus.LOADED if stored else BlockStatus.MISSING] * COUNT
    assert not stored or (rows == maker.image).all()
    peer.close()


# ---------------------------------------------------------------- frames by hand


def send(connection: Connection, reservation: int, at: int, data: bytes, sums: list[int] | None = None) -> list[int]:
    packed = b"".join(each.to_bytes(8, "little") for each in sums or ())
    message = pb.Write(reservation=reservation, at=at, nbytes=len(data), checksums=packed)
    frame = connection.call(Kind.WRITE, message.SerializeToString(), raw=[memoryview(data)])
    return list(expect(pb.CommitOk, frame, Kind.COMMIT_OK).status)


def test_ranges_come_in_order_and_only_whole_blocks_are_published(raw: Connection, running: StorageNode) -> None:  # noqa: F811
    data = payload(keys([0]), 0, SIZE)
    right = xxhash.xxh3_64_intdigest(data)
    number = reserve(raw, range(1)).reservation
    assert send(raw, number, 0, data[:1000]) == [BlockStatus.RESERVED]
    commit = pb.Commit(reservation=number, checksums=bytes(8)).SerializeToString()
    with pytest.raises(InvalidArgument, match="not written whole"):
        raw.call(Kind.COMMIT, commit)
    for at, part in ((0, data[:1000]), (2000, data[2000:]), (1000, data[1000:] + b"x")):
        with pytest.raises(InvalidArgument, match="in order"):
            send(raw, number, at, part)
    with pytest.raises(InvalidArgument, match="0 checksums"):
        send(raw, number, 1000, data[1000:])
    assert send(raw, number, 1000, data[1000:], [right]) == [BlockStatus.STORED]


def test_a_wrong_checksum_of_ranges_is_corrupt(raw: Connection, running: StorageNode) -> None:  # noqa: F811
    data = payload(keys([0]), 0, SIZE)
    number = reserve(raw, range(1)).reservation
    send(raw, number, 0, data[:1000])
    wrong = bytes([data[1000] ^ 1]) + data[1001:]
    assert send(raw, number, 1000, wrong, [xxhash.xxh3_64_intdigest(data)]) == [BlockStatus.CORRUPT]
    assert running.state.counts.corrupt == 1
    until(lambda: idle(running))


def test_a_range_for_a_reservation_that_has_ended(raw: Connection, running: StorageNode) -> None:  # noqa: F811
    assert send(raw, 99, 0, bytes(10)) == []
