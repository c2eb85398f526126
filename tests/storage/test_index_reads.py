"""Reads by a node's shared index, over its real sockets: what comes by it, what does not, and what the node hears."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import ForbiddenSalt, InvalidArgument, Refused, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.node import StorageNode
from kvstrata.transfer import index_layout, index_reads
from kvstrata.transfer.base import Endpoint, Fetch, Fetched, Push
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.index_reads import UNASKED_S
from kvstrata.transfer.regions import Region
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.shm import ShmPeer
from tests.waiting import until

from .conftest import keys, payload

SIZE = 5000
NAMESPACE = Namespace("model", SIZE, 16)
LOADED, MISSING, CORRUPT = int(BlockStatus.LOADED), int(BlockStatus.MISSING), int(BlockStatus.CORRUPT)


class Engine:
    """A client of one node, and what it stored there."""

    def __init__(self, node: StorageNode) -> None:
        self.node = node
        endpoint = Endpoint(
            node.identity.node_id, node.identity.incarnation, node.channel, str(node.unix_path), boot_id()
        )
        self.peer = ShmPeer(endpoint, Identity.new())

    def store(self, numbers: range, salt: str = "", version: int = 0, namespace: Namespace = NAMESPACE) -> None:
        width = namespace.hash_bytes
        data = b"".join(payload(keys([n]), version, namespace.block_bytes) for n in numbers)
        hashes = keys(numbers) if width == 16 else b"".join(keys([n, n]) for n in numbers)
        source = Region(np.frombuffer(bytearray(data), np.uint8), None)
        ask = Push(namespace, salt, hashes, source.rows(namespace), soon())
        stored = {BlockStatus.STORED, BlockStatus.ALREADY_PRESENT}
        until(lambda: set(self.answered(lambda: self.peer.push(ask).status).tolist()) <= stored)

    def answered(self, call: Callable[[], npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """The statuses of a call; made again where the node was too slow for it, on a busy machine."""
        while (status := call()).max() == BlockStatus.NODE_LOST:
            self.peer.upkeep()
        return status

    def load(self, numbers: range, salt: str = "", verify: str = "always", *, here: bool = True) -> Fetched:
        """Every loaded block has the bytes of its key, whichever version. ``here``: the node is."""
        memory = np.zeros((len(numbers), SIZE), np.uint8)
        blocks = Region(memory.reshape(-1), memory).rows(NAMESPACE)
        found: list[Fetched] = []

        def fetch() -> npt.NDArray[np.uint8]:
            ask = Fetch(NAMESPACE, salt, keys(numbers), blocks, soon(), verify)  # type: ignore[arg-type]
            found.append(self.peer.fetch(ask))
            return found[-1].status

        if here:
            self.answered(fetch)
            self.peer.upkeep()
        else:
            fetch()
        got = found[-1]
        for row, number, status in zip(memory, numbers, got.status, strict=True):
            if status == LOADED:
                assert bytes(row) in [payload(keys([number]), version, SIZE) for version in range(3)], "wrong bytes"
        return got

    def counted(self) -> tuple[int, int, int, int]:
        """What the node has counted once it has heard of everything: asked, hits, hits by the index, bytes."""
        self.peer.upkeep()
        self.peer.link.channel.call(Kind.PING, b"", soon())  # on the same connection: what was told is counted
        counts = self.node.state.counts
        return counts.blocks_asked, counts.hits, counts.hits_index, counts.bytes_out


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.fixture
def engine(running: StorageNode) -> Iterator[Engine]:
    one = Engine(running)
    yield one
    one.peer.close()
    with running.lock:
        running.state.check()


def ready(engine: Engine, numbers: range, salt: str = "") -> None:
    """Stored, and read once by asking: from here on they are found, once the node has given a sign of life."""
    engine.store(numbers, salt)
    until(lambda: engine.load(numbers, salt).by_index == len(numbers))


@pytest.mark.parametrize("count", [1, 7, 60])
def test_blocks_are_found_without_asking(engine: Engine, count: int) -> None:
    engine.store(range(count))
    first = engine.load(range(count))
    assert first.by_index == 0 and (first.status == LOADED).all(), "the first answer names the tenant's scope"
    until(lambda: engine.load(range(count)).by_index == count)
    before = engine.counted()
    by_index = 0
    for _ in range(3):
        got = engine.load(range(count))
        assert (got.status == LOADED).all() and got.by_index in (0, count) and not got.tier.any()
        assert got.bytes_moved == count * SIZE and got.status.flags.writeable
        by_index += got.by_index
    assert by_index
    assert engine.counted() == tuple(np.add(before, (3 * count, 3 * count, by_index, 3 * count * SIZE)))


@pytest.mark.parametrize("count", [1, 60])
def test_a_store_tells_first_of_the_reads_before_it(engine: Engine, count: int) -> None:
    """Or it might be given the room of what was read just now."""
    ready(engine, range(count))
    engine.counted()
    before = engine.node.state.counts.hits_index
    until(lambda: engine.load(range(count), here=False).by_index == count)  # a busy node is asked, and counts by itself
    engine.store(range(count, count + 1))
    assert engine.node.state.counts.hits_index == before + count


def test_what_is_not_there_is_asked_for(engine: Engine) -> None:
    ready(engine, range(40))
    got = engine.load(range(20, 60))
    assert got.by_index == 20 and got.status.tolist() == [LOADED] * 20 + [MISSING] * 20
    assert got.bytes_moved == 20 * SIZE
    got = engine.load(range(39, 41))
    assert got.by_index in (0, 1) and got.status.tolist() == [LOADED, MISSING]
    assert engine.load(range(5), "another").status.tolist() == [MISSING] * 5, "a tenant has nothing of another"


def test_pieces_and_wide_hashes(engine: Engine) -> None:
    namespace = replace(NAMESPACE, group="wide", hash_bytes=32)
    engine.store(range(6), namespace=namespace)
    memory = np.zeros(6 * SIZE, np.uint8)
    table = np.empty((6, 2, 2), np.int64)
    table[:, 0, 0], table[:, 0, 1] = np.arange(6) * 1000, 1000
    table[:, 1, 0], table[:, 1, 1] = 6000 + np.arange(6) * (SIZE - 1000), SIZE - 1000
    hashes = b"".join(keys([n, n]) for n in range(6))
    view = Region(memory, memory).view(namespace, table)

    def by_index() -> int:
        memory[:] = 0
        got = engine.peer.fetch(Fetch(namespace, "", hashes, view, soon(), "always"))
        engine.peer.upkeep()
        return got.by_index

    until(lambda: by_index() == 6)
    for n in range(6):
        wanted = np.frombuffer(payload(keys([n]), 0, SIZE), np.uint8)
        assert (memory[n * 1000 : (n + 1) * 1000] == wanted[:1000]).all()
        assert (memory[6000 + n * 4000 : 6000 + (n + 1) * 4000] == wanted[1000:]).all()


# -------------------------------------------------------------------- what happens during a copy

Change = Callable[[StorageNode], object]


def removed(node: StorageNode) -> None:
    node.state.remove(NAMESPACE, "", keys(range(30)), time.monotonic())  # others of the tenant stay


def dropped(node: StorageNode) -> None:
    node.state.drop("", "", time.monotonic())


def outdated(node: StorageNode) -> None:
    node.state.set_epoch("model", 1, time.monotonic())


def left(node: StorageNode) -> None:
    node.state.leave()


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("change", [removed, dropped, outdated, left])
def test_what_goes_during_the_copy_is_not_loaded(
    engine: Engine, change: Change, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(engine, range(60))
    done = []

    def during(copy: Callable[..., None]) -> Callable[..., None]:
        def copied(*where: object) -> None:
            copy(*where)
            if not done:
                done.append(True)
                with engine.node.lock:
                    change(engine.node)

        return copied

    for name in ("copy_few", "copy_into"):
        monkeypatch.setattr(index_reads, name, during(getattr(index_reads, name)))
    got = engine.load(range(count))
    assert done and got.status.tolist() == [MISSING] * count and not got.by_index
    assert engine.load(range(count)).status.tolist() == [MISSING] * count


@pytest.mark.parametrize("gone", [30, 60])
def test_slots_that_are_used_again_during_the_copy_are_not_loaded(engine: Engine, gone: int) -> None:
    """Their memory is other blocks', and of another size where whole slabs were free, when the copy ends."""
    ready(engine, range(60))
    writer = Engine(engine.node)

    done = []

    def rewrite(*_: object) -> None:
        if done:
            return
        done.append(True)
        with engine.node.lock:
            engine.node.state.remove(NAMESPACE, "", keys(range(gone)), time.monotonic())
        writer.store(range(60, 90), version=1)
        writer.store(range(100, 115), namespace=replace(NAMESPACE, group="larger", block_bytes=300_000))

    engine.peer.tamper = rewrite
    got = engine.load(range(60), verify="never")
    writer.peer.close()
    assert got.status.tolist() == [MISSING] * gone + [LOADED] * (60 - gone)


def test_a_block_that_is_not_what_was_stored_is_asked_for_and_verified(engine: Engine) -> None:
    ready(engine, range(20))
    with engine.node.lock:
        block = engine.node.state.inventory.shelves[1, ""].blocks[keys([3])]
        block.bytes()[17] ^= 1
    for numbers, bad in ((range(20), 3), (range(3, 4), 0)):
        got = engine.load(numbers)
        assert got.status[bad] == CORRUPT and np.count_nonzero(got.status == LOADED) == len(numbers) - 1


# -------------------------------------------------------------------- whom it is believed, and who may


def test_a_node_without_a_sign_of_life_is_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(engine, range(20))
    published = engine.node.published
    assert published is not None
    stale = time.monotonic_ns() - index_layout.BEAT_MAX_NS - 1
    monkeypatch.setattr(published, "beat", lambda now_ns: type(published).beat(published, stale))
    until(lambda: engine.load(range(20)).by_index == 0)
    assert (engine.load(range(20)).status == LOADED).all()
    monkeypatch.undo()
    until(lambda: engine.load(range(20)).by_index == 20)


def test_who_has_not_asked_for_long_whether_it_may_read_asks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights end, and whoever is to ask each second may be held up."""
    ready(engine, range(4))
    monkeypatch.setattr(engine.peer.index, "_asks", True)
    monkeypatch.setattr(engine.peer.index, "upkeep", lambda: None)
    engine.peer.index._asked_at = time.monotonic()
    assert engine.load(range(4)).by_index == 4
    engine.peer.index._asked_at -= UNASKED_S
    got = engine.load(range(4))
    assert got.by_index == 0 and got.status.tolist() == [LOADED] * 4


def test_a_node_that_stops_is_not_read_from(running: StorageNode) -> None:
    engine = Engine(running)
    ready(engine, range(20))
    running.stop()
    assert engine.load(range(20), here=False).by_index == 0
    engine.peer.close()


def test_a_peer_that_is_closed_keeps_no_memory_of_the_node(engine: Engine) -> None:
    def mapped() -> int:
        """What may only be read: the node, which is in this process too, writes to its own."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(" r--s " in line and "memfd:kvstrata-" in line for line in lines)

    gc.collect()  # of other tests
    gc.disable()  # a client that lives long collects rarely
    try:
        before = mapped()
        ready(engine, range(9))
        assert mapped() > before
        engine.peer.close()
        assert mapped() == before
    finally:
        gc.enable()
    blocks = Region(np.zeros(SIZE, np.uint8), None).rows(NAMESPACE)
    engine.peer.index.learn(Fetch(NAMESPACE, "", keys([1]), blocks, soon()), 7)
    engine.peer.index.upkeep()
    with pytest.raises(Unavailable):
        engine.peer.slabs.get(0)
    assert mapped() == before


def test_a_node_that_shares_no_index(tmp_path: Path, running: StorageNode) -> None:
    config = replace(running.config, data=tmp_path / "plain", shared_index=False)
    node = StorageNode(config)
    try:
        node.start()
        engine = Engine(node)
        engine.store(range(9))
        for _ in range(3):
            got = engine.load(range(9))
            assert (got.status == LOADED).all() and got.by_index == 0
        with pytest.raises(Refused, match="shares no index"):
            engine.peer.slabs.map_index(None)
        engine.peer.close()
    finally:
        node.stop()


def test_the_index_is_for_who_may_read_everything(running: StorageNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reads its tenants' blocks by asking, as ever; and over tcp nobody is given a descriptor."""
    tcp = Connection.open(running.channel, Identity.new())
    with pytest.raises(InvalidArgument, match="unix socket only"):
        tcp.call(Kind.MAP_INDEX, pb.MapIndex().SerializeToString())
    tcp.close()
    some = Rights("acme", Role.CLIENT, ("acme-*",), ("*",))
    monkeypatch.setattr("kvstrata.transfer.greeting.EVERYTHING", some)
    engine = Engine(running)
    engine.store(range(9), "acme-1")
    for _ in range(3):
        got = engine.load(range(9), "acme-1")
        assert (got.status == LOADED).all() and got.by_index == 0
    with pytest.raises(ForbiddenSalt):
        engine.peer.slabs.map_index(None)
    engine.peer.close()


def test_a_message_of_reads_that_does_not_add_up_is_refused(engine: Engine) -> None:
    ready(engine, range(4))
    before = engine.counted()
    state, handle = engine.node.state, engine.peer.link.handle(NAMESPACE, soon())
    for calls, times in (([4], []), ([3], [1]), ([5], [1])):
        message = pb.Touched(ns=handle, hashes=keys(range(4)))
        message.calls, message.times = np.array(calls, np.uint32).tobytes(), np.array(times, np.uint32).tobytes()
        engine.peer.link.channel.tell(Kind.TOUCHED, message.SerializeToString(), soon())
    assert (engine.load(range(4), "nobody").status == MISSING).all(), "the connection goes on"
    assert state.counts.hits == before[1]
