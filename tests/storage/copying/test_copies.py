"""Copies between real nodes: every way, every ending, and nothing held afterwards."""

from __future__ import annotations

import threading
import time

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, CopyReason, Departure, Tier
from kvstrata.proto.wire import Kind
from kvstrata.storage.copying import intake
from kvstrata.storage.copying.book import WAITING_MAX
from kvstrata.storage.copying.copier import COPIERS
from kvstrata.storage.eviction.orders import HINTED
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity, boot_id
from tests.storage.conftest import key
from tests.storage.copying.nodes import BLOCK_BYTES, MIB, NAMESPACE, CopyNode, MakeNode
from tests.waiting import until

STORED, PRESENT, LOADED, MISSING = 1, 2, 3, 20


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks a piece, so that much can happen between two."""
    monkeypatch.setattr(intake, "PIECE_BYTES", 4 * BLOCK_BYTES)


def hold_pieces(
    node: StorageNode, monkeypatch: pytest.MonkeyPatch, after: int
) -> tuple[threading.Event, threading.Event]:
    """(reached, go on): the copier of a node waits before the piece that follows so many."""
    reached, go_on = threading.Event(), threading.Event()
    fetch, done = node.copier._fetch, [0]

    def held(*args: object) -> None:
        if done[0] == after:
            reached.set()
            assert go_on.wait(10)
        done[0] += 1
        fetch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(node.copier, "_fetch", held)
    return reached, go_on


def uses(node: CopyNode) -> list[tuple[int, int]]:
    blocks = [node.block(number) for number in range(8)]
    return [(block.stamp, block.hits) for block in blocks if block is not None]


def test_a_chain_is_copied_from_memory_to_memory(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(40), "t")
    assert target.copy(source, range(42), salt="t") == [STORED] * 40 + [MISSING] * 2
    assert target.load(range(40), "t") == [LOADED] * 40
    for number in range(40):
        block, original = target.block(number, salt="t"), source.block(number, salt="t")
        assert block is not None and original is not None
        assert (block.index, block.before, block.checksum) == (number, original.before, original.checksum)
        assert block.before == (key(number - 1) if number else b"")
    assert target.copy(source, range(40), salt="t") == [PRESENT] * 40
    counts = target.node.state.copies.counts
    assert (counts.taken, counts.taken_bytes, counts.present, counts.missing) == (40, 40 * BLOCK_BYTES, 40, 2)
    assert source.node.state.copies.counts.given_bytes == 40 * BLOCK_BYTES


def test_the_source_forgets_that_it_was_asked(make: MakeNode) -> None:
    """Nothing becomes more recent or counts as a hit."""
    source, target = make(), make()
    source.store(range(8))
    before = uses(source)
    counts = source.node.state.counts
    asked, hits, out = counts.blocks_asked, counts.hits, counts.bytes_out
    target.copy(source, range(8))
    assert uses(source) == before
    assert (counts.blocks_asked, counts.hits, counts.bytes_out) == (asked, hits, out)


def test_blocks_on_ssd_are_copied_to_ssd_past_memory_on_both_sides(make: MakeNode) -> None:
    source, target = make(ssd=16 * MIB), make(ssd=16 * MIB)
    source.store(range(20))
    source.to_ssd(range(20))
    target.store(range(100, 120))
    used = target.node.arena.bytes_used
    assert target.copy(source, range(20), tier=Tier.SSD) == [STORED] * 20
    assert source.present(range(20)) == [], "the source read them past its memory"
    assert target.present(range(20)) == [] and target.node.arena.bytes_used == used
    assert target.present(range(20), Tier.SSD) == list(range(20))
    assert target.load(range(20)) == [LOADED] * 20
    assert source.node.state.copies.counts.given_from_ssd == 20


def test_what_was_copied_to_ssd_is_there_after_a_restart(make: MakeNode) -> None:
    source, target = make(), make(ssd=16 * MIB)
    source.store(range(10))
    assert target.copy(source, range(10), tier=Tier.SSD) == [STORED] * 10
    target.stop()
    again = StorageNode(target.node.config)
    again.start()
    try:
        entry = again.state.known.find(NAMESPACE)
        assert entry is not None and again.state.ssd is not None
        blocks = again.state.ssd.shelves[entry.handle, ""].blocks
        assert {block.index: block.before for block in blocks.values()} == {
            number: key(number - 1) if number else b"" for number in range(10)
        }
    finally:
        again.stop()


def test_a_copy_for_ssd_goes_to_memory_where_there_is_none(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(4))
    assert target.copy(source, range(4), tier=Tier.SSD) == [STORED] * 4
    assert target.present(range(4)) == [0, 1, 2, 3]


def test_a_source_on_this_host_is_reached_by_its_unix_socket(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(4))
    path = str(source.node.unix_path)
    # By this address alone: the other leads nowhere.
    status = target.copy(source, range(4), unix_path=path, boot_id=boot_id(), channel="127.0.0.1:1")
    assert status == [STORED] * 4


def test_bytes_that_change_on_the_way_are_never_published(make: MakeNode) -> None:
    source, target = make(ssd=16 * MIB), make(ssd=16 * MIB)
    source.store(range(6))

    def turn_bits(view: memoryview) -> None:
        if bytes(view[:16]) == bytes(source_bytes[2][:16]):
            view[7] ^= 1

    source_bytes = [b.bytes() for n in range(6) if (b := source.block(n)) is not None]
    target.node.copier.tamper = turn_bits
    for tier in (Tier.DRAM, Tier.SSD):
        expected = [STORED] * 6
        expected[2] = BlockStatus.CORRUPT
        if tier == Tier.SSD:
            expected = [PRESENT, PRESENT, BlockStatus.CORRUPT, PRESENT, PRESENT, PRESENT]
        assert target.copy(source, range(6), tier=tier) == expected
    assert target.present(range(6)) == [0, 1, 3, 4, 5]
    assert target.node.state.copies.counts.corrupt == 2
    target.node.copier.tamper = None
    assert target.copy(source, range(6)) == [PRESENT, PRESENT, STORED, PRESENT, PRESENT, PRESENT]


@pytest.mark.usefixtures("small_pieces")
def test_what_is_removed_while_it_waits_is_not_taken_though_the_source_has_it(
    make: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(), make()
    source.store(range(16))
    reached, go_on = hold_pieces(target.node, monkeypatch, after=2)
    command = target.order(source, range(16))
    assert reached.wait(5)
    with target.node.lock:
        target.node.state.remove(NAMESPACE, "", key(1) + key(9) + key(15), time.monotonic())
    go_on.set()
    aborted = [n for n, s in enumerate(target.answer(command).status) if s == BlockStatus.ABORTED]
    assert aborted == [9, 15] and 1 not in target.present(range(16))
    assert target.present(range(16)) == [n for n in range(16) if n not in (1, 9, 15)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("what", ["epoch", "drop tenant", "drop all"])
def test_scopes_that_go_take_copies_with_them(make: MakeNode, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    source, target = make(), make()
    source.store(range(16), "t")
    reached, go_on = hold_pieces(target.node, monkeypatch, after=2)
    command = target.order(source, range(16), salt="t")
    assert reached.wait(5)
    with target.node.lock:
        if what == "epoch":
            target.node.state.set_epoch("model", 1, time.monotonic())
        else:
            target.node.state.drop("", "t" if what == "drop tenant" else None, time.monotonic())
    go_on.set()
    status = list(target.answer(command).status)
    assert status[:8] == [STORED] * 8 and status[8:] == [BlockStatus.ABORTED] * 8
    assert target.present(range(16), salt="t") == []


def test_an_order_of_other_weights_is_refused(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(2))
    assert target.copy(source, range(2), epoch=3) == [BlockStatus.ABORTED] * 2
    with source.node.lock:
        source.node.state.set_epoch("model", 1, time.monotonic())
    assert target.copy(source, range(2)) == [MISSING] * 2, "the source has none of these weights"


def test_a_tenants_share_bounds_its_copies(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(20), "t")
    with target.node.lock:
        slot = 53_248
        target.node.state.quotas.apply([NodeShare("t", 5 * slot, None)], [], False, None, 0.0, time.monotonic())
    status = target.copy(source, range(20), salt="t")
    assert status == [STORED] * 5 + [BlockStatus.QUOTA] * 15
    assert target.node.state.copies.counts.no_room == 15


def test_copies_do_not_push_out_what_is_warmer(make: MakeNode) -> None:
    """A node full of what was used a moment ago takes no copies of what was used before that."""
    source, target = make(), make(dram=2 * MIB)
    source.store(range(10))
    time.sleep(2.1)  # ages are coarse: these are older than all that follows
    target.store(range(100, 100 + 38))
    full = target.present(range(100, 138))
    status = target.copy(source, range(10))
    free = status.count(STORED)
    assert status == [STORED] * free + [BlockStatus.FULL] * (10 - free) and free < 10
    assert target.present(range(100, 138)) == full


def test_a_hot_copy_is_the_first_to_leave_until_somebody_reads_it(make: MakeNode) -> None:
    source, target = make(), make(dram=2 * MIB)
    source.store(range(4))
    target.store(range(100, 110))
    assert target.copy(source, range(4), reason=CopyReason.HOT) == [STORED] * 4
    copies = [target.block(number) for number in range(4)]
    assert all(each is not None and (each.stamp, each.hinted) == (HINTED, Departure.SURPLUS) for each in copies)
    target.load(range(2))
    target.store(range(200, 220))
    filled = len(target.present(range(200, 220)))
    assert filled == 20 and target.present(range(4)) in ([0, 1, 2, 3], [0, 1])
    target.store(range(300, 306))
    assert target.present(range(4)) == [0, 1], "what was read is like any other block"


def test_the_same_order_twice_is_carried_out_once(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(), make()
    source.store(range(8))
    reached, go_on = hold_pieces(target.node, monkeypatch, after=0)
    command = target.order(source, range(8))
    assert reached.wait(5)
    target.order(source, range(8), command=command)
    go_on.set()
    assert list(target.answer(command).status) == [STORED] * 8
    target.order(source, range(8), command=command)  # an answer that was lost is given again
    until(lambda: len(target.answers) == 2)
    assert target.answers[0] == target.answers[1]
    assert target.node.state.copies.counts.taken == 8


def test_orders_that_make_no_sense_are_answered(make: MakeNode) -> None:
    source, target = make(), make()
    message = source.ref
    message.command, message.reason = 77, 1
    message.spec.CopyFrom(NAMESPACE.to_spec())
    for hashes, tier in ((b"", 0), (b"short", 0), (key(1), 9)):
        message.hashes, message.tier = hashes, tier
        target.node.copier.take(message, 1, target.answers.append)
    assert [bool(done.error) for done in target.answers] == [True] * 3
    assert target.node.state.copies.counts.orders_refused == 3


def test_blocks_that_cannot_be_held_are_refused(make: MakeNode) -> None:
    source, target = make(), make(dram=8 * MIB)
    large = Namespace("large", 2 * MIB, 16)
    status = target.copy(source, range(1), namespace=large)
    assert status == [BlockStatus.REFUSED]


def test_only_nodes_are_sent_copies(make: MakeNode) -> None:
    source = make()
    connection = Connection.open(source.node.channel, Identity.new(), silence_s=2.0)
    with pytest.raises(InvalidArgument, match="for nodes"):
        connection.call(Kind.ACQUIRE, pb.Acquire(ns=1, mode=3, deadline_ms=1000).SerializeToString())
    connection.close()


def test_a_source_that_was_restarted_is_not_asked(make: MakeNode) -> None:
    source, target = make(), make()
    source.store(range(3))
    done = target.answer(target.order(source, range(3), incarnation=12345))
    assert list(done.status) == [BlockStatus.NODE_LOST] * 3 and not done.error, "an error is for all of an order"


def test_a_damaged_block_on_the_sources_ssd_is_found_out_there(make: MakeNode) -> None:
    source, target = make(ssd=16 * MIB), make()
    source.store(range(4))
    source.to_ssd(range(4))
    block = source.block(2, Tier.SSD)
    assert block is not None
    with source.node.lock:
        block.checksum ^= 1
    assert target.copy(source, range(4)) == [STORED, STORED, BlockStatus.CORRUPT, STORED]
    assert source.present(range(4), Tier.SSD) == [0, 1, 3]


@pytest.mark.usefixtures("small_pieces")
def test_a_stop_ends_copies_at_once(make: MakeNode) -> None:
    source, target = make(), make(copy_bandwidth=100_000)
    source.store(range(30))
    first, second = target.order(source, range(20)), target.order(source, range(20, 30))
    until(lambda: target.node.state.copies.counts.taken_bytes > 0)
    begun = time.monotonic()
    target.node.copier.stop()
    assert time.monotonic() - begun < 2.0
    for command in (first, second):
        assert BlockStatus.ABORTED in target.answer(command).status
    assert target.copy(source, range(2)) == [BlockStatus.ABORTED] * 2


@pytest.mark.usefixtures("small_pieces")
def test_the_deadline_of_an_order_holds(make: MakeNode) -> None:
    source, target = make(), make(copy_bandwidth=100_000)
    source.store(range(30))
    status = target.copy(source, range(30), deadline_ms=800)
    assert STORED in status and status[-1] == BlockStatus.LATE


def test_bandwidth_bounds_source_and_target(make: MakeNode) -> None:
    for slow in ({"source": 1_000_000}, {"target": 1_000_000}):
        source, target = make(copy_bandwidth=slow.get("source", 0)), make(copy_bandwidth=slow.get("target", 0))
        source.store(range(30))
        begun = time.monotonic()
        for start in range(0, 30, 6):
            assert target.copy(source, range(start, start + 6)) == [STORED] * 6
        took = time.monotonic() - begun
        assert took > (30 * BLOCK_BYTES - 250_000) / 1_000_000 - 0.35, "faster than the bound"


def test_too_many_orders_are_refused(make: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = make(), make()
    source.store(range(1))
    _, go_on = hold_pieces(target.node, monkeypatch, after=0)
    commands = [target.order(source, range(1)) for _ in range(300)]
    refused = {done.command for done in target.answers if "busy" in done.error}
    assert set(commands[WAITING_MAX + COPIERS :]) <= refused <= set(commands[WAITING_MAX:])
    go_on.set()
    until(lambda: len(target.answers) == 300)
    assert all(done.status for done in target.answers if done.command not in refused)


def test_surplus_replicas_leave_when_their_readers_are_done(make: MakeNode) -> None:
    node = make(ssd=16 * MIB)
    node.store(range(6))
    until(lambda: node.present(range(6), Tier.SSD) == list(range(6)))
    state, lock = node.node.state, node.node.lock
    with lock:
        entry = state.known.find(NAMESPACE)
        assert entry is not None
        got = state.acquire(b"r" * 16, entry.handle, "", key(1), 5.0, time.monotonic())
        assert state.let_go(NAMESPACE, "", key(1) + key(2) + key(50), 1, time.monotonic()) == 0, "other weights"
        assert state.let_go(NAMESPACE, "", key(1) + key(2) + key(50), 0, time.monotonic()) == 4, "both tiers"
        state.check()
        assert got.blocks[0].shelf.blocks.get(key(1)) is None and got.blocks[0].leases == 1
        assert got.lease is not None
        state.release(b"r" * 16, [got.lease.id])
        state.check()
    assert node.present(range(6)) == [0, 3, 4, 5] == node.present(range(6), Tier.SSD)
