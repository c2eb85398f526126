"""Moves between the tiers, as bookkeeping: what moves, what does not, and what becomes of it whatever else happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.storage.ssd.base import Removal
from kvstrata.storage.tiers.moves import LOW_WATERMARK, MOVE_S
from kvstrata.storage.tiers.quarantine import QUARANTINE_BLOCKS, QUARANTINE_S
from kvstrata.storage.tiers.recovery import recover
from kvstrata.storage.tiers.ssd_policy import SsdPolicy

from .conftest import holds, key, keys
from .memory_store import MemoryStore
from .tier_node import TierNode

Make = Callable[..., TierNode]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TierNode] = []

    def build(*args: int, **options: object) -> TierNode:
        made.append(TierNode(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.assert_quiet()
        one.arena.close()


@pytest.fixture
def two(make: Make) -> TierNode:
    return make()


# ---------------------------------------------------------------------- down


def test_the_coldest_go_first_and_stay_readable_from_both(two: TierNode) -> None:
    two.store(range(10))
    two.store(range(10, 20))
    two.acquire(range(10))
    assert set(two.demote(5 * 4096)) == {key(n) for n in range(15, 20)}, "the tail of the call that was used last"
    assert two.on_ssd(range(20)) == list(range(15, 20)) and two.present(range(20)) == list(range(20))
    assert two.state.counts.demoted == 5
    assert {(h.tier, len(h.hashes)) for h in two.state.snapshot()} == {(Tier.DRAM, 320), (Tier.SSD, 80)}
    assert two.moves.durable(two.handle, "", [key(14), key(15)]) == b"\0\1"


def test_nothing_is_demoted_below_the_watermark(two: TierNode) -> None:
    two.store(range(int(two.arena.bytes_total * LOW_WATERMARK) // 4096))
    assert two.demote(everything=False) == []
    two.store(range(100, 103))
    assert len(two.demote(everything=False)) == 3, "as much as is above the watermark"
    assert two.demote(everything=False) == []


def test_a_tenant_near_its_share_is_kept_clean_though_the_node_is_empty(two: TierNode) -> None:
    two.share("a", dram=8 * 4096)
    two.store(range(8), salt="a")
    two.store(range(100, 104), salt="b")
    done = two.demote(everything=False)
    assert set(done) == {key(n) for n in range(2, 8)}


def test_what_leaves_unwritten_is_counted(two: TierNode) -> None:
    two.store(range(4))
    two.demote()
    two.store(range(10, 14))
    two.make_room(range(14))
    assert two.state.counts.evicted_unwritten >= 4
    assert two.state.counts.evicted - two.state.counts.evicted_unwritten == 4, "those that were written are not"


def test_a_block_the_ssd_refused_is_not_offered_again_until_it_is_used(two: TierNode) -> None:
    two.share("", ssd=0)
    two.store(range(4))
    assert two.demote() == [] and two.state.counts.demote_refused == 4
    two.share("", ssd=None)
    assert two.demote() == []
    two.acquire(range(2))
    assert set(two.demote()) == {key(0), key(1)}


def test_a_small_ssd_share_is_not_written_over_and_over(two: TierNode) -> None:
    two.share("", ssd=4 * 8192)
    two.store(range(12))
    while two.demote(4 * 4096):
        pass
    assert two.state.counts.demoted + two.state.counts.demote_refused == 12, "each was written once"


def test_of_a_chain_too_long_for_its_share_the_head_stays(two: TierNode) -> None:
    two.share("", ssd=20 * 8192)
    two.store(range(48))
    while two.demote(8 * 4096):
        pass
    assert two.on_ssd(range(48)) == list(range(20))


def test_policies(make: Make) -> None:
    off = make(policy=SsdPolicy.OFF)
    off.store(range(4))
    assert off.demote() == []
    through = make(policy=SsdPolicy.WRITE_THROUGH)
    through.store(range(4))
    shelf = through.state.inventory.shelves[through.handle, ""]
    move = through.moves.write_through([shelf.blocks[key(n)] for n in range(4)], through.now)
    assert move is not None
    assert through.moves.write_through(list(shelf.blocks.values()), through.now) is None, "it is on its way"
    assert through.finish(move) == [True] * 4 and through.on_ssd(range(4)) == [0, 1, 2, 3]


def test_a_failed_write_leaves_nothing(two: TierNode) -> None:
    two.store(range(4))
    move = two.moves.demotions(1 << 20, two.now, everything=True)
    assert move is not None
    two.finish(move, works=False)
    assert two.on_ssd(range(4)) == [] and two.ssd.arena.bytes_used == 0 and two.state.counts.demote_failed == 4
    assert two.present(range(4)) == [0, 1, 2, 3]


# ---------------------------------------------------------------------- resurrection


@pytest.mark.parametrize("how", ["remove", "bump", "drop"])
def test_what_goes_while_it_is_written_is_nowhere(two: TierNode, how: str) -> None:
    two.store(range(4))
    move = two.moves.demotions(1 << 20, two.now, everything=True)
    assert move is not None
    _take_away(two, how)
    two.check()
    two.finish(move)
    assert two.on_ssd(range(4)) == [] and two.present(range(4)) == []
    two.ssd.sweep(100)
    two.state.inventory.sweep(100)
    assert two.ssd.arena.bytes_used == two.arena.bytes_used == 0


def test_removed_while_queued_and_stored_anew(two: TierNode) -> None:
    """Version 1 is on its way; removed; version 2 stored; the queue runs: version 2, and no version 1 anywhere."""
    two.store(range(4), 1)
    move = two.moves.demotions(1 << 20, two.now, everything=True)
    assert move is not None
    two.remove(range(4))
    two.store(range(4), 2)
    two.finish(move)
    assert two.on_ssd(range(4)) == []
    assert len(two.demote()) == 4
    two.make_room(range(4))
    blocks = two.read(range(4))
    assert len(blocks) == 4 and all(holds(block, 2) for block in blocks)


@pytest.mark.parametrize("how", ["remove", "bump", "drop"])
def test_what_goes_while_it_is_read_is_not_found(two: TierNode, how: str) -> None:
    cold(two, range(4))
    read = two.begin_read(range(4))
    assert read is not None
    _take_away(two, how)
    two.check()
    two.finish(read.moves[0])
    assert two.present(range(4)) == [] and two.on_ssd(range(4)) == []
    assert read.why(key(0)) == BlockStatus.MISSING
    two.moves.end_read(read)


def test_a_move_that_takes_for_ever_publishes_nothing(two: TierNode) -> None:
    cold(two, range(4))
    read = two.begin_read(range(4))
    assert read is not None
    two.now += MOVE_S + 1
    two.state.expire(two.now)
    assert read.why(key(0)) == BlockStatus.LATE
    two.finish(read.moves[0])
    two.moves.end_read(read)
    assert two.present(range(4)) == [] and two.on_ssd(range(4)) == [0, 1, 2, 3]


# ---------------------------------------------------------------------- up


def test_a_promoted_block_has_its_bytes_and_keeps_its_copy(two: TierNode) -> None:
    cold(two, range(6), 7)
    blocks = two.read(range(6))
    assert len(blocks) == 6 and all(holds(block, 7) for block in blocks)
    assert two.on_ssd(range(6)) == list(range(6)) and two.state.counts.promoted == 6
    told = [verb for _, verb in two.state.story(two.namespace, "", key(0))]
    assert "written (SSD)" in told and "read from SSD" in told
    assert two.demote() == [] or key(0) not in two.demote(), "it is clean"
    before = two.state.counts.evicted_unwritten
    two.make_room(range(6))
    assert all(n in two.on_ssd(range(6)) for n in range(6)) and two.state.counts.evicted_unwritten - before <= 6


def test_a_second_reader_waits_for_the_read_under_way(two: TierNode) -> None:
    cold(two, range(6))
    first, second = two.begin_read(range(4)), two.begin_read(range(6))
    assert first is not None and second is not None
    assert len(first.moves) == 1 and [len(move.source) for move in second.moves] == [2]
    assert second.waits == [first.moves[0], *second.moves]
    two.finish(first.moves[0])
    assert not first.waiting and second.waiting
    two.moves.end_read(first)
    two.make_room(range(100, 101))
    assert two.present(range(4)) == [0, 1, 2, 3], "held for the second reader"
    two.finish(second.moves[0])
    got = two.acquire(range(6))
    assert list(got.status) == [BlockStatus.LOADED] * 6
    two.moves.end_read(second)


def test_what_has_arrived_stays_until_its_reader_has_it(two: TierNode) -> None:
    """And what was there already stays for what is coming."""
    cold(two, range(4))
    two.store([50])
    read = two.begin_read([50, *range(4)])
    assert read is not None
    two.finish(read.moves[0])
    for n in range(1000, 1200):
        two.now += 1.0
        two.state.expire(two.now)
        two.store([n])
    assert two.present([50, *range(4)]) == [50, 0, 1, 2, 3]
    two.moves.end_read(read)
    two.make_room(range(4))


def test_a_reader_that_gave_up_holds_nothing(two: TierNode) -> None:
    cold(two, range(4))
    read = two.begin_read(range(4))
    assert read is not None
    two.moves.end_read(read)
    two.finish(read.moves[0])
    assert two.present(range(4)) == [0, 1, 2, 3] and not len(two.state.leases)


def test_no_room_in_dram_is_said(two: TierNode) -> None:
    cold(two, range(4))
    two.store(range(1000, 1000 + two.capacity))
    two.acquire(range(1000, 1000 + two.capacity), seconds=50)
    read = two.begin_read(range(4))
    assert read is not None and not read.moves
    assert [read.why(key(n)) for n in range(4)] == [BlockStatus.NO_ROOM] * 4
    assert two.state.counts.promote_refused == 4
    two.moves.end_read(read)


def test_a_tenant_promotes_within_its_own_share(two: TierNode) -> None:
    cold(two, range(8), salt="a")
    two.store(range(100, 104), salt="b")
    two.share("a", dram=3 * 4096)
    read = two.begin_read(range(8), "a")
    assert read is not None and sum(len(move.source) for move in read.moves) == 3
    assert two.present(range(100, 104), "b") == [100, 101, 102, 103]
    for move in read.moves:
        two.finish(move)
    two.moves.end_read(read)


def test_reading_does_not_push_out_what_the_same_call_has_in_dram(two: TierNode) -> None:
    cold(two, range(20))
    n = two.capacity
    two.store(range(1000, 1000 + n))
    two.now += 100
    two.state.expire(two.now)
    numbers = [*range(1000, 1004), *range(20)]
    assert two.present(range(1000, 1004)) == [1000, 1001, 1002, 1003]
    assert len(two.read(numbers)) == 24


@pytest.mark.parametrize("why", [BlockStatus.CORRUPT, BlockStatus.READ_ERROR])
def test_what_reads_wrong_leaves_and_its_slot_rests(two: TierNode, why: BlockStatus) -> None:
    cold(two, range(4))
    used = two.ssd.arena.bytes_used
    two.store_.fails[key(2)] = why
    read = two.begin_read(range(4))
    assert read is not None
    two.finish(read.moves[0])
    assert two.present(range(4)) == [0, 1, 3] and two.on_ssd(range(4)) == [0, 1, 3]
    assert read.why(key(2)) == why
    assert two.state.counts.ssd_corrupt + two.state.counts.ssd_read_errors == 1
    assert two.ssd.arena.bytes_used == used, "still charged"
    gone = [change for change in _changes(two) if change[1] == Departure.CORRUPT]
    assert gone == [(key(2), Departure.CORRUPT)]
    two.moves.end_read(read)
    two.now += QUARANTINE_S + 1
    two.moves.expire(two.now)
    assert two.ssd.arena.bytes_used == used - 8192 and not len(two.moves.quarantine)


def test_quarantine_is_bounded(make: Make) -> None:
    two = make(40, 40)
    numbers = range(QUARANTINE_BLOCKS + 10)
    cold(two, numbers)
    two.store_.fails = {key(n): BlockStatus.CORRUPT for n in numbers}
    two.read(numbers)
    assert len(two.moves.quarantine) == QUARANTINE_BLOCKS
    assert two.on_ssd(numbers) == []


# ---------------------------------------------------------------------- ahead


def test_prefetch_reads_a_quarter_ahead_and_no_more(two: TierNode) -> None:
    numbers = range(two.capacity)
    cold(two, numbers)
    hashes = [key(n) for n in numbers]
    status, moves = two.moves.prefetch(two.handle, "", hashes, two.now)
    ahead = sum(len(move.source) for move in moves)
    assert ahead == two.arena.bytes_total // 4 // 4096 and status.count(BlockStatus.IN_FLIGHT) == ahead
    assert status.count(BlockStatus.NO_ROOM) == len(hashes) - ahead
    status, more = two.moves.prefetch(two.handle, "", hashes, two.now)
    assert not more and status.count(BlockStatus.IN_FLIGHT) == ahead
    for move in moves:
        two.finish(move)
    status, more = two.moves.prefetch(two.handle, "", hashes, two.now)
    assert status.count(BlockStatus.LOADED) == ahead and more
    for move in more:
        two.finish(move)


def test_a_reader_makes_a_prefetch_its_own(two: TierNode) -> None:
    cold(two, range(4))
    _, moves = two.moves.prefetch(two.handle, "", [key(n) for n in range(4)], two.now)
    read = two.begin_read(range(4))
    assert read is not None and read.waits == moves and not read.moves and not two.moves.ahead_bytes
    two.finish(moves[0])
    two.moves.end_read(read)


# ---------------------------------------------------------------------- the daily budget


def test_when_the_budget_is_short_only_what_was_used_again_is_written(make: Make) -> None:
    two = make(daily_writes=24 * 32 * 8192)  # 32 slots an hour; the bucket begins half full
    two.store(range(8))
    two.store(range(20, 28))
    assert len(two.demote(4 * 4096)) == 4, "ample at first"
    two.acquire([20, 21])
    assert set(two.demote()) == {key(20), key(21)}
    assert two.demote() == []
    two.now += 3600
    assert len(two.demote()) == 10


def test_a_spent_budget_writes_nothing(make: Make) -> None:
    two = make(daily_writes=24 * 4 * 8192)
    two.store(range(8))
    two.acquire(range(8))
    assert len(two.demote()) == 8, "the last batch may overdraw"
    two.store(range(20, 24))
    two.acquire(range(20, 24))
    assert two.demote() == []
    shelf = two.state.inventory.shelves[two.handle, ""]
    assert two.moves.write_through([shelf.blocks[key(20)]], two.now) is None
    two.now += 2 * 3600
    assert len(two.demote()) == 4


# ---------------------------------------------------------------------- a restart


def test_a_restart_finds_what_was_flushed(make: Make) -> None:
    two = make()
    two.store(range(10), 3, salt="a")
    two.demote(1 << 20)
    two.store_.record([two_removal(two, [4], "a")])
    again = make(store=MemoryStore(8, two.store_.disk))
    found = recover(again.store_, again.state, again.now)
    again.check()
    assert (found.blocks, found.stale) == (9, 0)
    assert again.on_ssd(range(10), "a") == [n for n in range(10) if n != 4]
    blocks = again.read(range(10), "a")
    assert len(blocks) == 9 and all(holds(block, 3) for block in blocks)
    again.store([4], 5, salt="a")
    assert len(again.demote()) == 1, "its slot is free, its generation new"


def test_a_restart_respects_weight_epochs(make: Make) -> None:
    two = make()
    two.store(range(4))
    two.demote()
    two.state.set_epoch("model", 1, two.now)
    two.store(range(10, 14), epoch=1)
    two.demote()
    behind = make(store=MemoryStore(8, two.store_.disk))
    found = recover(behind.store_, behind.state, behind.now)
    assert behind.on_ssd(range(20)) == [10, 11, 12, 13] and found.stale == 4
    assert behind.state.open_namespace(behind.namespace)[1] == 1, "a node that lost its policies file learns its epoch"
    ahead = make(store=MemoryStore(8, two.store_.disk))
    ahead.state.set_epoch("model", 2, ahead.now)
    assert recover(ahead.store_, ahead.state, ahead.now).blocks == 0
    assert ahead.ssd.arena.bytes_used == 0


def test_survivors_above_a_share_drain(make: Make) -> None:
    two = make()
    two.store(range(8))
    two.demote()
    again = make(store=MemoryStore(8, two.store_.disk))
    again.share("", ssd=3 * 8192)
    recover(again.store_, again.state, again.now)
    assert len(again.on_ssd(range(8))) == 8, "nothing is lost at once"
    while again.ssd.drain(8192):
        again.check()
    assert len(again.on_ssd(range(8))) == 3


# ---------------------------------------------------------------------- support


def cold(two: TierNode, numbers: range, version: int = 0, salt: str = "") -> None:
    """On SSD, and no longer in DRAM."""
    two.store(numbers, version, salt=salt)
    while two.demote():
        pass
    assert two.on_ssd(numbers, salt) == list(numbers)
    two.make_room(numbers, salt)


def two_removal(two: TierNode, numbers: list[int], salt: str) -> Removal:
    return Removal(1 << 40, two.namespace, keys(numbers), salt=salt)


def _take_away(two: TierNode, how: str) -> None:
    if how == "remove":
        two.remove(range(4))
    elif how == "bump":
        two.state.set_epoch("model", 1, two.now)
    else:
        two.state.drop("model", None, two.now)


def _changes(two: TierNode) -> list[tuple[bytes, Departure]]:
    changes: list[tuple[bytes, Departure]] = []
    two.state.deltas.close_batch()
    for batch in two.state.deltas.after(0) or []:
        for run in batch.runs:
            changes.extend((run.hashes[start : start + 16], run.why) for start in range(0, len(run.hashes), 16))
    return changes
