"""Rails of a node as its clients see them: opened, tested, registered for, pulled over; over a fake agent."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, ConfigError, InvalidArgument, Refused, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage import node as node_module
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.serving import process_memory, rails, regions
from kvstrata.storage.serving.rail_opening import open_rails
from kvstrata.storage.serving.rail_region import RailRegion
from kvstrata.storage.serving.rails import NodeRails
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.pattern import mismatch, pattern
from kvstrata.transfer.rdma.rails import RailMode, RailOptions, Rails
from tests.waiting import until

from .conftest import SLAB_BYTES, Node, keys, payload
from .fake_engine import CMA, FakeEngine, FakeJob, failing, posted, waiting
from .railed_node import BLOCK_BYTES, Writer, railed

STORED, PRESENT, RESERVED = int(BlockStatus.STORED), int(BlockStatus.ALREADY_PRESENT), int(BlockStatus.RESERVED)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def node(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageNode]:
    one = railed(tmp_path, engine, monkeypatch)
    yield one
    with one.lock:
        one.state.check()
        assert one.rails is not None
        one.rails.pulls.check()
    assert one.server.counts["handler_errors"] == 0
    for job in engine.jobs:
        if not job.settled():
            job.finish(JobState.FAILED, "the test is over")
    one.stop()


@pytest.fixture
def writer(node: StorageNode) -> Iterator[Writer]:
    one = Writer(node).ready()
    yield one
    one.close()


def expected(numbers: range) -> list[bytes]:
    return [payload(keys([number]), 0, BLOCK_BYTES) for number in numbers]


def quiet(node: StorageNode) -> bool:
    """Nothing is leased, reserved or in use but what can be read."""
    with node.lock:
        node.state.check()
        return not (len(node.state.reservations) or len(node.state.leases) or node.state.sessions)


# ---------------------------------------------------------------- opening


def test_a_node_says_what_rails_it_has_and_where_its_memory_lies(node: StorageNode, engine: FakeEngine) -> None:
    writer = Writer(node)
    assert writer.connection.hello.rails == "cma"
    answer = writer.open()
    slabs = np.frombuffer(answer.slabs, np.uint64).reshape(-1, 2).tolist()
    assert slabs == [[slab.address, slab.nbytes] for slab in node.arena.slabs]
    assert answer.agent == b"node" and engine.peers == {"writer"} and engine.stirred == 1
    known = [(each.address, each.nbytes) for each in engine.registered]
    assert known[:-1] == [tuple(slab) for slab in slabs]
    assert known[-1][0] == answer.pattern_address
    seen = ctypes.string_at(answer.pattern_address, answer.pattern_bytes)
    assert not mismatch(np.frombuffer(seen, np.uint8), answer.pattern_seed)
    writer.close()
    until(lambda: not engine.peers)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        ({"rails": "rdma"}, "the node's rails are cma by UCX, the peer's rdma by UCX"),
        ({"rails": ""}, "the peer's none"),
        ({"backend": "LIBFABRIC"}, "by LIBFABRIC"),
        ({"agent": b""}, "describe no agent"),
        ({"agent": b"x" * ((1 << 20) + 1)}, "describe no agent"),
        ({"agent": b"\xff garbage"}, "no agent's metadata"),
        ({"agent": b"node"}, "the node's own"),
    ],
)
def test_ends_with_nothing_in_common_are_refused(node: StorageNode, ask: dict[str, object], reason: str) -> None:
    writer = Writer(node)
    with pytest.raises(InvalidArgument, match=reason):
        writer.open(**ask)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="open rails before"):
        writer.register()
    writer.close()


def test_within_one_host_the_peer_must_be_on_it_and_readable(
    node: StorageNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(node)
    monkeypatch.setattr(rails, "boot_id", lambda: "another host")
    with pytest.raises(InvalidArgument, match="on another"):
        writer.open()
    monkeypatch.undo()
    monkeypatch.setattr(process_memory, "permitted", lambda pid: False)
    with pytest.raises(InvalidArgument, match="ptrace_scope"):
        writer.open()
    writer.close()


def test_permission_to_read_a_process_is_the_kernels_word() -> None:
    assert process_memory.permitted(os.getpid())
    assert not process_memory.permitted(0) and not process_memory.permitted(1 << 30)


def test_an_agent_belongs_to_one_session(node: StorageNode, engine: FakeEngine, writer: Writer) -> None:
    other = Writer(node, "other")
    with pytest.raises(InvalidArgument, match="another session"):
        other.open(agent=b"writer")
    assert "writer" in engine.peers, "the refusal takes nothing from its owner"
    other.open()
    with pytest.raises(InvalidArgument, match="another session"):
        other.register(agent=b"writer")
    with pytest.raises(InvalidArgument, match="the session's agent is 'other'"):
        other.register(agent=b"third")
    assert engine.peers == {"writer", "other"}
    other.close()


def test_opened_again_the_earlier_agent_and_its_regions_are_forgotten(
    node: StorageNode, engine: FakeEngine, writer: Writer
) -> None:
    writer.open(agent=b"second")
    assert engine.peers == {"second"}
    with pytest.raises(InvalidArgument, match="region 1 is not registered"):
        writer.pull(range(2))
    writer.agent = b"second"
    writer.register()
    assert list(writer.pull(range(2), hash_here=True).status) == [STORED] * 2


def test_opened_again_a_region_in_flight_is_still_waited_for(
    node: StorageNode, engine: FakeEngine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SETTLE_S", 0.02)
    engine.behave = posted
    assert list(writer.pull(range(2), deadline_ms=1).status) == [BlockStatus.PENDING] * 2
    writer.open(agent=b"second")
    with pytest.raises(Busy, match="have not settled"):
        writer.unregister()
    writer.agent = b"second"
    with pytest.raises(Busy, match="have not settled"):
        writer.register()
    engine.jobs[-1].finish()
    writer.unregister()
    assert writer.register() == "rdma"


def test_a_node_without_rails_says_so(running: StorageNode) -> None:
    writer = Writer(running)
    assert writer.connection.hello.rails == ""
    for kind, message in ((Kind.OPEN_RAILS, pb.OpenRails(rails="cma")), (Kind.TEST_RAIL, pb.TestRail(region=1))):
        with pytest.raises(Refused, match="no rails"):
            writer.connection.call(kind, message.SerializeToString())
    with pytest.raises(Refused, match="no rails"):
        writer.register()
    health = running.report.health()["rails"]
    assert health["kind"] == "" and health["problem"]
    assert running.report.health()["healthy"], "none were asked for"
    writer.close()


# ---------------------------------------------------------------- the test of a rail


def test_a_rail_is_tested_by_what_it_brings(engine: FakeEngine, writer: Writer) -> None:
    right = pattern(7, rails.PATTERN_BYTES)
    assert writer.register(2, right) == "rdma"
    for _ in range(rails.TESTS_MAX * 3):
        assert writer.test(2, 7) == ""
    assert "bytes are not what was sent" in writer.test(2, 8)
    right[100] ^= 1
    assert writer.test(2, 7).startswith("1 of ")
    engine.behave = failing
    assert writer.test(2, 7) == "the peer is gone"


def test_a_test_has_a_bound_and_keeps_its_memory_until_it_settles(
    engine: FakeEngine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rails, "TEST_S", 0.01)
    right = pattern(7, rails.PATTERN_BYTES)
    writer.register(2, right)
    engine.behave = waiting
    assert "given up" in writer.test(2, 7) or "not begun" in writer.test(2, 7)
    engine.behave = posted
    late = []
    for _ in range(rails.TESTS_MAX):
        assert "nothing arrived" in writer.test(2, 7)
        late.append(engine.jobs[-1])
    assert len({int(job.local.address[0]) for job in late}) == rails.TESTS_MAX, "each has memory of its own"
    with pytest.raises(Busy, match="have not settled"):
        writer.test(2, 7)
    late[0].finish()
    engine.behave = FakeJob.finish
    assert writer.test(2, 7) == ""


def test_only_a_region_on_rails_that_is_large_enough_is_tested(node: StorageNode, writer: Writer) -> None:
    writer.register(2, np.zeros(rails.PATTERN_BYTES - 1, np.uint8))
    with pytest.raises(InvalidArgument, match="the test reads"):
        writer.test(2, 7)
    with pytest.raises(InvalidArgument, match="not registered"):
        writer.test(3, 7)


# ---------------------------------------------------------------- pulls


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("way", ["hashed by the writer", "hashed before", "hashed here"])
def test_blocks_arrive_as_they_were(node: StorageNode, writer: Writer, pieces: int, way: str) -> None:
    before, here = way == "hashed before", way == "hashed here"
    answer = writer.pull(range(9), pieces=pieces, checksums=before, hash_here=here)
    if way == "hashed by the writer":
        assert list(answer.status) == [RESERVED] * 9 and writer.read(range(9)) == [None] * 9
        assert writer.commit(answer.reservation, range(9)) == [STORED] * 9
    else:
        assert list(answer.status) == [STORED] * 9 and not answer.reservation
    assert writer.read(range(9)) == expected(range(9))
    with node.lock:
        sums = [block.checksum for block in node.state.inventory.blocks()]
    assert sorted(sums) == sorted(writer.digests(range(9)))
    again = writer.pull(range(11), pieces=pieces, checksums=before, hash_here=here)
    assert list(again.status)[:9] == [PRESENT] * 9
    until(lambda: quiet(node) or way == "hashed by the writer")


def test_what_the_node_has_hashed_is_visible_when_its_writer_has_heard_of_it(node: StorageNode, writer: Writer) -> None:
    """A writer that gave up meanwhile has reused its memory, and commits nothing."""
    answer = writer.pull(range(2), hash_here=True, commit=False)
    assert list(answer.status) == [RESERVED] * 2
    assert writer.read(range(2)) == [None] * 2
    assert list(writer.committed(answer).status) == [STORED] * 2
    assert writer.read(range(2)) == expected(range(2))


def test_checksums_are_the_writers_or_the_nodes_not_both(node: StorageNode, writer: Writer) -> None:
    with pytest.raises(InvalidArgument, match="checksums for 2 blocks"):
        writer.pull(range(2), checksums=True, hash_here=True)
    assert list(writer.pull(range(2), checksums=True, wrong=True).status) == [BlockStatus.CORRUPT] * 2
    assert writer.read(range(2)) == [None] * 2
    until(lambda: quiet(node))


def test_a_rail_that_fails_stores_nothing_and_costs_no_connection(
    node: StorageNode, engine: FakeEngine, writer: Writer
) -> None:
    engine.behave = failing
    with pytest.raises(Unavailable, match="the rail failed: the peer is gone"):
        writer.pull(range(4), hash_here=True)
    assert quiet(node) and node.arena.bytes_used == 0
    assert writer.connection.call(Kind.PING, b"").kind == Kind.PONG
    engine.behave = waiting
    assert list(writer.pull(range(4), deadline_ms=1, hash_here=True).status) == [BlockStatus.LATE] * 4
    engine.behave = FakeJob.finish
    assert list(writer.pull(range(4), hash_here=True).status) == [STORED] * 4


def test_what_does_not_settle_is_pending_never_stored_and_its_slots_come_back(
    node: StorageNode, engine: FakeEngine, writer: Writer
) -> None:
    engine.behave = posted
    assert list(writer.pull(range(4), deadline_ms=50, hash_here=True).status) == [BlockStatus.PENDING] * 4
    assert not node.state.counts.reservations_expired, "the wait is over at the writer's deadline, before it expires"
    health = node.report.health()
    assert health["rails"]["unsettled"] == 1 and health["rails"]["unsettled_bytes"] == 4 * BLOCK_BYTES
    assert health["healthy"] and health["reservations"] == 1
    with pytest.raises(Busy, match="earlier transfer from this writer"):
        writer.pull(range(8, 10))
    other = Writer(node, "other").ready()
    engine.behave = FakeJob.finish
    assert list(other.pull(range(4), hash_here=True).status) == [STORED] * 4, "their keys are free"
    writer.memory[:] = 0xEE
    engine.jobs[0].finish()
    until(lambda: node.report.health()["rails"]["unsettled"] == 0)
    assert other.read(range(4)) == expected(range(4))
    until(lambda: quiet(node))
    assert node.arena.bytes_used == 4 * BLOCK_BYTES
    assert list(writer.pull(range(8, 10), checksums=True).status) == [STORED] * 2
    other.close()


def test_a_pull_in_ranges(node: StorageNode, engine: FakeEngine, writer: Writer) -> None:
    numbers, half = range(4), BLOCK_BYTES // 2
    first = writer.pull_range(numbers, 0, half)
    assert list(first.status) == [RESERVED] * 4 and first.reservation
    with pytest.raises(InvalidArgument, match="not written whole"):
        writer.commit(first.reservation, numbers)
    with pytest.raises(InvalidArgument, match="in order"):
        writer.pull_range(numbers, 0, half, first.reservation)
    again = writer.pull_range(numbers, half, BLOCK_BYTES - half, first.reservation)
    assert again.reservation == first.reservation and list(again.status) == [RESERVED] * 4
    assert writer.commit(first.reservation, numbers) == [STORED] * 4
    assert node.rails is not None and node.rails.pulls.counts["bytes"] == 4 * BLOCK_BYTES
    assert writer.read(numbers) == [payload(keys([number]), 0, BLOCK_BYTES) for number in numbers]
    assert writer.pull_range(numbers, half, 1, 99).reservation == 0, "it has ended"


def test_a_range_that_does_not_arrive_ends_the_reservation(
    node: StorageNode, engine: FakeEngine, writer: Writer
) -> None:
    first = writer.pull_range(range(4), 0, 64)
    engine.behave = failing
    with pytest.raises(Unavailable, match="the rail failed"):
        writer.pull_range(range(4), 64, BLOCK_BYTES - 64, first.reservation)
    assert len(node.state.reservations) == 0
    assert writer.pull_range(range(4), 64, BLOCK_BYTES - 64, first.reservation).reservation == 0


def test_a_late_pull_outlives_its_session(node: StorageNode, engine: FakeEngine, writer: Writer) -> None:
    engine.behave = posted
    writer.pull(range(4), deadline_ms=1)
    writer.close()
    until(lambda: not engine.peers)
    assert node.arena.bytes_used == 4 * BLOCK_BYTES and node.state.sessions == 0
    engine.jobs[0].finish(JobState.FAILED, "its process died")
    until(lambda: node.arena.bytes_used == 0)


def test_a_pull_ends_with_its_session(node: StorageNode, engine: FakeEngine, writer: Writer) -> None:
    """Its thread does not wait a minute for a writer that is gone."""
    engine.behave = posted
    caller = threading.Thread(target=lambda: _quietly(writer), daemon=True)
    caller.start()
    until(lambda: len(engine.jobs) == 1)
    session = next(iter(node.server.sessions.values()))
    with node.lock:
        node.state.session_ended(session.key, time.monotonic())
    caller.join(5)
    assert not caller.is_alive()
    assert node.rails is not None and node.rails.pulls.held() == (1, 4 * BLOCK_BYTES)


def _quietly(writer: Writer) -> None:
    writer.pull(range(4), deadline_ms=50_000)


def test_memory_is_not_unregistered_under_a_read(
    node: StorageNode, engine: FakeEngine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SETTLE_S", 0.02)
    engine.behave = posted
    writer.pull(range(4), deadline_ms=1)
    with pytest.raises(Busy, match="1 transfers from region 1 have not settled"):
        writer.unregister()
    engine.jobs[0].finish()
    until(lambda: node.rails is not None and node.rails.pulls.held()[0] == 0)
    with pytest.raises(InvalidArgument, match="not registered"):
        writer.pull(range(4))  # none begins once its owner wants it back
    writer.unregister()
    writer.unregister()
    writer.register()
    engine.behave = FakeJob.finish
    assert list(writer.pull(range(4), hash_here=True).status) == [STORED] * 4


def test_unregistering_waits_for_what_is_about_to_settle(engine: FakeEngine, writer: Writer) -> None:
    engine.behave = posted
    writer.pull(range(4), deadline_ms=1)
    timer = threading.Timer(0.05, engine.jobs[0].finish)
    timer.start()
    writer.unregister()
    timer.join()
    assert engine.jobs[0].settled()


def test_the_same_memory_registered_again_is_left_as_it_is(
    node: StorageNode, engine: FakeEngine, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "SETTLE_S", 0.02)
    engine.behave = posted
    writer.pull(range(4), deadline_ms=1)
    assert writer.register() == "rdma"
    with pytest.raises(Busy, match="have not settled"):
        writer.register(memory=writer.memory[BLOCK_BYTES:])
    with pytest.raises(Busy, match="1 transfers from region 1 have not settled"):
        writer.unregister()
    engine.jobs[0].finish()
    writer.unregister()


@pytest.mark.parametrize("call", ["keep", "unregister"])
def test_a_region_that_came_meanwhile_is_settled_too(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    book, session, jobs = regions.RegionBook(), b"s" * 16, list[FakeJob]()

    def start(local: Pieces, remote: Pieces) -> FakeJob:
        jobs.append(FakeJob("writer", local, remote))
        return jobs[-1]

    def region(address: int) -> RailRegion:
        return RailRegion(start, address, 4096)

    book.keep(session, 1, region(4096))
    monkeypatch.setattr(regions, "SETTLE_S", 0.02)
    settle, other, turns = book._settle, region(8192), list[int]()

    def meanwhile(session: bytes, number: int, within_s: float) -> regions.ClientRegion | None:
        found = settle(session, number, within_s)
        turns.append(1)
        if len(turns) == 1:
            monkeypatch.setattr(book, "_settle", settle)
            book.keep(session, 1, other)
            other.read(*(np.array([value], np.int64) for value in (4096, 0, 16)))
        return found

    monkeypatch.setattr(book, "_settle", meanwhile)
    with pytest.raises(Busy, match="1 transfers from region 1 have not settled"):
        book.keep(session, 1, region(12288)) if call == "keep" else book.unregister(session, 1, 0.02)
    assert len(other.flights) == 1 and len(book) == 1
    jobs[0].finish(JobState.FAILED, "the test is over")
    book.unregister(session, 1)
    assert len(book) == 0


def test_device_memory_is_read_as_such_and_over_rails_only(node: StorageNode, engine: FakeEngine) -> None:
    writer = Writer(node)
    writer.open()
    assert writer.register(device="cuda:1") == "rdma"
    assert list(writer.pull(range(2), hash_here=True).status) == [STORED] * 2
    assert engine.jobs[-1].remote.memory.spelled() == "cuda:1" and engine.jobs[-1].local.memory.on_host
    with pytest.raises(InvalidArgument, match="over rails only"):
        writer.register(2, agent=b"", device="cuda:1")
    for wrong in ("cuda", "tpu:0", "cuda:-1"):
        with pytest.raises(InvalidArgument, match="unknown"):
            writer.register(2, device=wrong)
    writer.close()


def test_a_session_with_rails_that_leases_is_about_to_read(engine: FakeEngine, writer: Writer) -> None:
    writer.pull(range(2), hash_here=True)
    before = engine.stirred
    for mode, stirs in ((1, 0), (0, 1), (2, 0)):
        message = pb.Acquire(ns=writer.handle, hashes=keys(range(2)), mode=mode, deadline_ms=100)
        writer.connection.call(Kind.ACQUIRE, message.SerializeToString())
        if mode == 1:
            writer.connection.receive_raw([memoryview(bytearray(2 * BLOCK_BYTES))])
        assert engine.stirred - before == stirs
        before = engine.stirred


# ---------------------------------------------------------------- start, end, and what is told


def test_an_agent_that_is_not_well_shows_in_health_and_metrics(
    node: StorageNode, engine: FakeEngine, writer: Writer
) -> None:
    writer.pull(range(3), hash_here=True)
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert 'kvstrata_node_rail_pulls_total{outcome="arrived"} 1.0' in text
    assert f"kvstrata_node_rail_pulled_bytes_total {3.0 * BLOCK_BYTES}" in text
    assert "kvstrata_node_rail_peers 1.0" in text and "kvstrata_node_rail_unsettled 0.0" in text
    engine.wrong = "rails: no turn for 9.0 s"
    health = json.loads(json.dumps(node.report.health()))
    assert not health["healthy"] and health["problems"] == ["rails: no turn for 9.0 s"]
    assert health["rails"]["problem"] and health["rails"]["peers"] == 1


def test_memory_that_may_still_be_written_to_is_not_given_back(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(node_module, "_KEPT", kept)
    node = railed(tmp_path, engine, monkeypatch)
    writer = Writer(node).ready()
    engine.behave = posted
    writer.pull(range(4), deadline_ms=1)
    writer.close()
    node.stop()
    assert engine.closed and len(kept) == 1
    engine.jobs[0].finish()  # it lands in memory that is still there
    assert bytes(node.arena.slabs[0].view[:1]) is not None
    node.arena.close()


def test_memory_is_given_back_after_the_agent_is_closed(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = railed(tmp_path, engine, monkeypatch)
    order: list[str] = []
    close = node.arena.close
    monkeypatch.setattr(node.arena, "close", lambda: (order.append(f"closed {engine.closed}"), close()))
    node.stop()
    assert order == ["closed True"]


def opening(node: Node, options: RailOptions, found: Rails, engine: FakeEngine) -> tuple[NodeRails | None, str]:
    return open_rails(
        "n", options, node.state, threading.Lock(), find=lambda _: found, opener=lambda name, rails, options: engine
    )


def test_without_rails_a_node_says_why_once(node_state: Node, engine: FakeEngine) -> None:
    opened, why = opening(node_state, RailOptions(), Rails("", problem="no RDMA device"), engine)
    assert opened is None and why == "no RDMA device"


@pytest.mark.parametrize("mode", [RailMode.AUTO, RailMode.CMA, RailMode.ON])
def test_memory_that_cannot_be_registered(node_state: Node, engine: FakeEngine, mode: RailMode) -> None:
    engine.memory_limit = SLAB_BYTES
    if mode is RailMode.AUTO:
        opened, why = opening(node_state, RailOptions(mode), CMA, engine)
        assert opened is None and "memlock" in why
    else:
        with pytest.raises(ConfigError, match=f"--rdma {mode.value}: memlock is too low"):
            opening(node_state, RailOptions(mode), CMA, engine)
    assert engine.closed


@pytest.fixture
def node_state() -> Iterator[Node]:
    one = Node()
    yield one
    one.arena.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (RailOptions(backend="TCP"), "UCX or LIBFABRIC"),
        (RailOptions(RailMode.OFF, devices=("mlx5_0",)), "leave out --rdma-devices"),
        (RailOptions(RailMode.CMA, devices=("mlx5_0",)), "leave out --rdma-devices"),
        (RailOptions(RailMode.ON, devices=("mlx5_0", "")), "empty name"),
        (RailOptions(RailMode.CMA, "LIBFABRIC"), "needs --rdma-backend UCX"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: RailOptions, reason: str) -> None:
    config = StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path, 8 << 20, rails=options)
    with pytest.raises(ConfigError, match=reason):
        config.validated()
