"""A node that writes through says what is flushed, whoever wrote it: the store itself, or demotion before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.ssd.faults import Faults
from kvstrata.storage.ssd.log import SsdLog
from kvstrata.storage.ssd.opening import DeviceConfig
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.moves import Move, TierMoves
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.base import Endpoint, Peer, Push, Pushed, Transport
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.regions import Region
from kvstrata.transfer.shm import ShmPeer, ShmTransport
from kvstrata.transfer.tcp import SOCKETS, TcpPeer, TcpTransport
from tests.waiting import until

from .conftest import key, keys, payload

BLOCK_BYTES = 64 << 10
NAMESPACE = Namespace("model", BLOCK_BYTES, 16)
STORED, PRESENT = int(BlockStatus.STORED), int(BlockStatus.ALREADY_PRESENT)
#: Blocks of a store that commits in its first message over shm, and of one that does not.
FEW, MANY = 4, 40
#: Of a store over TCP, one after another on each connection.
PARTS = 3


class Through:
    """A node that writes through, on real files; ``between`` is called once, after a store has become visible."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults = Faults()
        self.between: Callable[[], None] | None = None

        def opened(config: StorageConfig, node_id: str, *_: object) -> SsdLog:
            devices = [DeviceConfig(*device) for device in config.ssd]
            return SsdLog.open(devices, node_id=node_id, open_file=self.faults.open_file)

        monkeypatch.setattr("kvstrata.storage.node.open_store", opened)
        # Demotion does what the tests say, and nothing by itself.
        monkeypatch.setattr(Movers, "_demote", lambda movers: None)
        config = StorageConfig(
            (), "127.0.0.1:0", "127.0.0.1:0", base / "node", 8 << 20, slab_bytes=1 << 20,
            ssd=((base / "ssd", 32 << 20),), ssd_policy=SsdPolicy.WRITE_THROUGH,
        )  # fmt: skip
        self.node = StorageNode(config)
        changed = self.node._changed

        def noted() -> None:
            changed()
            between, self.between = self.between, None
            if between is not None:
                between()

        monkeypatch.setattr(self.node, "_changed", noted)
        self.node.start()
        self.peers: list[Peer] = []

    @property
    def moves(self) -> TierMoves:
        assert self.node.ssd is not None
        return self.node.ssd.moves

    @property
    def movers(self) -> Movers:
        assert self.node.ssd is not None
        return self.node.ssd.movers

    def connect(self, transport: Callable[[Identity], Transport]) -> Peer:
        node = self.node
        there = Endpoint(node.identity.node_id, node.identity.incarnation, node.channel, str(node.unix_path), boot_id())
        peer = transport(Identity.new()).connect(there)
        assert isinstance(peer, (ShmPeer, TcpPeer))
        peer.link.channel.silence_s = 5.0  # both ends are in this process
        self.peers.append(peer)
        return peer

    def demotion(self) -> Move | None:
        """A round's choice, as far as the bytes."""
        with self.node.lock:
            return self.moves.demotions(1 << 30, time.monotonic(), everything=True)

    def on_their_way(self, peer: Peer, numbers: range) -> Move:
        """Store blocks that are not written through, and have demotion choose them."""
        self.moves.policy = SsdPolicy.DEMOTE
        assert not any(push(peer, numbers).durable.tolist())  # type: ignore[union-attr]
        move = self.demotion()
        assert move is not None and len(move.source) == len(numbers)
        self.moves.policy = SsdPolicy.WRITE_THROUGH
        return move

    def when_waited_for(self, monkeypatch: pytest.MonkeyPatch, move: Move) -> None:
        """Perform a move once somebody waits, and not before."""
        waits, begun = self.movers._await, threading.Event()

        def performed(done: Callable[[], bool], timeout_s: float) -> None:
            if not begun.is_set():
                begun.set()
                threading.Thread(target=self.movers.perform, args=(move,)).start()
            waits(done, timeout_s)

        monkeypatch.setattr(self.movers, "_await", performed)

    def noted_waits(self, monkeypatch: pytest.MonkeyPatch, *, really: bool) -> list[float]:
        """Seconds that answers wait for at most, in the list that is returned; they do not unless ``really``."""
        noted, waits = list[float](), self.movers._await

        def waited(done: Callable[[], bool], timeout_s: float) -> None:
            noted.append(timeout_s)
            if really:
                waits(done, timeout_s)

        monkeypatch.setattr(self.movers, "_await", waited)
        return noted

    def end(self) -> None:
        self.faults.resume()
        for peer in self.peers:
            peer.close()
        with self.node.lock:
            self.node.state.check()
            self.moves.check()
        self.node.stop()


def push(peer: Peer, numbers: range, seconds: float = 60.0) -> Pushed:
    data = bytearray(b"".join(payload(key(n), 0, BLOCK_BYTES) for n in numbers))
    view = Region(np.frombuffer(data, np.uint8), None).rows(NAMESPACE)
    return peer.push(Push(NAMESPACE, "", keys(numbers), view, time.monotonic() + seconds))


def durable(pushed: Pushed) -> list[bool]:
    assert pushed.durable is not None
    return [bool(each) for each in pushed.durable]


@pytest.fixture
def through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Through]:
    one = Through(tmp_path, monkeypatch)
    yield one
    one.end()


@pytest.fixture(params=[ShmTransport, TcpTransport], ids=["shm", "tcp"])
def peer(through: Through, request: pytest.FixtureRequest) -> Peer:
    return through.connect(request.param)


@pytest.mark.parametrize("count", [FEW, MANY])
def test_demotion_does_not_come_between_a_store_and_its_flush(through: Through, peer: Peer, count: int) -> None:
    taken: list[Move | None] = []
    through.between = lambda: taken.append(through.demotion())
    done = push(peer, range(count))
    assert set(done.status) == {STORED} and through.between is None
    for move in taken:
        if move is not None:
            through.movers.perform(move)
    assert durable(done) == [True] * count


@pytest.mark.parametrize("count", [FEW, MANY])
def test_what_is_here_and_on_its_way_is_waited_for(
    through: Through, peer: Peer, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = through.on_their_way(peer, range(count))
    through.when_waited_for(monkeypatch, move)
    done = push(peer, range(count))
    assert set(done.status) == {PRESENT} and durable(done) == [True] * count


@pytest.mark.parametrize("count", [FEW, MANY])
def test_beside_what_is_new(through: Through, peer: Peer, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    move = through.on_their_way(peer, range(count // 2))
    through.when_waited_for(monkeypatch, move)
    done = push(peer, range(count))
    assert list(done.status) == [PRESENT] * (count // 2) + [STORED] * (count // 2)
    assert durable(done) == [True] * count


@pytest.mark.parametrize("count", [FEW, MANY])
def test_a_device_that_hangs_costs_the_flush_and_not_the_store(
    through: Through, peer: Peer, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer has to travel, and bytes that are still to come take time: a part of the deadline is for that."""
    waits = through.noted_waits(monkeypatch, really=False)
    through.faults.stall()
    done = push(peer, range(count), 60.0)
    assert set(done.status) == {STORED} and not any(durable(done))
    assert waits and min(waits) > 0 and max(waits) <= 30.0
    waits.clear()
    done = push(peer, range(2 * count), 60.0)
    assert list(done.status) == [PRESENT] * count + [STORED] * count and not any(durable(done))
    two_messages = isinstance(peer, TcpPeer) or count == MANY
    assert max(waits) <= 30.0 and min(waits) <= (15.0 if two_messages else 30.0)


def test_a_device_that_hangs_is_waited_for_once(through: Through, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and not by each part of a store in its turn, nor by who stores the same again, or more: really waited."""
    monkeypatch.setattr("kvstrata.transfer.tcp.PART_BYTES", FEW * BLOCK_BYTES)
    peer = through.connect(TcpTransport)
    count = PARTS * SOCKETS * FEW
    waits = through.noted_waits(monkeypatch, really=True)
    through.faults.stall()
    done = push(peer, range(count), 12.0)
    assert set(done.status) == {STORED} and not any(durable(done))
    assert 1 <= len(waits) <= SOCKETS and max(waits) <= 6.0
    until(lambda: through.moves.writing_s(time.monotonic()) > 2.5)  # as long as who comes next would wait
    waits.clear()
    done = push(peer, range(count), 4.0)
    assert set(done.status) == {PRESENT} and not any(durable(done)) and not waits
    done = push(peer, range(count + FEW), 4.0)
    assert set(done.status) == {PRESENT, STORED} and not any(durable(done)) and not waits
    through.faults.resume()
    until(lambda: not through.moves.moving)
    assert all(durable(push(peer, range(FEW), 60.0))), "it was on its way"
    assert all(durable(push(peer, range(count + FEW, count + 2 * FEW), 60.0))), "it is waited for again"


def test_demotion_by_policy_makes_no_writer_wait(through: Through, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    move = through.on_their_way(peer, range(FEW))
    through.moves.policy = SsdPolicy.DEMOTE
    monkeypatch.setattr(through.movers, "_await", lambda done, timeout_s: pytest.fail("it waits"))
    done = push(peer, range(2 * FEW))
    assert list(done.status) == [PRESENT] * FEW + [STORED] * FEW and not any(durable(done))
    through.movers.perform(move)
    assert durable(push(peer, range(2 * FEW))) == [True] * FEW + [False] * FEW, "what is there is said at once"
