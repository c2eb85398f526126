"""Movers over a store in memory: who waits for what, and for how long; nothing hangs, nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.loops import Loops

from .conftest import holds, key, until
from .tier_node import TierNode


class Working:
    """A two-tier node whose movers run."""

    def __init__(self, policy: SsdPolicy = SsdPolicy.DEMOTE) -> None:
        self.node = TierNode(policy=policy)
        self.lock = threading.Lock()
        self.loops = Loops()
        self.movers = Movers(self.node.moves, self.node.store_, self.lock, clock=lambda: self.node.now)

    def start(self) -> None:
        self.movers.start(self.loops)

    def cold(self, numbers: range, version: int = 0) -> None:
        """Before the movers run: on SSD only."""
        self.node.store(numbers, version)
        while self.node.demote():
            pass
        self.node.make_room(numbers)

    def read(self, numbers: range, timeout_s: float = 5.0) -> list[int]:
        with self.lock:
            read = self.node.begin_read(numbers)
            if read is not None:
                self.movers.fetch(read, timeout_s)
            got = self.node.acquire(numbers)
            statuses = list(got.status)
            if read is not None:
                statuses = [s if s == 3 else read.why(key(n)) for n, s in zip(numbers, statuses, strict=True)]
                self.node.moves.end_read(read)
            self.node.state.release(self.node.SESSION, [got.lease.id] if got.lease is not None else [])
            self.node.check()
        return statuses


@pytest.fixture
def working() -> Iterator[Working]:
    one = Working()
    yield one
    one.node.store_.open_gate.set()
    one.movers.stop(0.0)
    one.loops.stop()
    with one.lock:
        one.node.assert_quiet()
    one.node.arena.close()


def test_readers_get_their_blocks_side_by_side(working: Working) -> None:
    working.cold(range(12), 4)
    working.start()
    found: list[list[int]] = []
    readers = [threading.Thread(target=lambda: found.append(working.read(range(12)))) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert found == [[BlockStatus.LOADED] * 12] * 4
    assert working.node.state.counts.promoted == 12, "read once for all of them"
    shelf = working.node.state.inventory.shelves[working.node.handle, ""]
    assert all(holds(shelf.blocks[key(n)], 4) for n in range(12))


def test_a_device_that_hangs_makes_its_readers_late_and_no_others(working: Working) -> None:
    working.cold(range(4))
    working.node.store([50])
    working.start()
    working.node.store_.open_gate.clear()
    assert working.read(range(4), 0.05) == [BlockStatus.LATE] * 4
    assert working.read(range(50, 51), 0.05) == [BlockStatus.LOADED]
    working.node.store_.open_gate.set()
    until(lambda: not working.node.moves.moving)
    assert working.read(range(4)) == [BlockStatus.LOADED] * 4, "for who asks next"
    assert working.node.state.counts.promoted == 4


def test_a_prefetch_is_read_without_anybody_waiting(working: Working) -> None:
    working.cold(range(4))
    working.start()
    with working.lock:
        status, moves = working.node.moves.prefetch(
            working.node.handle, "", [key(n) for n in range(4)], working.node.now
        )
        working.movers.ahead(moves)
    assert list(status) == [BlockStatus.IN_FLIGHT] * 4
    until(lambda: working.node.present(range(4)) == [0, 1, 2, 3])


def test_who_waits_goes_before_who_reads_ahead(working: Working) -> None:
    """Nothing runs yet: the order of the queue is what is looked at."""
    working.cold(range(6))
    order: list[list[bytes]] = []
    read = working.node.store_.read

    def noted(blocks, into, **more):  # type: ignore[no-untyped-def]
        order.append([block.hash for block in blocks])
        return read(blocks, into, **more)

    working.node.store_.read = noted  # type: ignore[method-assign]
    with working.lock:
        for n in (0, 1, 2):
            _, moves = working.node.moves.prefetch(working.node.handle, "", [key(n)], working.node.now)
            working.movers.ahead(moves)
        wanted = working.node.begin_read([5])
        joined = working.node.begin_read([2])
        assert wanted is not None and joined is not None
        working.movers.fetch(wanted, 0.0)
        working.movers.fetch(joined, 0.0)
    for _ in range(4):
        working.movers._perform_one()
    assert order == [[key(5)], [key(2)], [key(0)], [key(1)]]
    with working.lock:
        working.node.moves.end_read(wanted)
        working.node.moves.end_read(joined)


def test_demotion_runs_by_itself(working: Working) -> None:
    working.node.store(range(40))
    working.start()
    until(lambda: len(working.node.on_ssd(range(40))) >= 40 - 17)
    assert working.loops.problems() == []


def test_demotion_holds_back_while_a_reader_waits_but_not_for_ever(working: Working) -> None:
    working.cold(range(4))
    working.node.store(range(100, 140))
    working.movers._busy = 1  # a foreground read that does not end
    working.start()
    until(lambda: working.node.state.counts.demoted > 4)
    working.movers._busy = 0


def test_written_through_waits_for_the_flush() -> None:
    working = Working(SsdPolicy.WRITE_THROUGH)
    working.start()
    try:
        with working.lock:
            working.node.store(range(6))
            shelf = working.node.state.inventory.shelves[working.node.handle, ""]
            working.movers.write_through([shelf.blocks[key(n)] for n in range(6)], 5.0)
            assert working.node.on_ssd(range(6)) == list(range(6))
        working.node.store_.open_gate.clear()
        with working.lock:
            working.node.store([50])
            working.movers.write_through([shelf.blocks[key(50)]], 0.02)
            assert working.node.on_ssd([50]) == []
        working.node.store_.open_gate.set()
        until(lambda: working.node.on_ssd([50]) == [50])
    finally:
        working.movers.stop(0.0)
        working.loops.stop()
        working.node.arena.close()


def test_a_store_that_raises_ends_the_move_and_shows_in_health(working: Working) -> None:
    working.cold(range(4))

    def broken(*_: object, **__: object) -> list[BlockStatus]:
        raise RuntimeError("a bug in a store")

    read = working.node.store_.read
    working.node.store_.read = broken  # type: ignore[method-assign]
    working.start()
    assert working.read(range(4)) == [BlockStatus.LATE] * 4
    until(lambda: any("a bug in a store" in problem for problem in working.loops.problems()))
    working.node.store_.read = read  # type: ignore[method-assign]
    assert working.read(range(4)) == [BlockStatus.LOADED] * 4


def test_a_stop_gives_up_what_waits_and_flushes_what_is_dirty(working: Working) -> None:
    working.cold(range(4))
    working.node.store(range(100, 110))
    with working.lock:
        read = working.node.begin_read(range(4))
        assert read is not None
        working.movers.fetch(read, 0.0)
    working.movers.stop(5.0)
    assert not read.waiting and read.why(key(0)) == BlockStatus.LATE
    assert working.node.on_ssd(range(100, 110)) == list(range(100, 110))
    with working.lock:
        working.node.moves.end_read(read)
    assert working.read(range(4)) == [BlockStatus.LATE] * 4, "nothing is begun any more, and nobody hangs"


def test_a_stop_does_not_wait_for_a_device_that_hangs(working: Working, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.storage.tiers.movers.LET_GO_S", 0.05)
    working.node.store(range(4))
    working.node.store_.open_gate.clear()
    stop = threading.Thread(target=working.movers.stop, args=(0.05,), daemon=True)
    stop.start()
    stop.join(5)
    assert not stop.is_alive()
    working.node.store_.open_gate.set()
    until(lambda: not working.node.moves.moving)
