"""The framed channel of a node and of a master under messages that decode and mean nothing, replayed and cut short.

The shipped daemons in this process, so that what no caller sees shows: a handler that raised, a loop that failed,
a state that does not hold together, memory that grew.
"""

from __future__ import annotations

import random
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage import node as node_module
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.serving import rails, regions
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.rdma.engine import JobState
from kvstrata.transfer.server import ChannelServer
from tests.e2e.real_pool import keys, payload
from tests.fuzz.messages import Maker
from tests.storage.fake_engine import CMA, FakeEngine, FakeJob, failing, posted, waiting
from tests.waiting import until

ANY = "127.0.0.1:0"
NS = Namespace("model", 4096, 16)
HASHES = [keys(1, "f"), keys(3, "f"), keys(3, "g"), b"", keys(40, "h")]
#: What each request kind carries; a kind that is not here goes out with bytes of no message.
BODIES = {
    Kind.OPEN_NAMESPACE: pb.OpenNamespace, Kind.LOOKUP: pb.Lookup, Kind.PLACE: pb.Place,
    Kind.MISS_REPORT: pb.MissReport, Kind.REMOVE: pb.Remove, Kind.HEARTBEAT: pb.Heartbeat,
    Kind.ACQUIRE: pb.Acquire, Kind.RELEASE: pb.Release, Kind.RENEW: pb.Renew, Kind.MAP_SLABS: pb.MapSlabs,
    Kind.REGISTER_REGION: pb.RegisterRegion, Kind.UNREGISTER_REGION: pb.UnregisterRegion,
    Kind.RESERVE: pb.Reserve, Kind.WRITE: pb.Write, Kind.PULL: pb.Pull, Kind.COMMIT: pb.Commit,
    Kind.ABORT: pb.Abort, Kind.HINT: pb.Hint, Kind.HELLO: pb.Hello,
    Kind.OPEN_RAILS: pb.OpenRails, Kind.TEST_RAIL: pb.TestRail,
    Kind.MAP_INDEX: pb.MapIndex, Kind.TOUCHED: pb.Touched,
}  # fmt: skip
#: What peers on rails have registered: this process's own, so that a fake agent can read it.
MEMORY = np.zeros(256 << 10, np.uint8)
CI = pytest.param(1500, id="ci")
LONG = pytest.param(20_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    one = Master(MasterConfig(ANY, ANY, ANY, str(tmp_path / "state.db")))
    yield one
    one.stop()


@pytest.fixture
def ready() -> dict[str, str]:
    """The node's ready line, once it is started."""
    return {}


@pytest.fixture
def node(master: Master, tmp_path: Path, ready: dict[str, str]) -> Iterator[StorageNode]:
    config = StorageConfig((str(master.ready()["channel"]),), ANY, ANY, tmp_path / "node", 8 << 20, slab_bytes=1 << 20)
    one = StorageNode(config)
    ready.update(one.start())
    yield one
    one.stop()


class Wire:
    """Connections to one port, opened anew whenever the other side hangs up; frames are remembered to be replayed."""

    def __init__(self, address: str, chance: random.Random, preface: bytes = b"") -> None:
        family, where = (socket.AF_UNIX, address) if address.startswith("/") else (socket.AF_INET, _host_port(address))
        self._family, self._where = family, where
        self._chance = chance
        self._preface = preface  #: goes first on each connection
        self._sent: list[bytes] = []
        self._sock: socket.socket | None = None

    def send(self, frame: bytes) -> None:
        self._sent = [*self._sent[-200:], frame]
        roll = self._chance.random()
        if roll < 0.1:  # again, or one of long ago
            frame += self._chance.choice(self._sent)
        elif roll < 0.15:  # cut short: the rest never comes
            self._write(frame[: self._chance.randrange(len(frame))])
            self.close()
            return
        elif roll < 0.2:
            turned = bytearray(frame)
            turned[self._chance.randrange(len(turned))] ^= 1 << self._chance.randrange(8)
            frame = bytes(turned)
        self._write(frame)

    def _write(self, data: bytes) -> None:
        try:
            sock = self._sock or self._opened()
            sock.sendall(data)
            sock.settimeout(0.005)
            try:
                if not sock.recv(1 << 16):
                    self.close()
            except TimeoutError:
                pass
        except OSError:
            self.close()

    def _opened(self) -> socket.socket:
        sock = socket.socket(self._family)
        sock.settimeout(5)
        sock.connect(self._where)
        hello = Identity.new().hello().SerializeToString()
        sock.sendall(wire.encode_header(Kind.HELLO, 1, len(hello)) + hello)
        sock.recv(1 << 16)
        if self._preface:
            sock.sendall(self._preface)
        self._sock = sock
        return sock

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def pairs(blocks: int) -> bytes:
    """Descriptors of blocks one after the other."""
    return np.array([[block * 4096, 4096] for block in range(blocks)], np.int64).tobytes()


def maker(chance: random.Random) -> Maker:
    return Maker(
        chance,
        {
            "ns": [1, 1, 2],
            "hashes": HASHES,
            "parent": [b"", keys(1, "f")],
            "group": ["model"],
            "block_bytes": [4096],
            "block_tokens": [16],
            "hash_bytes": [16],
            "shard": [0],
            "shard_count": [1],
            "salt": ["", "t"],
            "deadline_ms": [1, 50],
            "epoch": [0],
            "reservation": list(range(1, 30)),
            "leases": [np.arange(1, 9, dtype=np.uint64).tobytes()],
            "mode": [0, 1, 2, 3],
            "region": [1, 2],
            "rails": ["cma", "cma", ""],
            "backend": ["UCX"],
            "agent": [b"", b"writer", b"writer", b"other"],
            "memory": ["", "", "cuda:0"],
            "address": [MEMORY.ctypes.data],
            "length": [MEMORY.nbytes],
            "descriptors": [pairs(1), pairs(3), pairs(3)],
            "checksums": [b"", b"", bytes(8), bytes(24)],
            "releases": [b"", np.arange(1, 9, dtype=np.uint64).tobytes()],
            "pieces": [1],
            "slabs": [np.arange(4, dtype=np.uint32).tobytes()],
        },
    )


def frames(chance: random.Random, count: int, often: Sequence[Kind] = ()) -> Iterator[bytes]:
    make = maker(chance)
    if often:
        make.sense = 0.96
    opening = pb.OpenNamespace(spec=NS.to_spec()).SerializeToString()
    yield wire.encode_header(Kind.OPEN_NAMESPACE, 2, len(opening)) + opening
    for number in range(count):
        kind = chance.choice([*BODIES, *often] if chance.random() < 0.9 else list(Kind))
        body = BODIES.get(kind)
        message = make.message(body).SerializeToString() if body else chance.randbytes(chance.randrange(40))
        raw = chance.randbytes(chance.choice((0, 4096, 4096, 100))) if kind in wire.WITH_RAW else b""
        yield wire.encode_header(kind, number + 3, len(message), len(raw)) + message + raw


def fuzz(
    address: str, server: ChannelServer, seed: int, count: int, preface: bytes = b"", often: Sequence[Kind] = ()
) -> None:
    chance = random.Random(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    link = Wire(address, chance, preface)
    for frame in frames(chance, count, often):
        link.send(frame)
    link.close()
    assert server.counts["handler_errors"] == 0, "a handler raised what is no answer: see its log"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 96 << 10, "something was allocated by a length that nobody checked"


def sound(master: Master, node: StorageNode) -> None:
    """Both still work for somebody who means it."""
    with node.lock:
        node.state.check()
    with Client(str(master.ready()["channel"]), transport="tcp", verify="always") as client:
        ns = client.namespace("model/after", block_bytes=4096, block_tokens=16)
        hashes = keys(20, "after")
        data = payload(hashes, "", 4096)
        rows = client.register(data.copy()).rows(ns)
        until(lambda: client.store(ns, "", hashes, rows).stored.all())
        into = np.zeros_like(data)
        target = client.register(into).rows(ns)
        until(lambda: client.load(ns, "", hashes, target).loaded.all())
        assert (into == data).all()
    until(lambda: not len(node.state.leases) and not len(node.state.reservations), 70)
    failed = [loop.name for loops in (node.loops, master.loops) for loop in loops._loops if loop.failures]
    assert not failed, failed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
@pytest.mark.parametrize("port", ["tcp", "unix"])
def test_a_node(master: Master, node: StorageNode, ready: dict[str, str], port: str, seed: int, count: int) -> None:
    fuzz(ready["channel" if port == "tcp" else "unix"], node.server, seed, count)
    sound(master, node)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
def test_a_node_with_rails(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int
) -> None:
    """Transfers that fail, are never posted, or settle long after their writers have gone."""
    chance = random.Random(seed)

    def behave(job: FakeJob) -> None:
        inside = job.remote.address - MEMORY.ctypes.data
        there = bool(((inside >= 0) & (inside + job.remote.length <= MEMORY.nbytes)).all())
        (chance.choice((FakeJob.finish, failing, waiting, posted)) if there else failing)(job)

    engine = FakeEngine(behave=behave)
    monkeypatch.setattr(rails, "TEST_S", 0.01)
    monkeypatch.setattr(regions, "SETTLE_S", 0.01)
    monkeypatch.setattr(
        node_module, "open_rails", lambda name, options, state, lock: (NodeRails(engine, CMA, state, lock), "")
    )
    config = StorageConfig((str(master.ready()["channel"]),), ANY, ANY, tmp_path / "node", 8 << 20, slab_bytes=1 << 20)
    region = pb.RegisterRegion(region=1, address=MEMORY.ctypes.data, length=MEMORY.nbytes, agent=b"writer")
    opening = pb.OpenRails(rails="cma", backend="UCX", agent=b"writer")
    preface = b"".join(
        wire.encode_header(kind, 1, message.ByteSize()) + message.SerializeToString()
        for kind, message in ((Kind.OPEN_RAILS, opening), (Kind.REGISTER_REGION, region))
    )
    node = StorageNode(config)
    try:
        often = 6 * [Kind.PULL, Kind.REGISTER_REGION] + 2 * [Kind.UNREGISTER_REGION, Kind.OPEN_RAILS, Kind.TEST_RAIL]
        fuzz(str(node.start()["channel"]), node.server, seed, count, preface, often)
        assert engine.jobs, "no transfer was ever asked for"
        assert node.rails is not None
        with node.lock:
            node.state.check()
            node.rails.pulls.check()
        for job in engine.jobs:
            if not job.settled():
                job.finish(chance.choice((JobState.DONE, JobState.FAILED)), "late")
        until(lambda: node.rails is not None and node.rails.pulls.held() == (0, 0))
        sound(master, node)
    finally:
        node.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
def test_a_master(master: Master, node: StorageNode, seed: int, count: int) -> None:
    fuzz(str(master.ready()["channel"]), master.server, seed, count)
    sound(master, node)
