"""Orders of masters: new weights, drops and removals, in memory at once, confirmed when they last."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Tier
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.masters.commands import ORDER_S, RETRY_S
from kvstrata.storage.masters.policies import PolicyFile

from .conftest import fill, holds, key
from .ordered_node import OrderedNode

ABORTED, MISSING, PRESENT = int(BlockStatus.ABORTED), int(BlockStatus.MISSING), int(BlockStatus.ALREADY_PRESENT)
OTHER = b"o" * 16


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., OrderedNode]]:
    made: list[OrderedNode] = []

    def build(**how: object) -> OrderedNode:
        made.append(OrderedNode(tmp_path, **how))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture
def node(make: Callable[..., OrderedNode]) -> OrderedNode:
    return make()


# ---------------------------------------------------------------- weight epochs


def test_nobody_finds_older_weights_from_the_moment_of_the_order(node: OrderedNode) -> None:
    node.store(range(8))
    node.demote()
    assert node.on_ssd(range(8)) == list(range(8))
    lease = node.acquire(range(3)).lease
    generations = [block.slab.generations[block.slot] for block in lease.blocks]
    node.bump(4)
    assert list(node.acquire(range(8)).status) == [MISSING] * 8, "of the old epoch"
    assert node.found(range(8)) == [], "of the new one"
    assert [block.slab.generations[block.slot] for block in lease.blocks] != generations, "a reader sees it"
    assert all(holds(block, 0) for block in lease.blocks), "and its bytes stand until it lets go"
    with pytest.raises(FingerprintMismatch, match="epoch"):
        node.reserve([1])
    assert node.store([1, 99], version=7) == [1, 1]
    assert node.found(range(100)) == [1, 99]
    assert node.state.counts.misses_epoch == 8
    node.state.release(node.SESSION, [lease.id])
    node.state.expire(node.now)
    assert node.arena.bytes_used == 2 * 4096 and node.ssd.arena.bytes_used == 0, "all room is back"
    assert "weights changed" in [verb for _, verb in node.state.story(node.namespace, "", key(5))]
    assert "weights changed (SSD)" in [verb for _, verb in node.state.story(node.namespace, "", key(5))]


def test_other_groups_keep_theirs(node: OrderedNode) -> None:
    node.store(range(4))
    node.bump(2, group="another model")
    assert node.found(range(4)) == [0, 1, 2, 3]
    late = node.state.open_namespace(Namespace("another model", 4096, 16))
    assert late[1] == 2, "also one that is opened later"


def test_what_is_being_written_ends_aborted(node: OrderedNode) -> None:
    reserved = node.reserve([1]).reservation
    moving = node.reserve([2], session=OTHER).reservation
    assert reserved is not None and moving is not None
    node.state.start_moving(moving)
    node.bump(1)
    node.state.expire(node.now)
    for block in moving.blocks:
        fill(block, 0)
    node.state.moved(moving, node.now)
    assert list(node.state.commit(node.SESSION, reserved.id, [0], None, node.now)) == [ABORTED]
    assert list(node.state.commit(OTHER, moving.id, [0], None, node.now)) == [ABORTED]
    assert node.found([1, 2]) == [] and node.arena.bytes_used == 0


def test_moves_under_way_publish_nothing(node: OrderedNode) -> None:
    node.store(range(4))
    down = node.moves.demotions(1 << 20, node.now, everything=True)
    assert down is not None
    node.bump(1)
    assert node.finish(down) == [False] * 4
    node.store(range(4), version=1)
    node.demote()
    node.make_room(range(4))
    read = node.begin_read(range(4))
    assert read is not None and read.moves
    node.bump(2)
    for move in read.moves:
        node.finish(move)
    node.moves.end_read(read)
    assert node.found(range(4)) == [] and node.on_ssd(range(4)) == []


def test_a_bump_is_confirmed_when_reads_that_had_begun_are_over(node: OrderedNode) -> None:
    node.store(range(4))
    sending = node.acquire([0, 1], seconds=0.0).lease
    number = node.bump(1)
    assert node.turn() == [] and node.turn() == []
    node.store([0], version=1)
    new = node.state.acquire(node.SESSION, node.handle, "", key(0), 0.0, node.now, 1)
    assert new.lease is not None, "a read of new weights holds nothing up"
    node.state.end(sending)
    assert node.turn() == [(number, "")]
    node.state.end(new.lease)


def test_a_read_that_does_not_end_makes_the_order_fail_in_time(node: OrderedNode) -> None:
    node.store(range(4))
    sending = node.acquire([0, 1], seconds=0.0).lease
    number = node.bump(1)
    assert node.turn() == []
    node.now += ORDER_S
    ((command, error),) = node.turn()
    assert command == number and "still being sent" in error
    node.state.end(sending)
    again = node.bump(1)
    assert node.turn() == [(again, "")], "told again, it is known, and over"


def test_a_bump_outlives_the_process(node: OrderedNode, tmp_path: Path) -> None:
    node.store(range(4))
    node.demote()
    number = node.bump(3)
    assert node.turn() == [(number, "")]
    node.store([1], version=9)
    node.demote()
    other = node.after_crash(tmp_path)
    assert other.epoch == 3 and other.found(range(4)) == [1]
    with pytest.raises(FingerprintMismatch):
        other.reserve([2])
    other.close()


def test_a_confirmation_waits_for_the_file(node: OrderedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    first, second = node.bump(1), node.order_removal([1])
    assert node.turn() == [(second, "")], "a removal needs no file"
    assert "no space" in node.commands.problem()
    monkeypatch.setattr(os, "fsync", real)
    assert node.turn() == [], "not tried again at once"
    node.now += RETRY_S
    assert node.turn() == [(first, "")] and node.commands.problem() == ""


def test_a_device_that_records_nothing_makes_orders_fail(node: OrderedNode) -> None:
    node.disk_store.refuses = True
    numbers = [node.bump(1), node.drop(salt="a"), node.order_removal([1])]
    assert node.turn() == []
    node.now += ORDER_S / 2
    assert node.turn() == []
    node.now += ORDER_S / 2
    failed = node.turn()
    assert [command for command, _ in failed] == numbers and all("did not record" in error for _, error in failed)
    node.disk_store.refuses = False
    again = node.order_removal([1])
    assert node.turn() == [(again, "")]


# ---------------------------------------------------------------- drops


def test_a_drop_takes_its_scope_and_nothing_else(node: OrderedNode, tmp_path: Path) -> None:
    for salt in ("a", "b"):
        node.store(range(4), salt=salt)
        node.demote()
    number = node.drop(salt="a")
    assert node.found(range(4), "a") == [] and node.found(range(4), "b") == [0, 1, 2, 3]
    assert node.turn() == [(number, "")]
    node.store([2], salt="a", version=5)
    node.demote()
    other = node.after_crash(tmp_path)
    assert other.found(range(4), "a") == [2], "stored after it"
    assert other.found(range(4), "b") == [0, 1, 2, 3]
    everything = other.drop()
    assert other.turn() == [(everything, "")] and other.found(range(4), "b") == []
    third = other.after_crash(tmp_path)
    assert third.found(range(4), "a") == third.found(range(4), "b") == []
    third.close()
    other.close()


def test_the_empty_salt_is_a_tenant(node: OrderedNode) -> None:
    node.store(range(2))
    node.store(range(2), salt="a")
    node.drop(salt="")
    assert node.found(range(2)) == [] and node.found(range(2), "a") == [0, 1]
    node.drop(group="another model")
    assert node.found(range(2), "a") == [0, 1]
    node.drop(group="model")
    assert node.found(range(2), "a") == []


def test_what_is_dropped_and_erased_is_overwritten_before_it_is_confirmed(node: OrderedNode) -> None:
    disk = node.disk_store.disk
    node.store(range(6), salt="a")
    node.store(range(4), salt="b")
    node.demote()
    node.make_room(range(6), "a")
    reader = node.begin_read([0, 1], "a")  # holds two slots on SSD
    node.store(range(10, 14), salt="a")
    writer = node.moves.demotions(1 << 20, node.now, everything=True)  # is about to write into others
    assert reader is not None and writer is not None

    def left() -> int:
        return sum(header.salt == "a" for _, header, _ in disk.slots.values())

    assert left() == 6
    number = node.drop(salt="a", erase=True)
    assert node.turn() == [] and left() == 2, "those that are read stay until they are"
    used = node.ssd.arena.bytes_used
    assert node.turn() == [] and node.ssd.arena.bytes_used == used
    node.finish(writer)
    assert any(header.hash == key(10) for _, header, _ in disk.slots.values()), "it did write"
    for move in reader.moves:
        node.finish(move)
    node.moves.end_read(reader)
    assert node.turn() == [(number, "")] and left() == 0
    node.state.expire(node.now)
    assert node.ssd.policy.charges.keys() <= {"", "b"}
    assert node.found(range(4), "b") == [0, 1, 2, 3]


def test_slots_are_not_used_again_before_they_are_overwritten(node: OrderedNode) -> None:
    node.store(range(6), salt="a")
    node.demote()
    before = {(block.slab.index, block.slot) for block in node.ssd.blocks()}
    node.disk_store.refuses = True
    number = node.drop(salt="a", erase=True)
    for _ in range(3):
        node.now += RETRY_S
        node.state.expire(node.now)
        assert node.turn() == []
    node.store(range(6), salt="b")
    node.demote()
    fresh = {(block.slab.index, block.slot) for block in node.ssd.blocks() if block.shelf.salt == "b"}
    assert len(fresh) == 6 and not fresh & before
    assert node.ssd.policy.charges["a"] == 6 * 8192
    node.disk_store.refuses = False
    node.now += RETRY_S
    assert node.turn() == [(number, "")]
    assert "a" not in node.ssd.policy.charges


def test_an_erasure_that_fails_is_told_again_and_tried_on(node: OrderedNode) -> None:
    node.store(range(3), salt="a")
    node.demote()
    number = node.drop(salt="a", erase=True)
    store = node.disk_store
    store.erase = lambda places: False  # type: ignore[method-assign]
    assert node.turn() == []
    node.now += ORDER_S
    ((command, error),) = node.turn()
    assert command == number and "3 slots" in error
    again = node.drop(salt="a", erase=True)
    assert node.turn() == [], "what is left of the first is the second's business"
    del store.erase  # type: ignore[attr-defined]
    node.now += RETRY_S
    assert node.turn() == [(again, "")]
    assert not store.disk.slots


def test_quarantined_slots_are_overwritten_too(node: OrderedNode) -> None:
    node.store(range(3), salt="a")
    node.demote()
    node.make_room(range(3), "a")
    node.disk_store.fails[key(1)] = BlockStatus.CORRUPT
    assert len(node.read(range(3), "a")) == 2
    assert len(node.moves.quarantine) == 1
    number = node.drop(salt="a", erase=True)
    assert node.turn() == [(number, "")]
    assert not node.disk_store.disk.slots or all(h.salt != "a" for _, h, _ in node.disk_store.disk.slots.values())


# ---------------------------------------------------------------- removals


def test_a_removal_reaches_both_tiers_and_outlives_the_process(node: OrderedNode, tmp_path: Path) -> None:
    node.store(range(4))
    node.demote()
    number = node.order_removal([1, 2])
    assert node.found(range(4)) == [0, 3]
    assert node.state.counts.removed == 2, "one in both tiers counts once"
    assert node.turn() == [(number, "")]
    node.store([2], version=2)
    node.demote()
    other = node.after_crash(tmp_path)
    assert other.found(range(4)) == [0, 2, 3]
    other.close()


def test_a_stale_header_of_a_removed_block_stays_dead(node: OrderedNode, tmp_path: Path) -> None:
    """It had left the SSD before it was removed: nothing overwrote its slot."""
    node.store([1])
    node.demote()
    ssd = node.ssd
    (block,) = ssd.blocks()
    ssd.withdraw(block, "evicted")
    node.order_removal([1])
    node.turn()
    assert len(node.disk_store.disk.slots) == 1
    other = node.after_crash(tmp_path)
    assert other.found([1]) == []
    other.close()


def test_resurrection(node: OrderedNode, tmp_path: Path) -> None:
    """Queued for the SSD; removed; stored anew; the queue runs: the new one, and no old one anywhere."""
    node.store([1])
    queued = node.moves.demotions(1 << 20, node.now, everything=True)
    assert queued is not None
    node.order_removal([1])
    assert node.store([1], version=2) == [1]
    assert node.finish(queued) == [False]
    node.turn()
    (block,) = node.read([1])
    assert holds(block, 2) and node.on_ssd([1]) == []
    other = node.after_crash(tmp_path)
    assert other.found([1]) == []
    other.close()


def test_nonsense_is_answered_with_what_is_wrong(node: OrderedNode) -> None:
    node.commands.remove(control.RemoveCommand(command=1), node.done.append)
    node.commands.remove(
        control.RemoveCommand(command=2, spec=node.namespace.to_spec(), hashes=b"odd"), node.done.append
    )
    assert [done.command for done in node.done] == [1, 2] and all(done.error for done in node.done)


# ---------------------------------------------------------------- present on SSD


def test_what_is_on_ssd_only_is_present_for_writers(node: OrderedNode) -> None:
    node.store(range(4))
    node.demote()
    node.make_room(range(4))
    before = {block.hash: block.stamp for block in node.ssd.blocks()}
    got = node.reserve([0, 1, 0, 9], parent=key(2))
    assert list(got.status) == [PRESENT, PRESENT, PRESENT, int(BlockStatus.RESERVED)]
    after = {block.hash: block.stamp for block in node.ssd.blocks()}
    assert {hash for hash in before if before[hash] != after[hash]} == {key(0), key(1), key(2)}, "they were used"
    node.check()


# ---------------------------------------------------------------- shares


def share(salt: str, dram: int | None, **more: int) -> control.Share:
    return control.Share(salt=salt, dram_limit=dram, **more)


def test_shares_are_reported_once_a_restart_would_find_them(
    node: OrderedNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.commands.share(control.Shares(revision=5, whole=True, shares=[share("a", 4 * 4096)], ttl_ms=3000))
    assert node.commands.kept_revision == 0
    assert len([s for s in node.store(range(6), salt="a") if s == 1]) == 4, "they hold at once"
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        node.turn()
        assert node.commands.kept_revision == 0 and "broken" in node.commands.problem()
    node.now += RETRY_S
    node.turn()
    assert node.commands.kept_revision == 5 and node.commands.problem() == ""
    assert PolicyFile(tmp_path).restored()[0].shares() == [NodeShare("a", 4 * 4096)]


def test_shares_lapse_without_the_master_and_stand_with_it(node: OrderedNode) -> None:
    node.commands.share(control.Shares(revision=1, whole=True, shares=[share("a", 8 * 4096)], ttl_ms=3000))
    node.store(range(2), salt="a")
    node.now += 2.9
    node.commands.heard()
    node.now += 2.9
    node.store(range(2, 4), salt="a")
    assert node.present(range(4), "a") == [0, 1, 2, 3]
    node.now += 0.2
    node.store(range(4, 6), salt="a")
    assert node.present(range(6), "a") == [2, 3, 4, 5], "only in place of its own"
    assert node.state.quotas.limit(Tier.DRAM, "a", node.now) == 8 * 4096


def test_impossible_shares_are_refused_whole_and_seen_in_health(node: OrderedNode) -> None:
    node.commands.share(control.Shares(revision=1, whole=True, shares=[share("a", 4096)]))
    node.turn()
    bad = control.Shares(revision=2, whole=True, shares=[share("b", 1, dram_floor=2)])
    node.commands.share(bad)
    node.turn()
    assert node.commands.kept_revision == 1 and "revision 2" in node.commands.problem()
    assert [each.salt for each in node.state.quotas.shares()] == ["a"]
    node.commands.share(control.Shares(revision=3, whole=True))
    node.turn()
    assert node.commands.kept_revision == 3 and node.commands.problem() == ""


def test_a_lowered_share_drains_tick_by_tick(node: OrderedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.storage.state.DRAIN_BYTES", 2 * 4096)
    node.store(range(10), salt="a")
    node.commands.share(control.Shares(revision=1, whole=True, shares=[share("a", 4 * 4096)]))
    used = []
    for _ in range(5):
        node.state.expire(node.now)
        used.append(node.state.inventory.policy.charges["a"] // 4096)
    assert used == [8, 6, 4, 4, 4]
