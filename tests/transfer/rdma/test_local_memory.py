"""Registration that takes long, or comes too late: what waits for it, and what is kept."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.proto.errors import Closed, Unavailable
from kvstrata.transfer.frames import Late
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma import owner
from kvstrata.transfer.rdma.client_rails import ClientRails
from kvstrata.transfer.rdma.engine import Registration
from kvstrata.transfer.rdma.memory import LocalMemory
from kvstrata.transfer.rdma.owner import Owner
from kvstrata.transfer.rdma.rails import RailOptions
from kvstrata.transfer.regions import Region
from tests.storage.fake_engine import CMA, FakeEngine
from tests.storage.railed_node import NAMESPACE
from tests.transfer.rdma.fake_agent import FakeAgent
from tests.transfer.rdma.peer_world import COUNT, S, World, asked
from tests.waiting import until

SOON_S = 20.0


class SlowEngine(FakeEngine):
    """Registers once :attr:`go_on` is set; what is deregistered is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on, self.closed_count = threading.Event(), threading.Event(), 0

    def register(
        self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None
    ) -> Registration:
        self.entered.set()
        assert self.go_on.wait(SOON_S)
        made = super().register(address, nbytes, memory, within_s=within_s)
        made.close = self._closed  # type: ignore[method-assign]
        return made

    def _closed(self) -> None:
        self.closed_count += 1


def soon(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


def region() -> Region:
    flat = np.zeros(4096, np.uint8)
    return Region(flat, flat)


def outcome(call: Any) -> tuple[threading.Thread, list[Any]]:
    """Begun in a thread; what it returned or raised, once that has ended."""
    seen: list[Any] = []

    def run() -> None:
        try:
            seen.append(call())
        except Exception as error:  # noqa: BLE001  the test looks at it
            seen.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, seen


def test_nothing_waits_for_a_registration_that_takes_long() -> None:
    engine = SlowEngine()
    engine.go_on.set()
    memory = LocalMemory(engine)
    free, used = memory.scratch(100, soon()), memory.scratch(100, soon())
    memory.put_back(free, None)
    engine.go_on.clear()
    engine.entered.clear()
    thread, _ = outcome(lambda: memory.of(region()))
    assert engine.entered.wait(SOON_S)
    others = [
        outcome(call)[0]
        for call in (
            lambda: memory.put_back(used, None),
            lambda: memory.scratch(100, soon()),
            memory.health,
            lambda: memory.pattern(8),
        )
    ]
    until(lambda: not any(other.is_alive() for other in others))
    assert thread.is_alive()
    engine.go_on.set()
    thread.join(SOON_S)


def test_the_agents_thread_ends_transfers_while_somebody_waits_for_it_to_register() -> None:
    agent = FakeAgent()
    engine = Owner("me", "cma", "UCX", lambda: agent)
    memory = LocalMemory(engine)
    scratch = memory.scratch(100, soon())
    busy, go_on = threading.Event(), threading.Event()
    try:
        engine._calls.put(lambda: (busy.set(), go_on.wait(SOON_S))[0])
        assert busy.wait(SOON_S)
        engine._calls.put(lambda: memory.put_back(scratch, None))
        thread, seen = outcome(lambda: memory.of(region()))
        until(lambda: engine._calls.qsize() == 2)
        go_on.set()
        thread.join(SOON_S)
        assert seen and len(seen[0]) == 1
        assert memory.scratch(100, soon()) is scratch
    finally:
        go_on.set()
        engine.close(0.0)


def test_scratch_waits_for_the_agent_until_its_callers_deadline() -> None:
    """It may be at somebody's gigabytes."""
    engine = Owner("me", "cma", "UCX", FakeAgent)
    memory = LocalMemory(engine)
    busy, go_on = threading.Event(), threading.Event()
    try:
        engine._calls.put(lambda: (busy.set(), go_on.wait(SOON_S))[0])
        assert busy.wait(SOON_S)
        with pytest.raises(Late, match="in time"):
            memory.scratch(100, soon(0.05))
        assert memory.health()["scratch_bytes_in_use"] == 0
        go_on.set()
        assert memory.scratch(100, soon()).address
    finally:
        go_on.set()
        engine.close()


def test_an_agent_that_did_not_answer_in_time_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent()
    engine = Owner("me", "cma", "UCX", lambda: agent)
    memory, one = LocalMemory(engine), region()
    busy, go_on = threading.Event(), threading.Event()
    try:
        with monkeypatch.context() as short:
            short.setattr(owner, "REGISTER_S", 0.05)
            engine._calls.put(lambda: (busy.set(), go_on.wait(SOON_S))[0])
            assert busy.wait(SOON_S)
            with pytest.raises(Unavailable, match="did not answer"):
                memory.of(one)
        assert memory.health()["not_registered"] == []
        go_on.set()
        assert len(memory.of(one)) == 1
    finally:
        go_on.set()
        engine.close(0.0)


def test_a_refusal_is_remembered() -> None:
    engine = FakeEngine(memory_limit=1)
    memory, one = LocalMemory(engine), region()
    with pytest.raises(Unavailable, match="memlock"):
        memory.of(one)
    engine.memory_limit = 1 << 40
    with pytest.raises(Unavailable, match="memlock"):
        memory.of(one)
    assert memory.health()["not_registered"] == ["memlock is too low: raise it"]


def test_a_region_that_is_unregistered_while_it_is_registered_does_not_stay() -> None:
    engine = SlowEngine()
    memory, one, after = LocalMemory(engine), region(), region()
    thread, seen = outcome(lambda: memory.of(one))
    assert engine.entered.wait(SOON_S)
    waiting, refused = outcome(lambda: memory.of(after))
    try:
        for each in (one, after):
            each.close()
            forgetting, _ = outcome(partial(memory.forget, each))
            forgetting.join(SOON_S)
            assert not forgetting.is_alive()
    finally:
        engine.go_on.set()
        thread.join(SOON_S)
        waiting.join(SOON_S)
    assert isinstance(seen[0], Closed) and isinstance(refused[0], Closed)
    assert engine.closed_count == len(engine.registered) == 1
    assert memory.health()["registered"] == 0


class WatchedRegions(weakref.WeakValueDictionary[int, Region]):
    """In the midst of being walked it gives another thread the time to call ``meanwhile``."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def values(self) -> Iterator[Region]:  # type: ignore[override]
        for value in super().values():
            yield value
            outcome(self._meanwhile)[0].join(0.1)


def test_regions_may_be_registered_while_the_agent_is_opened() -> None:
    kept = [region(), region(), region()]
    own = ClientRails("c", RailOptions(), find=lambda _: CMA, opener=lambda *_: FakeEngine())
    own._regions = WatchedRegions(lambda: own.register(kept[2]))
    for each in kept[:2]:
        own.register(each)
    agent = own.opened()
    until(lambda: all(agent.memory.known(each) for each in kept))
    own.close()


# ---------------------------------------------------------------------------- calls


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.end()


def test_a_load_waits_for_a_registration_until_its_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = world.connect()
    world.stored(peer)
    flat = np.zeros_like(world.data)
    new = Region(flat, flat)
    rows, go_on, plain = new.rows(NAMESPACE), threading.Event(), world.ours.register

    def slow(address: int, nbytes: int, memory: Memory = HOST) -> Registration:
        assert go_on.wait(SOON_S)
        return plain(address, nbytes, memory)

    monkeypatch.setattr(world.ours, "register", slow)
    thread, seen = outcome(lambda: peer.fetch(asked(rows, 0.2)))
    thread.join(SOON_S / 2)
    in_time = not thread.is_alive()
    go_on.set()
    thread.join(SOON_S)
    assert in_time and seen[0].status.tolist() == [S.LATE] * COUNT
    assert peer.fetch(asked(rows)).status.tolist() == [S.LOADED] * COUNT
    assert sum(each.address == new.address for each in world.ours.registered) == 1
