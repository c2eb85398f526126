"""A node looks at itself: invariants in one go and in pieces, blocks read back in both tiers, one check at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client.checking import check_node
from kvstrata.proto.errors import Busy, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Departure
from kvstrata.storage.checking import node_check, pieces
from kvstrata.storage.checking.background import BackgroundScrub
from kvstrata.storage.checking.node_check import Ask, NodeChecks
from kvstrata.storage.checking.pieces import PieceCheck
from kvstrata.storage.checking.scrub import Scrub
from kvstrata.storage.checking.scrubber import Pace, Scrubber
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.records import Block
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.base import Endpoint, Fetch, Push
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity, boot_id
from kvstrata.transfer.regions import Region
from kvstrata.transfer.tcp import TcpPeer, TcpTransport
from tests.waiting import until

from .conftest import Node, key, keys, payload
from .tier_node import TierNode

BLOCK_BYTES = 20_000
NAMESPACE = Namespace("model/c", BLOCK_BYTES, 16)


def soon() -> float:
    return time.monotonic() + 10.0


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[StorageNode]:
    """A node of two tiers in this process, written through, without a scrub of its own."""
    config = StorageConfig(
        (), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, slab_bytes=1 << 20,
        ssd=((tmp_path / "ssd", 16 << 20),), ssd_policy=SsdPolicy.WRITE_THROUGH, scrub_rate=0,
    )  # fmt: skip
    one = StorageNode(config)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def peer(tiered: StorageNode) -> Iterator[TcpPeer]:
    transport = TcpTransport(Identity.new())
    one = transport.connect(Endpoint(tiered.identity.node_id, 0, tiered.channel, "", boot_id()))
    yield one
    one.close()
    transport.close()


def store(peer: TcpPeer, numbers: range, salt: str = "") -> None:
    """All of it in both tiers; a busy machine may take a silent moment for the node's end."""
    rows = np.frombuffer(b"".join(payload(key(n), 0, BLOCK_BYTES) for n in numbers), np.uint8).copy()

    def stored() -> bool:
        peer.upkeep()
        done = peer.push(Push(NAMESPACE, salt, keys(numbers), Region(rows, None).rows(NAMESPACE), soon()))
        held = {BlockStatus.STORED, BlockStatus.ALREADY_PRESENT}
        return set(done.status.tolist()) <= held and done.durable is not None and bool(done.durable.all())

    until(stored)


def load(peer: TcpPeer, numbers: range, salt: str = "") -> list[int]:
    """Statuses of a read; whatever is loaded is right, or this raises. As patient as :func:`store`."""
    statuses = [int(BlockStatus.NODE_LOST)]

    def answered() -> bool:
        peer.upkeep()
        target = Region(np.zeros(len(numbers) * BLOCK_BYTES, np.uint8), None)
        got = peer.fetch(Fetch(NAMESPACE, salt, keys(numbers), target.rows(NAMESPACE), soon()))
        for index, number in enumerate(numbers):
            if got.status[index] == BlockStatus.LOADED:
                part = target.bytes[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                assert part.tobytes() == payload(key(number), 0, BLOCK_BYTES)
        statuses[:] = [int(status) for status in got.status]
        return not set(statuses) & {BlockStatus.NODE_LOST, BlockStatus.LATE}

    until(answered)
    return statuses


def block_of(node: StorageNode, number: int, tier: int, salt: str = "") -> Block:
    inventory = node.state.tiers()[tier]
    return next(shelf for (_, s), shelf in inventory.shelves.items() if s == salt).blocks[key(number)]


def flip_in_memory(node: StorageNode, number: int) -> None:
    block_of(node, number, 0).bytes()[BLOCK_BYTES // 2] ^= 0x10


def flip_on_ssd(node: StorageNode, tmp_path: Path, number: int) -> None:
    block = block_of(node, number, 1)
    with (tmp_path / "ssd" / "extents").open("r+b") as file:
        file.seek(block.offset + 4096 + BLOCK_BYTES // 3)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


# ---------------------------------------------------------------- bytes


def test_a_sound_node_says_so(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(40))
    told = check_node(tiered.channel, scrub=True)
    assert told["complete"] and told["bad"] == [] and told["bad_left_out"] == 0
    assert told["state"]["whole"] and told["state"]["problems"] == [] and told["state"]["blocks"] == 80
    for tier in ("dram", "ssd"):
        assert told["scrub"][tier] == {"blocks": 40, "bytes": 40 * BLOCK_BYTES, "bad": 0}
    assert told["health"]["healthy"] and told["health"]["node_id"] == tiered.identity.node_id
    assert "deadlines" in told["health"]["loop_age_seconds"]
    assert load(peer, range(40)) == [BlockStatus.LOADED] * 40


def test_without_a_scrub_no_block_is_read(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(4))
    told = check_node(tiered.channel)
    assert told["scrub"] == {} and tiered.state.counts.scrubbed == 0


def test_a_bit_turned_in_memory_is_found_and_the_copy_on_ssd_serves(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(10), "secret tenant")
    tiered_block = block_of(tiered, 3, 0, "secret tenant")
    tiered_block.bytes()[17] ^= 1
    told = check_node(tiered.channel, scrub=True)
    (bad,) = told["bad"]
    assert (bad["hash"], bad["tier"], bad["status"]) == (key(3).hex(), "dram", "corrupt")
    assert bad["group"] == NAMESPACE.group and bad["salt_digest"] and "secret" not in json.dumps(told)
    assert told["scrub"]["dram"]["bad"] == 1 and told["scrub"]["ssd"]["bad"] == 0
    assert load(peer, range(10), "secret tenant") == [BlockStatus.LOADED] * 10  # read from SSD again
    assert check_node(tiered.channel, scrub=True)["bad"] == []


def test_a_bit_turned_on_a_device_is_found_before_a_reader_needs_it(
    tiered: StorageNode, peer: TcpPeer, tmp_path: Path
) -> None:
    store(peer, range(10))
    flip_on_ssd(tiered, tmp_path, 7)
    told = check_node(tiered.channel, scrub=True)
    assert [(bad["hash"], bad["tier"], bad["status"]) for bad in told["bad"]] == [(key(7).hex(), "ssd", "corrupt")]
    assert tiered.state.counts.scrub_corrupt == 1 and tiered.state.counts.ssd_corrupt == 1
    with tiered.lock:
        assert len(tiered.ssd.moves.quarantine) == 1  # type: ignore[union-attr]
    assert load(peer, range(10)) == [BlockStatus.LOADED] * 10
    again = check_node(tiered.channel, scrub=True)
    assert again["bad"] == [] and again["scrub"]["ssd"]["blocks"] == 9


def test_a_block_bad_in_both_tiers_is_a_miss_and_its_going_is_told_as_corrupt(
    tiered: StorageNode, peer: TcpPeer, tmp_path: Path
) -> None:
    store(peer, range(3))
    with tiered.lock:
        tiered.state.deltas.close_batch()
        seen = tiered.state.deltas.open_seq - 1
    flip_in_memory(tiered, 1)
    flip_on_ssd(tiered, tmp_path, 1)
    assert len(check_node(tiered.channel, scrub=True)["bad"]) == 2
    assert load(peer, range(3)) == [BlockStatus.LOADED, BlockStatus.MISSING, BlockStatus.LOADED]
    with tiered.lock:
        tiered.state.deltas.close_batch()
        batches = tiered.state.deltas.after(seen)
    gone = [run for batch in batches or [] for run in batch.runs if not run.added]
    assert {run.why for run in gone} == {Departure.CORRUPT} and {run.tier for run in gone} == {0, 1}
    assert all(key(1) in (run.hashes if isinstance(run.hashes, bytes) else b"".join(run.hashes)) for run in gone)


def test_bounded_scrubs_cover_everything_in_the_end(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(100))
    with tiered.lock:
        where = [(block.slab.index, block.slot, block.hash) for block in tiered.state.inventory.blocks()]
    last = max(where)[2]
    flip_in_memory(tiered, next(n for n in range(100) if key(n) == last))
    part = 30 * BLOCK_BYTES
    found = []
    for _ in range(4):
        told = check_node(tiered.channel, scrub=True, scrub_bytes=part)
        assert 0 < told["scrub"]["dram"]["bytes"] <= part + BLOCK_BYTES and told["complete"]
        found += told["bad"]
    assert [bad["hash"] for bad in found] == [last.hex()]


def test_a_scrub_moves_no_block_in_the_order_of_eviction(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(5))
    with tiered.lock:
        before = {block.hash: block.stamp for block in tiered.state.inventory.blocks()}
    check_node(tiered.channel, scrub=True)
    with tiered.lock:
        assert {block.hash: block.stamp for block in tiered.state.inventory.blocks()} == before
        assert len(tiered.state.leases) == 0


def test_a_rate_and_a_deadline_bound_a_scrub(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(100))
    began = time.monotonic()
    told = check_node(tiered.channel, scrub=True, bytes_per_second=100_000, seconds=0.5)
    assert time.monotonic() - began < 5.0
    assert not told["complete"] and told["scrub"]["dram"]["bytes"] < 100 * BLOCK_BYTES
    assert len(tiered.state.leases) == 0


def test_a_pace_counts_what_was_spent() -> None:
    now = [10.0]
    pace = Pace(1000, lambda: now[0])
    assert pace.wait_s() == 0.0
    pace.spend(500)
    assert pace.wait_s() == pytest.approx(0.5)
    now[0] += 0.4
    assert pace.wait_s() == pytest.approx(0.1)
    now[0] += 10
    assert pace.wait_s() == 0.0


# ---------------------------------------------------------------- one at a time, while others work


def test_a_second_check_is_refused_and_a_stop_ends_the_first(tiered: StorageNode, peer: TcpPeer) -> None:
    store(peer, range(100))
    ends: list[object] = []

    def long() -> None:
        try:
            ends.append(check_node(tiered.channel, scrub=True, bytes_per_second=10_000, seconds=60))
        except Unavailable as error:
            ends.append(error)

    first = threading.Thread(target=long)
    first.start()
    until(lambda: tiered.state.counts.scrubbed > 0)
    with pytest.raises(Busy, match="being checked already"):
        check_node(tiered.channel)
    assert load(peer, range(100)) == [BlockStatus.LOADED] * 100  # readers do not wait for it
    began = time.monotonic()
    tiered.stop()
    assert time.monotonic() - began < 8.0
    first.join(5)
    assert not first.is_alive() and len(ends) == 1


def test_a_stop_waits_for_the_check_under_way_to_end() -> None:
    """The node's memory goes next."""
    node = Node()
    node.store(range(40))
    checks = NodeChecks(node.state, threading.Lock())
    told: list[dict[str, object]] = []
    at_work = threading.Thread(target=lambda: told.append(checks.run(Ask(scrub=True, rate=1))))
    at_work.start()
    until(lambda: node.state.counts.scrubbed > 0)
    checks.stop()
    at_work.join(1)
    assert not at_work.is_alive() and told[0]["complete"] is False
    with pytest.raises(Unavailable, match="stopping"):
        checks.run(Ask())
    node.arena.close()


def test_a_check_ends_when_its_asker_hangs_up(tiered: StorageNode, peer: TcpPeer) -> None:
    from kvstrata.proto import channel_pb2 as pb
    from kvstrata.proto.wire import Kind

    store(peer, range(100))
    asker = Connection.open(tiered.channel, Identity.new("admin"))
    ask = pb.NodeCheck(scrub=True, bytes_per_second=10_000, deadline_ms=60_000)
    asker.tell(Kind.NODE_CHECK, ask.SerializeToString())
    until(lambda: tiered.state.counts.scrubbed > 0)
    asker.close()

    def free() -> bool:
        try:
            return bool(check_node(tiered.channel)["complete"])
        except Busy:
            return False

    until(free)


def test_checks_under_load_find_nothing(tiered: StorageNode, peer: TcpPeer) -> None:
    """Stores that evict, reads and removals go on while invariants are asserted and blocks read back."""
    stop = threading.Event()
    troubles: list[BaseException] = []

    def churn() -> None:
        number = 0
        try:
            while not stop.is_set():
                numbers = range(number, number + 16)
                rows = np.frombuffer(b"".join(payload(key(n), 0, BLOCK_BYTES) for n in numbers), np.uint8).copy()
                peer.push(Push(NAMESPACE, "", keys(numbers), Region(rows, None).rows(NAMESPACE), soon()))
                load(peer, range(max(0, number - 64), number + 16))
                with tiered.lock:
                    tiered.state.remove(NAMESPACE, "", keys(range(number, number + 4)), time.monotonic())
                number += 16
        except BaseException as error:  # noqa: BLE001 - shown below
            troubles.append(error)

    worker = threading.Thread(target=churn)
    worker.start()
    try:
        until(lambda: tiered.state.counts.evicted > 0, 20)
        for whole in (True, False) * 5:
            with pytest.MonkeyPatch.context() as patch:
                if not whole:
                    patch.setattr(node_check, "WHOLE_BLOCKS", 0)
                    patch.setattr(pieces, "STEP_BLOCKS", 50)
                told = check_node(tiered.channel, scrub=True)
            assert told["state"]["problems"] == [] and told["bad"] == [] and told["complete"], told
            assert told["state"]["whole"] == whole and told["state"]["blocks"] > 0
    finally:
        stop.set()
        worker.join(20)
    assert not troubles and not worker.is_alive()


# ---------------------------------------------------------------- invariants in pieces


def _sound() -> TierNode:
    """Both tiers, chains, a lease, a reservation that is being written, a leaving block, two tenants."""
    node = TierNode()
    node.chain(range(20), 5)
    node.store(range(100, 110), salt="b")
    node.demote()
    node.acquire(range(3))
    node.acquire([105], salt="b")
    node.remove([105], salt="b")
    got = node.reserve(range(40, 44))
    assert got.reservation is not None
    node.state.start_moving(got.reservation)
    node.state.set_epoch("other", 1, node.now)
    return node


def problems_in_pieces(node: TierNode) -> list[str]:
    check = PieceCheck(node.state, node.moves)
    problems: list[str] = []
    while True:
        try:
            if not check.step():
                return problems
        except AssertionError as error:
            problems.append(str(error))


def _leak_a_lease(node: TierNode) -> None:
    node.state.inventory.shelves[node.handle, ""].blocks[key(1)].leases += 1


def _lose_a_child(node: TierNode) -> None:
    node.state.inventory.shelves[node.handle, ""].blocks[key(3)].children += 1


def _charge_too_much(node: TierNode) -> None:
    node.state.inventory.policy.charges["b"] += 64


def _count_bytes_twice(node: TierNode) -> None:
    node.state.arena.bytes_used += 4096


def _give_a_slot_away(node: TierNode) -> None:
    block = node.state.inventory.shelves[node.handle, ""].blocks[key(8)]
    block.slab.generations[block.slot] += 1


def _forget_a_writer(node: TierNode) -> None:
    node.state.reservations._reservations.clear()


def _take_from_the_shelf(node: TierNode) -> None:
    shelf = node.ssd.shelves[node.handle, ""]
    del shelf.blocks[key(5)]


def _miscount_visible(node: TierNode) -> None:
    node.ssd.visible += 1


def _miscount_pins(node: TierNode) -> None:
    node.state.inventory.shelves[node.handle, ""].blocks[key(8)].slab.pinned += 1


def _stay_at_old_weights(node: TierNode) -> None:
    node.state.inventory.shelves[node.handle, ""].epoch += 1


def _turn_a_chain_round(node: TierNode) -> None:
    node.state.inventory.shelves[node.handle, ""].blocks[key(8)].index = 0


BREAKS: list[Callable[[TierNode], None]] = [
    _leak_a_lease, _lose_a_child, _charge_too_much, _count_bytes_twice, _give_a_slot_away, _forget_a_writer,
    _take_from_the_shelf, _miscount_visible, _miscount_pins, _stay_at_old_weights, _turn_a_chain_round,
]  # fmt: skip


@pytest.mark.parametrize("step", [3, 2048])
def test_a_sound_state_is_sound_in_pieces(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(pieces, "STEP_BLOCKS", step)
    node = _sound()
    node.check()
    assert problems_in_pieces(node) == []


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("step", [3, 2048])
def test_each_broken_invariant_shows_in_pieces(
    monkeypatch: pytest.MonkeyPatch, step: int, break_it: Callable[[TierNode], None]
) -> None:
    monkeypatch.setattr(pieces, "STEP_BLOCKS", step)
    node = _sound()
    break_it(node)
    assert problems_in_pieces(node)


def test_a_broken_state_is_told_and_the_check_goes_on(running: StorageNode) -> None:
    with running.lock:
        running.state.arena.bytes_used += 64
    told = check_node(running.channel)
    assert len(told["state"]["problems"]) == 1 and "bytes counted as used" in told["state"]["problems"][0]
    with running.lock:
        running.state.arena.bytes_used -= 64
    assert check_node(running.channel)["state"]["problems"] == []


def test_pieces_hold_the_lock_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get the lock between pieces: as often as there are pieces."""
    monkeypatch.setattr(node_check, "WHOLE_BLOCKS", 0)
    monkeypatch.setattr(pieces, "STEP_BLOCKS", 2)
    node = Node()
    node.store(range(40))
    lock = _CountedLock()
    told = NodeChecks(node.state, lock).run(Ask())  # type: ignore[arg-type]
    assert told["complete"] and told["state"]["blocks"] == 40 and not told["state"]["whole"]
    assert lock.taken >= 20
    node.arena.close()


class _CountedLock:
    def __init__(self) -> None:
        self.taken = 0

    def __enter__(self) -> None:
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        pass


# ---------------------------------------------------------------- what happens between taking and judging


def test_a_block_removed_while_it_is_read_is_nobodys_business() -> None:
    node = TierNode()
    node.store(range(4))
    scrub = Scrub(node.state.inventory, node.state.leases)
    batch = scrub.take(node.now)
    assert batch is not None and len(batch.blocks) == 4
    node.remove([2])
    bad = scrub.done(batch, [BlockStatus.CORRUPT if b.hash in (key(1), key(2)) else 3 for b in batch.blocks], node.now)
    assert [each.block.hash for each in bad] == [key(1)]
    node.check()
    assert node.present(range(4)) == [0, 3] and scrub.take(node.now) is None
    node.assert_quiet()


def test_a_reader_keeps_the_slot_of_a_block_that_was_found_bad() -> None:
    node = TierNode()
    node.store(range(2))
    leased = node.acquire([0]).blocks[0]
    scrub = Scrub(node.state.inventory, node.state.leases)
    batch = scrub.take(node.now)
    assert batch is not None
    scrub.done(batch, [BlockStatus.CORRUPT] * 2, node.now)
    node.check()
    assert node.present(range(2)) == [] and leased.slab.blocks[leased.slot] is leased
    node.now += 1000
    node.state.expire(node.now)
    node.check()
    assert leased.slab.blocks.get(leased.slot) is None


def test_a_read_that_fails_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = TierNode()
    node.store(range(3))
    node.demote()
    reads = node.store_.read
    tries: list[int] = []

    def first_fails(blocks, into, *, timeout_s=5.0):  # type: ignore[no-untyped-def]
        tries.append(len(blocks))
        return [BlockStatus.READ_ERROR] * len(blocks) if len(tries) == 1 else reads(blocks, into)

    monkeypatch.setattr(node.store_, "read", first_fails)
    scrubber = Scrubber(threading.Lock(), lambda: None, node.store_, lambda: node.now)
    scrub = Scrub(node.ssd, node.moves.ssd.leases, node.moves)
    assert scrubber.one(scrub) == (3 * 4096, [])
    assert tries == [3, 1, 1, 1] and node.on_ssd(range(3)) == [0, 1, 2]
    node.store_.fails[key(1)] = BlockStatus.READ_ERROR
    got = scrubber.one(Scrub(node.ssd, node.moves.ssd.leases, node.moves))
    assert got is not None and [bad.block.hash for bad in got[1]] == [key(1)]
    assert node.on_ssd(range(3)) == [0, 2]
    node.assert_quiet()


def test_a_failed_device_is_not_the_scrubs_business() -> None:
    node = TierNode()
    node.store(range(3))
    node.demote()
    node.store_.broken.add(0)
    scrubber = Scrubber(threading.Lock(), lambda: None, node.store_, lambda: node.now)
    assert scrubber.one(Scrub(node.ssd, node.moves.ssd.leases, node.moves)) == (3 * 4096, [])
    assert node.on_ssd(range(3)) == [0, 1, 2] and node.state.counts.scrubbed == 0


def test_more_bad_blocks_than_an_answer_names_are_counted() -> None:
    node = Node(slabs=16)
    node.store(range(150))  # with a checksum that is none
    told = NodeChecks(node.state, threading.Lock()).run(Ask(scrub=True))
    assert len(told["bad"]) == node_check.BAD_MAX and told["bad_left_out"] == 50
    assert told["scrub"]["dram"]["bad"] == 150 and not node.present(range(150))
    node.state.check()
    node.arena.close()


# ---------------------------------------------------------------- in the background


def test_the_background_scrub_keeps_its_rate_and_comes_round() -> None:
    node = TierNode()
    node.store(range(30))
    node.demote()
    node.store_.fails[key(29)] = BlockStatus.CORRUPT
    now = [100.0]
    told: list[bool] = []
    scrubber = Scrubber(threading.Lock(), lambda: told.append(True), node.store_, lambda: now[0])
    scrub = BackgroundScrub(node.moves, scrubber, 1, lambda: now[0])
    scrub.turn()
    assert node.state.counts.scrubbed == 0  # no time has passed
    for _ in range(1000):
        now[0] += 1.0
        scrub.turn()
        if scrub.rounds:
            break
    assert scrub.rounds == 0 and 0 < node.state.counts.scrubbed_bytes <= 30 * 4096  # a byte a second: in debt
    fast = BackgroundScrub(node.moves, scrubber, 1 << 20, lambda: now[0])
    now[0] += 1.0
    fast.turn()
    assert fast.rounds == 1 and node.on_ssd(range(30)) == list(range(29)) and told
    node.assert_quiet()


def test_a_node_scrubs_by_itself(tmp_path: Path) -> None:
    config = StorageConfig(
        (), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, slab_bytes=1 << 20,
        ssd=((tmp_path / "ssd", 16 << 20),), ssd_policy=SsdPolicy.WRITE_THROUGH, scrub_rate=64 << 20,
    )  # fmt: skip
    node = StorageNode(config)
    node.start()
    transport = TcpTransport(Identity.new())
    one = transport.connect(Endpoint(node.identity.node_id, 0, node.channel, "", boot_id()))
    try:
        store(one, range(10))
        flip_on_ssd(node, tmp_path, 4)
        until(lambda: node.state.counts.scrub_corrupt == 1)
        assert load(one, range(10)) == [BlockStatus.LOADED] * 10
        assert "scrub" in node.loops.ages_s() and node.report.problems() == []
    finally:
        one.close()
        transport.close()
        node.stop()
