"""Reads over shared memory from a node that goes away between its answer and the copy."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, KVError, ProtocolError, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import SLOT_ROW, BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer import shm
from kvstrata.transfer.base import Endpoint, Fetch
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import BlockView, Region
from kvstrata.transfer.server import Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.shm import ShmPeer
from kvstrata.transfer.slabs import Slab, SlabMap

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


SLOTS, TABLE_BYTES = 16, 4096


@pytest.fixture
def slab() -> Iterator[tuple[Slab, npt.NDArray[np.uint8]]]:
    """A slab as a client maps it, and its bytes as its node has them: slot i is of generation i + 1."""
    length = TABLE_BYTES + SLOTS * 512
    fd = os.memfd_create("slab")
    os.ftruncate(fd, length)
    memory = np.frombuffer(mmap.mmap(fd, length), np.uint8)
    memory[TABLE_BYTES:] = np.random.default_rng(3).integers(0, 256, SLOTS * 512, np.uint8)
    memory[: SLOTS * 8].view(np.uint64)[:] = np.arange(SLOTS) + 1
    yield Slab(fd, length, SLOTS), memory
    os.close(fd)


@pytest.mark.parametrize("few", [0, 16], ids=["arrays", "plain numbers"])
@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_few_blocks_are_read_as_many_are(
    slab: tuple[Slab, npt.NDArray[np.uint8]], few: int, data: st.DataObject
) -> None:
    """From slots in any order into rows in any order; those that changed or do not match are no hits."""
    slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    rows = data.draw(st.permutations(range(len(slots))))
    changed = data.draw(st.sets(st.sampled_from(slots)))
    corrupt = data.draw(st.sets(st.sampled_from(slots)))
    mapped, memory = slab
    payload = memory[TABLE_BYTES:].reshape(SLOTS, 512)
    peer = ShmPeer(Endpoint("n1", INCARNATION, "127.0.0.1:1", "/nowhere"), Identity.new("client"))
    peer.slabs._slabs[0] = mapped
    described = [
        (0, slot, TABLE_BYTES + slot * 512, slot + 1 + (slot in changed), xxhash.xxh3_64_intdigest(payload[slot]))
        for slot in slots
    ]
    answer = pb.AcquireOk(
        status=bytes([LOADED] * len(slots)),
        tier=bytes(slot % 2 for slot in slots),
        lease=9,
        lease_ms=10_000,
        rows=b"".join(SLOT_ROW.pack(*row[:4], row[4] ^ (row[1] in corrupt)) for row in described),
        delta_seq=5,
    )
    target = np.zeros((len(slots), 512), np.uint8)
    region, namespace = Region(target.reshape(-1), target), Namespace(group="g", block_bytes=512, block_tokens=16)
    blocks = BlockView(region, np.array([[[row * 512, 512]] for row in rows], np.int64), 512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "FEW_BLOCKS", few)
        patch.setattr(peer.link, "acquire", lambda *_: (answer, time.monotonic()))
        fetched = peer.fetch(Fetch(namespace, "", bytes(16 * len(slots)), blocks, time.monotonic() + 5, "always"))

    def state(slot: int) -> BlockStatus:
        bad = BlockStatus.CORRUPT if slot in corrupt else BlockStatus.LOADED
        return BlockStatus.LEASE_LOST if slot in changed else bad

    wanted = [int(state(slot)) for slot in slots]
    assert fetched.status.tolist() == wanted and fetched.delta_seq == 5
    assert fetched.bytes_moved == 512 * wanted.count(LOADED) and fetched.tier.tolist() == [slot % 2 for slot in slots]
    assert (target[rows] == payload[slots]).all() and peer.link.take_releases() == (9).to_bytes(8, "little")
    assert fetched.status.flags.writeable and fetched.tier.flags.writeable


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("row", [(0, SLOTS + 1_000, TABLE_BYTES, 1, 0), (0, 0, TABLE_BYTES + SLOTS * 512 - 1, 1, 0)])
def test_a_slot_outside_its_slab_is_not_read(
    slab: tuple[Slab, npt.NDArray[np.uint8]], count: int, row: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = ShmPeer(Endpoint("n1", INCARNATION, "127.0.0.1:1", "/nowhere"), Identity.new("client"))
    peer.slabs._slabs[0] = slab[0]
    answer = pb.AcquireOk(
        status=bytes([LOADED] * count), tier=bytes(count), lease=9, lease_ms=10_000, rows=SLOT_ROW.pack(*row) * count
    )
    monkeypatch.setattr(peer.link, "acquire", lambda *_: (answer, time.monotonic()))
    target = np.zeros((count, 512), np.uint8)
    namespace = Namespace(group="g", block_bytes=512, block_tokens=16)
    blocks = Region(target.reshape(-1), target).rows(namespace)
    with pytest.raises(ProtocolError, match="outside its slab"):
        peer.fetch(Fetch(namespace, "", bytes(16 * count), blocks, time.monotonic() + 5))
    assert peer.link.take_releases() == (9).to_bytes(8, "little")


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


def test_a_node_that_is_gone_is_known_to_be_before_anything_is_asked(serve: Callable[..., object]) -> None:
    """Its end of the connection says so, and so its index is not believed any more."""
    node = serve({}, INCARNATION)
    slabs = SlabMap(str(node.unix), Identity.new("client"), INCARNATION)  # type: ignore[attr-defined]
    assert not slabs.alive(), "there is no connection yet"
    slabs._connected()
    assert slabs.alive()
    node.stop()  # type: ignore[attr-defined]
    assert not slabs.alive()
    slabs.close()
    assert not slabs.alive()
