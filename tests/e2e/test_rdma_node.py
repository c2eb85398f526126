"""A node process with rails, over cross-memory attach, and writers that are killed and stopped under its reads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.client.checking import check_node
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, KVError
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.grants import ROW
from kvstrata.transfer.rdma.engine import JobState, Pieces, RailEngine
from kvstrata.transfer.rdma.found import cma_problem, find_rails, nixl_problem
from kvstrata.transfer.rdma.owner import open_engine
from kvstrata.transfer.rdma.pattern import mismatch, pattern
from tests.e2e.rail_writer import CMA, connect, namespace, open_rails, pull, register
from tests.e2e.real_pool import Daemon, keys, payload
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(nixl_problem() or cma_problem()), reason=nixl_problem() or cma_problem()),
    pytest.mark.timeout(180),
]

ANY = "127.0.0.1:0"
#: A port that nobody listens on: a node serves without its master.
NO_MASTER = "127.0.0.1:1"
KILLS = pytest.param(20, id="ci")
KILLS_LONG = pytest.param(200, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])


def start(base: Path) -> Daemon:
    daemon = Daemon(
        "storage", "--master", NO_MASTER, "--listen", ANY, "--http", ANY, "--data", str(base / "node"),
        "--dram", "256MiB", "--rdma", "cma", log=base / "node.log",
    )  # fmt: skip
    assert daemon.ready["rails"] == "cma"
    return daemon


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all tests of this file: each has tenants of its own, and leaves nothing behind."""
    daemon = start(tmp_path_factory.mktemp("rails"))
    yield daemon
    daemon.end()


@pytest.fixture
def engine() -> Iterator[RailEngine]:
    one = open_engine("reader", find_rails(CMA), CMA)
    yield one
    one.close()


class Nursery:
    """The parent of all writers of this file: each is forked with everything imported."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.rail_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def ask(self, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the writers' parent died: see its error above"
        return dict(json.loads(line))

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.end()


class Writer:
    """A process with an agent, and this process's connection in its session."""

    def __init__(self, nursery: Nursery, node: Daemon, what: str, count: int = 8, block_bytes: int = 256 << 10) -> None:
        session = os.urandom(16)
        self.salt = session.hex()
        self.block_bytes, self.hashes = block_bytes, keys(count, "rails")
        channel = str(node.ready["channel"])
        nursery.ask(channel=channel, session=self.salt, count=count, block_bytes=block_bytes, what=what)
        told = nursery.told()
        self.pid, self.handle = int(told["pid"]), int(told["handle"])
        self.connection = connect(channel, session)

    def signal(self, number: int) -> None:
        """Returns when it has really stopped, or ended."""
        os.kill(self.pid, number)
        wanted = {signal.SIGSTOP: "T", signal.SIGKILL: ""}.get(signal.Signals(number))
        if wanted is not None:
            until(lambda: self._state() == wanted)

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def pull(self, deadline_ms: int) -> list[int]:
        return pull(self.connection, self.handle, self.hashes, self.block_bytes, self.salt, deadline_ms)

    def stored(self) -> bool:
        """Whether any reader gets exactly what this writer has in its memory."""
        data = load(self.connection, self.handle, self.hashes, self.block_bytes, self.salt)
        return data == payload(self.hashes, "", self.block_bytes).tobytes()

    def end(self) -> None:
        if self._state():
            self.signal(signal.SIGKILL)
        self.connection.close()


@pytest.fixture
def writers(node: Daemon, nursery: Nursery) -> Iterator[Callable[..., Writer]]:
    made: list[Writer] = []

    def make(what: str, **how: int) -> Writer:
        made.append(Writer(nursery, node, what, **how))
        return made[-1]

    yield make
    for one in made:
        one.end()


def health(node: Daemon) -> dict[str, Any]:
    connection = connect(str(node.ready["channel"]), os.urandom(16))
    try:
        told = expect(pb.NodeInfoOk, connection.call(Kind.NODE_INFO, b""), Kind.NODE_INFO_OK)
    finally:
        connection.close()
    return dict(json.loads(told.json))


def sound(node: Daemon) -> None:
    """It lives, holds nothing for anybody, and its state stands its own check."""
    assert node.process.poll() is None
    until(lambda: health(node)["rails"]["unsettled"] == 0 and health(node)["reservations"] == 0)
    told = health(node)
    assert told["healthy"], told["problems"]
    assert told["leases"] == 0 and told["rails"]["in_flight"] == 0
    checked = check_node(str(node.ready["channel"]), scrub=True)
    assert checked["complete"] and not checked["state"]["problems"] and not checked["bad"], checked


def load(connection: Connection, handle: int, hashes: bytes, block_bytes: int, salt: str = "") -> bytes:
    """All of the blocks, over the channel."""
    message = pb.Acquire(ns=handle, salt=salt, hashes=hashes, mode=1, deadline_ms=5000).SerializeToString()
    answer = expect(pb.AcquireOk, connection.call(Kind.ACQUIRE, message), Kind.ACQUIRE_OK)
    assert set(answer.status) == {BlockStatus.LOADED}
    data = bytearray(len(answer.status) * block_bytes)
    connection.receive_raw([memoryview(data)])
    return bytes(data)


@pytest.mark.parametrize(("count", "block_bytes"), [(64, 2 << 20), (1000, 4096), (7, 5003)])
def test_what_a_node_reads_is_what_was_there(node: Daemon, engine: RailEngine, count: int, block_bytes: int) -> None:
    hashes = keys(count, f"exact {count}")
    memory = payload(hashes, "", block_bytes).reshape(-1)
    connection = connect(str(node.ready["channel"]), os.urandom(16))
    open_rails(connection, engine)
    register(connection, engine, memory)
    handle = namespace(connection, block_bytes)
    assert set(pull(connection, handle, hashes, block_bytes)) == {BlockStatus.STORED}
    assert load(connection, handle, hashes, block_bytes) == memory.tobytes()
    connection.call(Kind.UNREGISTER_REGION, pb.UnregisterRegion(region=1).SerializeToString())
    connection.close()
    sound(node)


def test_a_rail_is_tested_both_ways(node: Daemon, engine: RailEngine) -> None:
    """The peer reads the node's pattern, and the node the peer's; a wrong byte shows."""
    connection = connect(str(node.ready["channel"]), os.urandom(16))
    ours = open_rails(connection, engine)
    seen = np.zeros(ours.pattern_bytes, np.uint8)
    engine.register(seen.ctypes.data, seen.nbytes)
    peer = engine.add_peer(ours.agent)
    local = Pieces(np.array([seen.ctypes.data]), np.array([seen.nbytes]))
    job = engine.read(peer, local, Pieces(np.array([ours.pattern_address]), np.array([seen.nbytes])))
    assert job.wait(time.monotonic() + 20) and job.state is JobState.DONE, job.problem
    assert not mismatch(seen, ours.pattern_seed)

    theirs = pattern(99, ours.pattern_bytes).copy()
    register(connection, engine, theirs)

    def tested() -> str:
        reply = connection.call(Kind.TEST_RAIL, pb.TestRail(region=1, seed=99).SerializeToString())
        return expect(pb.TestRailOk, reply, Kind.TEST_RAIL_OK).problem

    assert tested() == ""
    theirs[12345] ^= 1
    assert "not what was sent" in tested()
    connection.close()
    sound(node)


def test_slabs_are_read_one_sidedly_with_their_generations(
    node: Daemon, engine: RailEngine, writers: Callable[..., Writer]
) -> None:
    """What a client's load does: lease, read slot and generation word out of the node's memory, compare."""
    writer = writers("wait")
    assert set(writer.pull(5000)) == {BlockStatus.STORED}
    connection = connect(str(node.ready["channel"]), os.urandom(16))
    ours = open_rails(connection, engine)
    slabs = np.frombuffer(ours.slabs, np.uint64).reshape(-1, 2)
    peer = engine.add_peer(ours.agent)
    message = pb.Acquire(ns=writer.handle, salt=writer.salt, hashes=writer.hashes, deadline_ms=5000).SerializeToString()
    leased = expect(pb.AcquireOk, connection.call(Kind.ACQUIRE, message), Kind.ACQUIRE_OK)
    rows = np.frombuffer(leased.rows, ROW)
    into = np.zeros(len(rows) * writer.block_bytes + 8 * len(rows), np.uint8)
    engine.register(into.ctypes.data, into.nbytes)
    base = slabs[rows["slab"], 0].astype(np.int64)
    data_at = base + rows["offset"].astype(np.int64)
    words_at = base + 8 * rows["slot"].astype(np.int64)
    lengths = np.array([writer.block_bytes] * len(rows) + [8] * len(rows))
    local = Pieces(into.ctypes.data + np.cumsum(lengths) - lengths, lengths)
    job = engine.read(peer, local, Pieces(np.concatenate([data_at, words_at]), lengths))
    assert job.wait(time.monotonic() + 20) and job.state is JobState.DONE, job.problem
    expected = payload(writer.hashes, "", writer.block_bytes)
    assert (into[: expected.nbytes] == expected.reshape(-1)).all()
    assert (into[expected.nbytes :].view(np.uint64) == rows["generation"]).all()
    connection.close()
    writer.end()
    sound(node)


@pytest.mark.parametrize("kills", [KILLS, KILLS_LONG])
def test_writers_killed_under_a_read(
    node: Daemon, nursery: Nursery, writers: Callable[..., Writer], seed: int, kills: int
) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        writer = writers("pull", count=32, block_bytes=1 << 20)
        seconds = float(nursery.told()["seconds"])
        time.sleep(chance.uniform(0, 2 * seconds))  # anywhere in a pull, not in step with one
        writer.end()
    pulls = health(node)["rails"]["pulls"]
    assert pulls["arrived"] >= kills and pulls["failed"] > 0, "no kill fell into a pull"
    sound(node)
    fresh = writers("wait")
    assert set(fresh.pull(5000)) == {BlockStatus.STORED}
    assert fresh.stored()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_a_writer_stopped_before_first_contact(node: Daemon, writers: Callable[..., Writer], end: int) -> None:
    """The node cannot end the transfer: slots stay taken until the writer goes on, or dies."""
    writer = writers("wait")
    writer.signal(signal.SIGSTOP)
    before = health(node)
    begun = time.monotonic()
    assert set(writer.pull(300)) == {BlockStatus.PENDING}
    assert time.monotonic() - begun < 5
    told = health(node)
    nbytes = 8 * writer.block_bytes
    assert told["rails"]["unsettled"] == 1 and told["rails"]["unsettled_bytes"] == nbytes
    assert told["dram_bytes_used"] == before["dram_bytes_used"] + nbytes
    assert told["blocks"] == before["blocks"] and told["healthy"]
    assert not check_node(str(node.ready["channel"]))["state"]["problems"]
    unregister = pb.UnregisterRegion(region=1).SerializeToString()
    with pytest.raises(Busy, match="not settled"):
        writer.connection.call(Kind.UNREGISTER_REGION, unregister)
    other = writers("wait")
    assert set(other.pull(5000)) == {BlockStatus.STORED}, "others go on"
    writer.signal(end)
    until(lambda: health(node)["rails"]["unsettled"] == 0)
    assert health(node)["dram_bytes_used"] == before["dram_bytes_used"] + nbytes, "the other's blocks"
    if end == signal.SIGCONT:
        writer.connection.call(Kind.UNREGISTER_REGION, unregister)
    assert other.stored()
    sound(node)


def test_a_stopped_writers_session_ends_and_its_transfer_does_not(node: Daemon, writers: Callable[..., Writer]) -> None:
    """Its death ends both; the slots were taken until then."""
    before = health(node)
    writer = writers("wait")
    writer.signal(signal.SIGSTOP)
    assert set(writer.pull(100)) == {BlockStatus.PENDING}
    writer.connection.close()
    assert health(node)["rails"]["unsettled"] == 1
    writer.signal(signal.SIGKILL)
    sound(node)
    assert health(node)["dram_bytes_used"] == before["dram_bytes_used"]


def test_a_node_ends_though_a_transfer_does_not(tmp_path: Path, nursery: Nursery) -> None:
    node = start(tmp_path)
    writer = Writer(nursery, node, "wait")
    try:
        writer.signal(signal.SIGSTOP)
        assert set(writer.pull(100)) == {BlockStatus.PENDING}
        node.signal(signal.SIGTERM)
        assert node.process.wait(30) == 0
    finally:
        writer.end()
        node.end()


def test_garbage_for_an_agent_costs_nothing(node: Daemon, engine: RailEngine) -> None:
    connection = connect(str(node.ready["channel"]), os.urandom(16))
    whole = engine.connection()
    for agent in (b"", b"\0" * 64, os.urandom(4096), whole[: len(whole) // 2], whole[1:]):
        message = pb.OpenRails(rails="cma", backend="UCX", agent=agent).SerializeToString()
        with pytest.raises(KVError):
            connection.call(Kind.OPEN_RAILS, message)
        assert connection.call(Kind.PING, b"").kind == Kind.PONG
    connection.close()
    sound(node)
