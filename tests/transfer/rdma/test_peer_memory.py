"""Memory that a client's rails name: in ranges, in any layout, and for as long as something uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstrata.transfer.base import Mask, Push
from tests.storage.fake_engine import FakeJob, posted
from tests.storage.railed_node import BLOCK_BYTES, NAMESPACE
from tests.transfer.rdma.peer_world import COUNT, HASHES, S, World, asked, push
from tests.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.end()


# ---------------------------------------------------------------------------- ranges


def test_ranges_are_told_in_order_as_they_land(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    into = np.zeros_like(world.data)
    parts = (1000, 1001, 3000, BLOCK_BYTES)
    told: list[int] = []

    def landed(index: int, loaded: Mask) -> None:
        end = parts[index]
        assert loaded.all()
        assert (into.reshape(COUNT, -1)[:, :end] == world.data.reshape(COUNT, -1)[:, :end]).all()
        told.append(index)

    fetched = peer.fetch(replace(asked(world.rows(into)), parts=parts, landed=landed))
    assert fetched.status.tolist() == [S.LOADED] * COUNT
    assert told == [0, 1, 2, 3]
    assert (into == world.data).all()


def test_what_lands_after_its_slot_was_reused_is_not_told_of(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    parts = (1024, 2048, BLOCK_BYTES)
    seen: list[int] = []

    def reused(job: FakeJob) -> None:
        job.finish()
        if len(seen) == 1:
            slab = next(s for s in world.node.state.arena.slabs if s.blocks)
            slab.generations[sorted(slab.blocks)[0]] += 1

    world.ours.behave = reused
    request = asked(world.rows(np.zeros_like(world.data)))
    fetched = peer.fetch(
        replace(request, parts=parts, landed=lambda index, loaded: seen.append(int(np.count_nonzero(loaded))))
    )
    assert seen[0] == COUNT and seen[-1] == COUNT - 1
    assert sorted(fetched.status.tolist()) == [S.LOADED] * (COUNT - 1) + [S.LEASE_LOST]


# ---------------------------------------------------------------------------- memory


def test_unregistered_memory_stays_while_a_read_into_it_has_not_settled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.transfer.rdma.transport.SETTLE_S", 0.05)
    peer = world.connect()
    world.stored(peer)
    world.ours.behave = posted
    region = world.region(np.zeros_like(world.data))
    fetched = peer.fetch(asked(region.rows(NAMESPACE), 0.2))
    world.transports[0].unregister(region)
    assert world.transports[0].rail_health()["given_up"] == 1
    assert fetched.pending[0].region is region  # type: ignore[attr-defined]
    world.ours.jobs[-1].finish()
    assert world.transports[0].rail_health()["given_up"] == 0


def test_memory_that_a_node_may_still_be_reading_is_not_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.transfer.rdma.told.UNREGISTER_S", 0.3)
    monkeypatch.setattr("kvstrata.transfer.rdma.told.ASK_AGAIN_S", 0.0)
    peer = world.connect()
    world.stored(peer)
    world.theirs.behave = posted
    region = world.region(np.ones_like(world.data))
    request = Push(NAMESPACE, "other", HASHES, region.rows(NAMESPACE), time.monotonic() + 0.3)
    pushed = peer.push(request)
    assert set(pushed.status.tolist()) <= {S.LATE, S.NODE_LOST}
    assert pushed.pending == (), "what it reads is not committed, so the writer may go on"
    world.transports[0].unregister(region)
    assert peer.rail_health()["regions_leaving"] == 1
    peer.upkeep()
    assert peer.rail_health()["regions_leaving"] == 1
    for job in world.theirs.jobs:
        if not job.settled():
            job.finish()
    until(lambda: (peer.upkeep(), peer.rail_health()["regions_leaving"] == 0)[1])


def test_a_closed_transport_opens_nothing(world: World) -> None:
    peer = world.connect()
    rows = world.rows(world.data)
    world.transports[0].close()
    assert set(push(peer, rows)) <= {S.NODE_LOST, S.REFUSED}
    assert not world.ours.jobs


# ---------------------------------------------------------------------------- layouts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_reads_and_writes_the_same_bytes(world: World, data: st.DataObject) -> None:
    """Pieces in any order, of any sizes that add up, with other bytes between them that stay as they are."""
    peer = world.peer()
    cuts = sorted(data.draw(st.sets(st.integers(1, BLOCK_BYTES - 1), max_size=6)))
    lengths = np.diff([0, *cuts, BLOCK_BYTES])
    gap = data.draw(st.integers(0, 40))
    total = COUNT * int(lengths.sum() + gap * len(lengths))
    order = data.draw(st.permutations(range(COUNT * len(lengths))))
    table = np.zeros((COUNT * len(lengths), 2), np.int64)
    at = 0
    for place in order:
        table[place] = at, lengths[place % len(lengths)]
        at += int(lengths[place % len(lengths)]) + gap
    table = table.reshape(COUNT, len(lengths), 2)
    parts = (*sorted(data.draw(st.sets(st.integers(1, BLOCK_BYTES - 1), max_size=3))), BLOCK_BYTES)
    salt = data.draw(st.sampled_from(["", "a"]))
    blocks = world.data.reshape(COUNT, -1)

    def gathered(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return np.array([np.concatenate([memory[a : a + n] for a, n in row]) for row in table.tolist()])

    memory = np.full(total, 7, np.uint8)
    for row, block in zip(table.tolist(), blocks, strict=True):
        start = 0
        for a, n in row:
            memory[a : a + n] = block[start : start + n]
            start += n
    region = world.region(memory)
    request = Push(NAMESPACE, salt, HASHES, region.view(NAMESPACE, table), time.monotonic() + 5)
    assert set(peer.push(request).status.tolist()) <= {S.STORED, S.ALREADY_PRESENT}
    into = world.region(np.full(total, 9, np.uint8))
    told: list[int] = []
    fetch = replace(asked(into.view(NAMESPACE, table)), salt=salt, parts=parts, landed=lambda k, _: told.append(k))
    assert peer.fetch(fetch).status.tolist() == [S.LOADED] * COUNT
    assert (gathered(into.bytes) == blocks).all()
    outside = np.ones(total, bool)
    for a, n in table.reshape(-1, 2).tolist():
        outside[a : a + n] = False
    assert (into.bytes[outside] == 9).all(), "bytes between the pieces were written to"
    assert told == list(range(len(parts)))
    world.transports[0].unregister(into)
    world.transports[0].unregister(region)
