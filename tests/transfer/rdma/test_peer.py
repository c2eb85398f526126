"""A client's peer over rails, when all is well and when something is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvstrata.proto.wire import Kind
from kvstrata.transfer.base import Push
from kvstrata.transfer.frames import Silent
from kvstrata.transfer.rdma import opening, session
from kvstrata.transfer.rdma import peer as peer_module
from kvstrata.transfer.rdma.engine import JobState
from kvstrata.transfer.rdma.peer import RdmaPeer
from kvstrata.transfer.rdma.rails import Rails
from kvstrata.transfer.rdma.session import RailState
from tests.storage.fake_engine import FakeJob, failing, posted, waiting
from tests.storage.railed_node import BLOCK_BYTES, NAMESPACE
from tests.transfer.rdma.peer_world import COUNT, HASHES, S, World, asked, corrupting, push, up
from tests.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.end()


# ---------------------------------------------------------------------------- the good case


def test_blocks_go_over_rails_both_ways(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    into = np.zeros_like(world.data)
    fetched = peer.fetch(asked(world.rows(into)))
    assert fetched.status.tolist() == [S.LOADED] * COUNT
    assert (into == world.data).all()
    assert fetched.bytes_moved == COUNT * BLOCK_BYTES
    assert peer.transport == "rdma"
    assert world.ours.jobs and len(world.theirs.jobs) == 2, "the node has read the pattern and the blocks"
    assert peer.rail_health() == {
        "state": "up", "kind": "cma", "self_test": "passed", "problem": "", "opened": 1, "unsettled": 0,
        "regions_leaving": 0,
    }  # fmt: skip
    peer.upkeep()
    until(lambda: not len(world.node.state.leases))


def test_until_rails_are_up_bytes_go_over_tcp(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = session.open_rails
    monkeypatch.setattr(session, "open_rails", lambda link, own: (gate.wait(10), real(link, own))[1])
    peer = world.connect(only=False)
    world.stored(peer)
    into = np.zeros_like(world.data)
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT
    assert (into == world.data).all()
    assert peer.transport == "tcp" and not world.ours.jobs
    gate.set()
    until(lambda: up(peer))
    into[:] = 0
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT
    assert (into == world.data).all()
    assert peer.transport == "rdma" and len(world.ours.jobs) == 3, "the pattern, the blocks, their words"


def test_a_node_without_rails_is_reached_over_tcp(world: World) -> None:
    world.found = Rails("rdma")
    peer = world.connect(only=False)
    world.stored(peer)
    until(lambda: peer.rails.state is RailState.DOWN)
    assert "the node has cma rails, this client rdma" in str(peer.rail_health()["problem"])
    assert peer.fetch(asked(world.rows(np.zeros_like(world.data)))).status.tolist() == [S.LOADED] * COUNT


def test_what_may_only_go_over_rails_is_lost_without_them(world: World) -> None:
    world.found = Rails("", problem="there is no RDMA device: plug one in")
    peer = world.connect()
    rows = world.rows(world.data)
    assert push(peer, rows) == [S.NODE_LOST] * COUNT
    assert peer.fetch(asked(rows)).status.tolist() == [S.NODE_LOST] * COUNT
    assert "no rails" in str(peer.rail_health()["problem"]) or "none" in str(peer.rail_health()["problem"])
    assert "plug one in" in str(world.transports[0].rail_health()["problem"])


# ---------------------------------------------------------------------------- the self-test


@pytest.mark.parametrize("end", ["theirs", "ours"])
def test_rails_that_corrupt_are_never_used(world: World, end: str) -> None:
    (world.theirs if end == "theirs" else world.ours).behave = corrupting
    peer = world.connect(only=False)
    world.stored(peer)
    until(lambda: peer.rails.state is RailState.DOWN)
    assert "self-test" in str(peer.rail_health()["self_test"])
    into = np.zeros_like(world.data)
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT
    assert (into == world.data).all()
    assert peer.transport == "tcp"
    assert not world.ours.peers, "its agent is forgotten"


def test_rails_that_do_not_answer_their_test_are_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_S", 0.3)
    world.ours.behave = posted
    peer = world.connect()
    assert push(peer, world.rows(world.data)) == [S.NODE_LOST] * COUNT
    assert "nothing arrived" in str(peer.rail_health()["self_test"])
    assert world.transports[0].rail_health()["scratch_bytes_in_use"], "it may still be written to"
    for job in world.ours.jobs:
        job.finish()
    assert not world.transports[0].rail_health()["scratch_bytes_in_use"]


# ---------------------------------------------------------------------------- what goes wrong


def test_a_read_that_does_not_settle_is_pending_and_keeps_its_lease(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    world.ours.behave = posted
    into = np.zeros_like(world.data)
    rows = world.rows(into)
    fetched = peer.fetch(asked(rows, 0.3))
    assert fetched.status.tolist() == [S.PENDING] * COUNT
    (landing,) = fetched.pending
    assert not landing.settled() and not landing.wait(time.monotonic() + 0.01)
    assert peer.rail_health()["unsettled"] == 1
    assert not up(peer), "these rails are not trusted with another block"
    peer.upkeep()
    assert len(world.node.state.leases) == 1, "its slots are kept for it"
    job = world.ours.jobs[-1]
    assert job.state is JobState.POSTED
    job.finish()
    assert landing.settled()
    assert peer.rail_health()["unsettled"] == 0
    world.ours.behave = FakeJob.finish
    until(lambda: (peer.upkeep(), up(peer))[1])
    until(lambda: (peer.upkeep(), not len(world.node.state.leases))[1])
    assert peer.fetch(asked(rows)).status.tolist() == [S.LOADED] * COUNT


def test_a_mistake_in_who_hears_of_ranges_hides_no_read_that_is_under_way(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    jobs: list[FakeJob] = []

    def first_only(job: FakeJob) -> None:
        jobs.append(job)
        (FakeJob.finish if len(jobs) == 1 else posted)(job)

    def listen(part: int, mask: object) -> None:
        raise ZeroDivisionError("a mistake")

    world.ours.behave = first_only
    into = np.zeros_like(world.data)
    request = replace(asked(world.rows(into), 0.5), parts=(BLOCK_BYTES // 2, BLOCK_BYTES), landed=listen)
    fetched = peer.fetch(request)
    assert fetched.status.tolist() == [S.PENDING] * COUNT
    assert not any(one.settled() for one in fetched.pending)
    jobs[1].finish()
    assert all(one.settled() for one in fetched.pending)


def test_a_read_that_was_never_posted_is_late_and_leaves_nothing(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    world.ours.behave = waiting
    fetched = peer.fetch(asked(world.rows(np.zeros_like(world.data)), 0.2))
    assert fetched.status.tolist() == [S.LATE] * COUNT
    assert fetched.pending == ()
    assert up(peer)


def test_a_silent_node_is_given_up_long_before_the_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = world.connect()
    world.stored(peer)
    stuck = threading.Event()
    world.ours.behave = posted
    monkeypatch.setattr(peer.link.channel, "call", silent(peer, stuck))
    started = time.monotonic()
    fetched = peer.fetch(asked(world.rows(np.zeros_like(world.data)), 30.0))
    assert time.monotonic() - started < 15
    assert stuck.is_set()
    assert fetched.status.tolist() == [S.PENDING] * COUNT
    assert len(fetched.pending) == 1
    world.ours.jobs[-1].finish()


def silent(peer: RdmaPeer, stuck: threading.Event) -> Callable[..., object]:
    """A channel whose node stands still from the first ping on."""
    real = peer.link.channel.call

    def call(kind: int, message: bytes, deadline: float, **more: object) -> object:
        if kind == Kind.PING:
            stuck.set()
            peer.link.channel.failed("silent")
            raise Silent("silent for 220 ms")
        return real(kind, message, deadline, **more)  # type: ignore[arg-type]

    return call


@pytest.mark.parametrize("only", [False, True])
def test_rails_that_fail_are_closed_and_the_bytes_go_another_way(world: World, only: bool) -> None:
    peer = world.connect(only=only)
    world.stored(peer)
    until(lambda: up(peer))
    world.ours.behave = failing
    into = np.zeros_like(world.data)
    fetched = peer.fetch(asked(world.rows(into)))
    if only:
        assert fetched.status.tolist() == [S.NODE_LOST] * COUNT
    else:
        assert fetched.status.tolist() == [S.LOADED] * COUNT
        assert (into == world.data).all()
    assert fetched.pending == ()
    assert not up(peer)
    assert "the peer is gone" in str(peer.rail_health()["problem"])
    world.ours.behave = FakeJob.finish
    until(lambda: (peer.upkeep(), up(peer))[1])
    assert peer.rail_health()["opened"] == 2
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT


def test_bytes_of_a_lease_that_has_ended_are_not_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(peer_module.Granted):
        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)  # type: ignore[arg-type]
            self.expires = time.monotonic() - 0.001

    peer = world.connect()
    world.stored(peer)
    monkeypatch.setattr(peer_module, "Granted", Short)
    fetched = peer.fetch(asked(world.rows(np.zeros_like(world.data))))
    assert fetched.status.tolist() == [S.LEASE_LOST] * COUNT
    assert fetched.pending == ()
    assert up(peer)


def test_a_slot_that_was_given_to_another_meanwhile_is_not_believed(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    slabs = world.node.state.arena.slabs

    def reused(job: FakeJob) -> None:
        job.finish()
        slab = next(s for s in slabs if s.blocks)
        slab.generations[sorted(slab.blocks)[3]] += 1

    world.ours.behave = reused
    status = peer.fetch(asked(world.rows(np.zeros_like(world.data)))).status.tolist()
    assert sorted(status) == [S.LOADED] * (COUNT - 1) + [S.LEASE_LOST]


def test_bytes_that_changed_on_the_way_are_found_by_their_checksum(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    world.ours.behave = corrupting
    status = peer.fetch(asked(world.rows(np.zeros_like(world.data)))).status.tolist()
    assert status == [S.CORRUPT] + [S.LOADED] * (COUNT - 1)


def test_a_store_that_the_nodes_agent_could_not_read_goes_another_way(world: World) -> None:
    peer = world.connect(only=False)
    rows = world.rows(world.data)
    assert peer.rails.ready() is None
    until(lambda: up(peer))
    world.theirs.behave = failing
    assert push(peer, rows) == [S.STORED] * COUNT
    assert not up(peer)
    assert peer.transport == "tcp"


def test_a_store_by_ranges_of_which_a_later_one_fails_goes_another_way_whole(world: World) -> None:
    peer = world.connect(only=False)
    rows = world.rows(world.data)
    assert peer.rails.ready() is None
    until(lambda: up(peer))

    def written(part: int, deadline: float) -> bool:
        if part:
            world.theirs.behave = failing
        return True

    ranges = (BLOCK_BYTES // 2, BLOCK_BYTES)
    store = Push(NAMESPACE, "", HASHES, rows, time.monotonic() + 5.0, parts=ranges, written=written)
    assert peer.push(store).status.tolist() == [S.STORED] * COUNT
    assert peer.transport == "tcp"
    into = np.zeros_like(world.data)
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT
    assert (into == world.data).all() and len(world.node.state.reservations) == 0


def test_a_broken_link_makes_the_node_forget_and_both_begin_anew(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    peer.link.channel.failed("a cable was pulled")
    until(lambda: (peer.upkeep(), up(peer))[1])
    assert peer.rail_health()["opened"] == 2
    into = np.zeros_like(world.data)
    assert peer.fetch(asked(world.rows(into))).status.tolist() == [S.LOADED] * COUNT
    assert push(peer, world.rows(world.data)) == [S.ALREADY_PRESENT] * COUNT
    assert (into == world.data).all()


def test_memory_that_cannot_be_registered_goes_another_way(world: World) -> None:
    peer = world.connect(only=False)
    assert peer.rails.ready() is None
    until(lambda: up(peer))
    world.ours.memory_limit = 0
    rows = world.rows(world.data)
    assert push(peer, rows) == [S.STORED] * COUNT
    assert peer.fetch(asked(rows)).status.tolist() == [S.LOADED] * COUNT
    assert up(peer), "other memory can still go over them"
    assert world.transports[0].rail_health()["not_registered"] == ["memlock is too low: raise it"]
