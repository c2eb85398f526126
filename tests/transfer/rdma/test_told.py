"""What one node is told of regions, by several threads at once, and memory whose end it does not confirm."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvstrata.proto.errors import Busy, Closed, KVError, ProtocolError, Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.storage.serving.regions import RegionBook
from kvstrata.transfer.base import Push
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.peer import RdmaPeer
from kvstrata.transfer.rdma.told import ToldRegions
from kvstrata.transfer.regions import Region
from tests.storage.fake_engine import posted
from tests.storage.railed_node import NAMESPACE
from tests.transfer.rdma.peer_world import HASHES, S, World, push, up
from tests.waiting import until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("kvstrata.transfer.rdma.told.UNREGISTER_S", 0.3)
    monkeypatch.setattr("kvstrata.transfer.rdma.told.ASK_AGAIN_S", 0.0)
    monkeypatch.setattr("kvstrata.storage.serving.regions.SETTLE_S", 0.02)
    world = World(tmp_path, monkeypatch)
    yield world
    for job in world.theirs.jobs:
        if not job.settled():
            job.finish()
    world.end()


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the regions that our agent was made to forget."""
    ids: list[int] = []
    forget = ClientRails.forget

    def seen(own: ClientRails, region: Region) -> None:
        ids.append(region.id)
        forget(own, region)

    monkeypatch.setattr(ClientRails, "forget", seen)
    return ids


def left_late(world: World, peer: RdmaPeer) -> Region:
    """A region that the node reads for longer than its store waited."""
    world.stored(peer)
    world.theirs.behave = posted
    region = world.region(np.ones_like(world.data))
    pushed = peer.push(Push(NAMESPACE, "other", HASHES, region.rows(NAMESPACE), time.monotonic() + 0.3))
    assert set(pushed.status.tolist()) <= {S.LATE, S.NODE_LOST}
    return region


def test_first_stores_from_one_region_at_a_time_tell_the_node_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = world.connect()
    world.stored(peer)
    rows = world.rows(world.data.copy())
    kept: list[int] = []
    together = threading.Barrier(2)
    keep = RegionBook.keep

    def slowly(*args: object) -> None:
        kept.append(1)
        try:
            together.wait(0.3)
        except threading.BrokenBarrierError:
            pass
        keep(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(RegionBook, "keep", slowly)
    with ThreadPoolExecutor(2) as threads:
        stores = [threads.submit(push, peer, rows) for _ in range(2)]
        assert all(set(store.result(5)) <= {S.STORED, S.ALREADY_PRESENT, S.IN_FLIGHT} for store in stores)
    assert len(kept) == 1 and up(peer)


def test_a_store_waits_no_longer_than_its_deadline_for_another_that_tells(world: World) -> None:
    peer = world.connect()
    world.stored(peer)
    opened = peer.rails.ready()
    assert opened is not None
    told = ToldRegions(peer.link)
    region = world.region(world.data.copy())
    told._telling[region.id] = threading.Lock()
    with told._telling[region.id], pytest.raises(Busy, match="still being told"):
        told.tell(opened, region, time.monotonic() + 0.02)
    told.tell(opened, region, time.monotonic() + 5)
    region.close()
    assert told.forget(region)
    with pytest.raises(Closed):
        told.tell(opened, region, time.monotonic() + 5)


@pytest.mark.parametrize("error", [Closed("closed"), Unavailable("gone"), ProtocolError("garbage"), Busy("later")])
def test_whatever_a_node_answers_all_are_asked_and_our_agent_forgets_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch, forgotten: list[int], error: KVError
) -> None:
    first = world.connect()
    second = RdmaPeer(world.transports[0]._tcp.connect(first.endpoint), world.transports[0]._own, only=True)
    world.transports[0]._peers.add(second)
    region = world.region(world.data)
    asked: list[RdmaPeer] = []
    refusing = True
    for peer in (first, second):
        assert set(push(peer, region.rows(NAMESPACE))) <= {S.STORED, S.ALREADY_PRESENT}
        call = peer.link.channel.call

        def scripted(kind: int, *args: object, peer: RdmaPeer = peer, call: object = call, **more: object) -> object:
            if kind == Kind.UNREGISTER_REGION:
                asked.append(peer)
                if refusing:
                    raise error
            return call(kind, *args, **more)  # type: ignore[operator]

        monkeypatch.setattr(peer.link.channel, "call", scripted)
    region.close()
    world.transports[0].unregister(region)
    assert set(asked) == {first, second}
    lasting = isinstance(error, Closed | Unavailable)  # no store is unanswered, and no further one can be
    assert forgotten == ([region.id] if lasting else [])
    refusing = False
    first.upkeep()
    assert forgotten == ([region.id] if lasting else []), "the second has not confirmed"
    second.upkeep()
    assert forgotten == [region.id]


def test_memory_stays_registered_until_its_node_has_confirmed(world: World, forgotten: list[int]) -> None:
    peer = world.connect()
    region = left_late(world, peer)
    region.close()
    world.transports[0].unregister(region)
    peer.upkeep()
    assert not forgotten and peer.reaches_memory(region)
    for job in world.theirs.jobs:
        if not job.settled():
            job.finish()
    until(lambda: (peer.upkeep(), bool(forgotten))[1])
    assert forgotten == [region.id] and not peer.reaches_memory(region)


def test_a_retired_peer_holds_memory_until_it_is_gone(world: World, forgotten: list[int]) -> None:
    peer = world.connect()
    endpoint = peer.endpoint
    region = left_late(world, peer)
    peer.close()
    region.close()
    world.transports[0].unregister(region)
    assert not forgotten
    del peer
    gc.collect()
    world.transports[0].connect(endpoint)
    assert forgotten == [region.id]
