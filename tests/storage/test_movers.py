"""Movers over a store in memory: who waits for what, and for how long; nothing hangs, nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstrata.proto.status import BlockStatus, CopyReason, Tier
from kvstrata.storage.copying.book import Copy
from kvstrata.storage.copying.intake import CopyIntake, Told
from kvstrata.storage.records import Block
from kvstrata.storage.tiers.movers import Movers
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.storage.tiers.write_budget import Allowance
from kvstrata.transfer.base import Endpoint
from kvstrata.transfer.loops import Loops
from tests.waiting import until

from .conftest import holds, key
from .tier_node import TierNode


class Working:
    """A two-tier node whose movers run."""

    def __init__(self, policy: SsdPolicy = SsdPolicy.DEMOTE, daily_writes: int | None = None) -> None:
        self.node = TierNode(policy=policy, daily_writes=daily_writes)
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

    def end(self) -> None:
        self.node.store_.open_gate.set()
        self.movers.stop(0.0)
        self.loops.stop()
        with self.lock:
            self.node.assert_quiet()
        self.node.arena.close()


@pytest.fixture
def working() -> Iterator[Working]:
    one = Working()
    yield one
    one.end()


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


@pytest.fixture
def through() -> Iterator[Working]:
    one = Working(SsdPolicy.WRITE_THROUGH)
    yield one
    one.end()


def stored(node: TierNode, numbers: range) -> list[Block]:
    node.store(numbers)
    shelf = node.state.inventory.shelves[node.handle, ""]
    return [shelf.blocks[key(n)] for n in numbers]


def flushed(working: Working, numbers: range, timeout_s: float = 5.0) -> list[int]:
    return list(working.movers.flushed(working.node.handle, "", [key(n) for n in numbers], timeout_s))


def test_written_through_waits_for_the_flush(through: Working) -> None:
    through.start()
    with through.lock:
        through.movers.write_through(stored(through.node, range(6)))
        assert flushed(through, range(7)) == [1] * 6 + [0]
    through.node.store_.open_gate.clear()
    with through.lock:
        through.movers.write_through(stored(through.node, range(50, 51)))
        assert flushed(through, range(50, 51), 0.02) == [0]
    through.node.store_.open_gate.set()
    until(lambda: through.node.on_ssd([50]) == [50])


def test_what_demotion_has_taken_is_waited_for_as_well(through: Working, monkeypatch: pytest.MonkeyPatch) -> None:
    """... in its move, though nothing of it is left to be written for who asks."""
    with through.lock:
        blocks = stored(through.node, range(6))
        move = through.node.moves.demotions(1 << 20, through.node.now, everything=True)
        assert move is not None and len(move.source) == 6
        through.movers.write_through(blocks)
        assert not through.movers._wanted, "it is on its way"
    waits, performs = through.movers._await, threading.Thread(target=through.movers.perform, args=(move,))

    def performed(done: Callable[[], bool], timeout_s: float) -> None:
        performs.start()
        waits(done, timeout_s)

    monkeypatch.setattr(through.movers, "_await", performed)
    with through.lock:
        assert flushed(through, range(6)) == [1] * 6
    performs.join(5)


@pytest.mark.parametrize("arrives", [True, False])
def test_what_another_node_is_sending_to_the_ssd_is_not_waited_for(
    through: Working, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """A client stores what an order to copy is bringing: a source that is slow does not slow the store."""
    node = through.node
    copy = Copy(
        (1, 1), Endpoint("s", 1, "s:1"), node.namespace, "", [key(n) for n in range(4)], 0, Tier.SSD,
        CopyReason.REPLICA, node.now + 60.0, lambda done: None,
    )  # fmt: skip
    intake = CopyIntake(node.state, node.moves)
    monkeypatch.setattr(through.movers, "_await", lambda done, timeout_s: pytest.fail("it waits"))
    with through.lock:
        positions = intake.next_piece(copy, node.now)
        piece = intake.admit(copy, positions, [Told(0, b"", n, 0.0) for n in positions], node.now)
        assert piece is not None and len(piece.blocks) == 4 and piece.tier == Tier.SSD
        through.movers.write_through(stored(node, range(4)))
        assert not through.movers._wanted
        assert flushed(through, range(4), 20.0) == [0] * 4
        intake.commit(piece, [int(BlockStatus.STORED if arrives else BlockStatus.LATE)] * 4, node.now)
        assert flushed(through, range(4), 20.0) == [int(arrives)] * 4
        move = node.moves.demotions(1 << 20, node.now, everything=True)
        assert (move is None) == arrives, "what did not come is still to be written"
        if move is not None:
            node.finish(move)


@pytest.mark.parametrize("how", ["remove", "bump", "device"])
def test_nobody_waits_for_what_has_gone(through: Working, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its slot is still being written to; who waits already is told."""
    node, waits = through.node, through.movers._await
    waiting = threading.Event()

    def goes() -> None:
        assert waiting.wait(30)
        with through.lock:  # which who waits has let go of
            if how == "remove":
                node.remove(range(4))
            elif how == "bump":
                node.state.set_epoch(node.namespace.group, 1, node.now)
            else:
                for slab in node.store_.arena.slabs:
                    node.ssd.lose(slab)

    def waited(done: Callable[[], bool], timeout_s: float) -> None:
        assert not done()
        until_s = time.monotonic() + timeout_s
        waiting.set()
        waits(done, timeout_s)
        assert done() and time.monotonic() < until_s

    monkeypatch.setattr(through.movers, "_await", waited)
    going = threading.Thread(target=goes)
    going.start()
    with through.lock:
        through.movers.write_through(stored(node, range(4)))
        assert flushed(through, range(4), 60.0) == [0] * 4
        assert node.moves.moving and waiting.is_set(), "no move's end woke it"
    going.join(30)


def test_behind_a_device_that_hangs_nobody_waits_for_as_long_as_it_has_hung(
    through: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for other blocks; who would wait longer waits for the rest, and as ever once the device goes on."""
    waits: list[float] = []
    monkeypatch.setattr(through.movers, "_await", lambda done, timeout_s: waits.append(timeout_s))
    node = through.node
    with through.lock:
        through.movers.write_through(stored(node, range(4)))
        assert flushed(through, range(4), 2.0) == [0] * 4 and waits.pop() == 2.0
        node.now += 1.5
        through.movers.write_through(stored(node, range(50, 54)))
        for numbers in (range(4), range(50, 54)):
            assert flushed(through, numbers, 1.5) == [0] * 4 and not waits
            assert flushed(through, numbers, 4.0) == [0] * 4 and waits.pop() == 2.5
        node.remove(range(4))
        assert flushed(through, range(50, 54), 1.5) == [0] * 4 and not waits, "the device is no quicker by that"
        node.moves.abandon(through.movers._wanted.popleft(), node.now)
        assert flushed(through, range(50, 54), 1.5) == [0] * 4 and waits.pop() == 1.5


def test_what_is_given_up_at_a_stop_is_flushed_all_the_same(through: Working) -> None:
    """A writer's move that has not begun counts as not offered."""
    with through.lock:
        through.movers.write_through(stored(through.node, range(6)))
    through.movers.stop(5.0)
    assert through.node.on_ssd(range(6)) == list(range(6))
    with through.lock:
        through.movers.write_through(stored(through.node, range(50, 54)))
        assert flushed(through, range(50, 54)) == [0] * 4, "nothing is begun any more, and nobody hangs"


def test_what_is_given_up_at_a_stop_has_cost_no_writes() -> None:
    """A budget that its first choice has used up is there for the flush; nothing is counted twice, nor as failed."""
    one = Working(SsdPolicy.WRITE_THROUGH, daily_writes=24 * 160 << 10)  # 80 KiB at the start
    node, budget = one.node, one.node.moves.budget
    with one.lock:
        one.movers.write_through(stored(node, range(16)))
        assert budget.allowance(node.now) is Allowance.SPENT
    one.movers.stop(5.0)
    assert node.on_ssd(range(16)) == list(range(16))
    assert node.state.counts.demoted_bytes == 16 * (8 << 10) and not node.state.counts.demote_failed
    one.end()


def test_what_went_before_it_was_written_has_cost_no_writes() -> None:
    one = Working(SsdPolicy.WRITE_THROUGH, daily_writes=24 * 160 << 10)
    node, budget = one.node, one.node.moves.budget
    with one.lock:
        assert budget.allowance(node.now) is Allowance.AMPLE
        one.movers.write_through(stored(node, range(6)))
        assert budget.allowance(node.now) is Allowance.SHORT
        node.remove(range(6))
    one.movers._perform_one()
    assert budget.allowance(node.now) is Allowance.AMPLE
    assert (node.state.counts.demote_failed, node.store_.writes) == (6, 0)
    one.end()


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
