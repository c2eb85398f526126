"""What is done for a whole call at once, against the same block by block; and what a node at rest leaves undone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage import state as node_state
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.eviction.isolated_lru import IsolatedLRU
from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.eviction.quotas import NodeShare, QuotaBook
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.leases import MARGIN_S
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.node import REST_S, StorageNode
from kvstrata.storage.records import VISIBLE, Block, NamespaceEntry, Shelf, packed_rows
from kvstrata.storage.slab import Slab
from kvstrata.storage.state import NodeState, WriteAsk
from kvstrata.storage.story import Story
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.identity import Identity
from tests.waiting import until

from .conftest import SLAB_BYTES, Node, key, keys

#: How late a thread of a busy machine may come.
SLACK_S = 1.0

#: Hashes a call; some more than are cut one by one.
numbers = st.lists(st.integers(0, 30), max_size=24)
widths = st.sampled_from([8, 16, 32])


class Grid(SlotGrid):
    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        return self.nbytes // slot_bytes, 0


def shelf_of(names: set[int], visible: set[int]) -> Shelf:
    shelf, grid = Shelf(NamespaceEntry(1, Namespace("m", 1, 16)), ""), Grid(0, 64, [0] * 64)
    for number in sorted(names):
        block = shelf.blocks[key(number)] = Block(shelf, key(number), grid, number, 0, 0)
        block.state = VISIBLE if number in visible else 0
    return shelf


@settings(deadline=None)
@given(data=st.data(), width=widths, count=st.integers(0, 40))
def test_hashes_are_cut_alike_however_many_there_are(data: st.DataObject, width: int, count: int) -> None:
    hashes = data.draw(st.lists(st.binary(min_size=width, max_size=width) | st.just(bytes(width)), max_size=40))
    packed = b"".join(hashes)
    assert node_state._keys(packed, width, len(hashes)) == hashes
    few = min(count, len(hashes))
    assert node_state._keys(packed, width, few) == hashes[:few]


@settings(deadline=None)
@given(asked=numbers, here=st.sets(st.integers(0, 30)), visible=st.sets(st.integers(0, 30)), below=numbers | st.none())
def test_a_write_of_one_kind_is_sorted_as_any_other(
    asked: list[int], here: set[int], visible: set[int], below: list[int] | None
) -> None:
    shelf = shelf_of(here, visible)
    lower = shelf_of(set(below), visible) if below is not None else None
    names = [key(number) for number in asked]
    quick = node_state._all_alike(names, [shelf.blocks.get(name) for name in names], lower)
    slow = node_state._one_by_one(names, [shelf.blocks.get(name) for name in names], lower)
    if len(set(asked)) == len(asked) and (not here & set(asked) and not set(below or ()) & set(asked)):
        assert quick is not None, "all new, each once: the common case"
    if quick is not None:
        assert (quick.status, quick.hashes, quick.known, quick.cold) == (
            slow.status, slow.hashes, slow.known, slow.cold,
        )  # fmt: skip
        assert list(quick.fresh.items()) == list(slow.fresh.items())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 3), st.integers(0, 5)), max_size=40)
)
def test_entries_that_are_joined_tell_the_same_story(told: list[tuple[str, str, int, int]]) -> None:
    shelves = {name: shelf_of(set(range(6)), set()) for name in "xy"}
    for name, shelf in shelves.items():
        shelf.salt = name
    joined, apart = Story(), Story()
    seen: set[tuple[str, str, int, int]] = set()
    for verb, name, at, number in sorted(told, key=lambda each: each[2]):
        if (verb, name, at, number) in seen:
            continue  # nothing leaves twice without having come between
        seen.add((verb, name, at, number))
        block = shelves[name].blocks[key(number)]
        joined.tell_one(at, verb, shelves[name], block)
        apart.tell(at, verb, shelves[name], (block,))
    for name in "xy":
        for number in range(6):
            assert joined.of((1, name), key(number)) == apart.of((1, name), key(number))
    assert len(joined._entries) <= len(apart._entries)


@settings(deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1))
def test_slots_get_their_generations_with_gaps_or_without(slots: set[int]) -> None:
    grid = Grid(0, 64, [7] * 64)
    grid.renew(sorted(slots), range(100, 100 + len(slots)))
    expected = dict(zip(sorted(slots), range(100, 164), strict=False))
    assert [grid.generations[slot] for slot in range(64)] == [expected.get(slot, 7) for slot in range(64)]


def test_rows_are_of_the_block_that_has_the_slot_now(node: Node) -> None:
    count = node.capacity
    for start in range(0, 3 * count, count):
        node.store(range(start, start + count), version=start)
        for _ in range(2):
            got = node.acquire(range(start, start + count))
            assert packed_rows(got.blocks) == b"".join(block.made_row() for block in got.blocks)
            node.state.release(node.SESSION, [got.lease.id])


def test_a_node_at_rest_ends_the_next_lease_in_time(running: StorageNode) -> None:
    until(lambda: running.state.at_rest)
    channel = Channel([running.channel], Identity.new(name="test"))
    until_s = time.monotonic() + 5.0
    opening = pb.OpenNamespace(spec=Namespace("model", 4096, 16).to_spec()).SerializeToString()
    opened = pb.NamespaceHandle.FromString(channel.call(Kind.OPEN_NAMESPACE, opening, until_s).message)
    ask = pb.Reserve(ns=opened.handle, hashes=key(1), deadline_ms=1).SerializeToString()
    reserved = pb.ReserveOk.FromString(channel.call(Kind.RESERVE, ask, until_s).message)
    assert reserved.reservation and not running.state.at_rest
    with running.lock:
        standing = running.state.reservations._reservations[reserved.reservation]
    assert REST_S <= MARGIN_S / 4, "what was granted at rest ends long before the next look"
    until(lambda: running.state.at_rest)
    assert running.state.counts.reservations_expired == 1
    told = running.state.inventory.story.of((opened.handle, ""), key(1))
    ended = next(at for at, verb in told if verb == "reservation expired")
    assert standing.deadline <= ended <= standing.deadline + REST_S + SLACK_S
    channel.close()


class OneByOne(IsolatedLRU):
    """Names its victims one at a time."""

    def take(self, victim: Block, limit: int, own: bool) -> list[Block]:
        return []


class Apart(Inventory):
    """Lets go of a reservation's blocks one at a time."""

    def drop_all(self, blocks: Sequence[Block], verb: str) -> None:
        for block in blocks:
            self.drop(block, verb)


class Twin:
    """A small node, and in which order its blocks leave."""

    def __init__(self, policy: type[IsolatedLRU], inventory: type[Inventory], order: type[Order]) -> None:
        book = QuotaBook()
        book.apply([NodeShare("limited", dram_limit=40 << 10)], [], True, NodeShare(""), 0.0, 0.0)
        self.state = NodeState(
            dram_arena(3 * SLAB_BYTES, SLAB_BYTES),
            policy=policy(order),
            deltas=DeltaLog(batch_hashes_max=7),
            quotas=book,
        )
        self.state.inventory.__class__ = inventory
        self.left: list[bytes] = []
        self.state.inventory.evicted = lambda block: self.left.append(block.hash)
        self.handle = self.state.open_namespace(Namespace("m", 4096, 16))[0]

    def write(self, salt: str, start: int, count: int, follows: bool, keeps: int, now: float) -> bytes:
        state, parent = self.state, key(start - 1) if follows and start else b""
        ask = WriteAsk(self.handle, salt, keys(range(start, start + count)), parent, start)
        got = state.reserve(b"s", ask, now)
        if got.reservation is not None:
            held = state.acquire(b"s", self.handle, salt, keys(range(start % 5)), 2.0, now)
            if keeps:
                blocks = len(got.reservation.blocks)
                state.commit(b"s", got.reservation.id, [7] * blocks, [n % 5 < keeps for n in range(blocks)], now)
            else:
                state.abort(b"s", got.reservation.id, now)
            if held.lease is not None:
                state.release(b"s", [held.lease.id])
        state.check()
        return bytes(got.status)

    def tells(self) -> object:
        """Everything that was said of blocks, and where they are."""
        state, story = self.state, self.state.inventory.story
        state.deltas.close_batch()
        return (
            self.left,
            [(entry.at, entry.verb, bytes(entry.hashes), entry.count) for entry in story._entries],
            state.deltas._closed,
            state.counts,
            [(block.hash, block.offset, block.generation) for block in state.inventory.coldest_blocks(1000)],
        )


writes = st.tuples(
    st.sampled_from(["", "limited", "other"]),
    st.integers(0, 40),
    st.integers(1, 24),
    st.booleans(),
    st.integers(0, 5),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(writes, min_size=4, max_size=24), st.sampled_from([LruOrder, SegmentedOrder]), st.integers(1, 3))
def test_runs_of_blocks_leave_as_one_after_the_other(
    calls: list[tuple[str, int, int, bool, int]], order: type[Order], tenants: int
) -> None:
    whole, apart = Twin(IsolatedLRU, Inventory, order), Twin(OneByOne, Apart, order)
    for now, (salt, *what) in enumerate(calls):
        chosen = salt if tenants == 3 else ["", "limited"][tenants - 1]
        assert whole.write(chosen, *what, now / 2) == apart.write(chosen, *what, now / 2)
    assert whole.tells() == apart.tells()
    for twin in (whole, apart):
        twin.state.arena.close()


def test_a_run_of_victims_is_taken_at_once() -> None:
    twin = Twin(IsolatedLRU, Inventory, LruOrder)
    took: list[int] = []
    take = twin.state.inventory.policy.take
    twin.state.inventory.policy.take = lambda *given: took.append(len(got := take(*given))) or got
    for start in range(0, 96, 24):
        twin.write("", start, 24, False, 5, 0.0)
    assert max(took) > 1 and sum(took) == len(twin.left)
    twin.state.arena.close()


def test_only_slabs_with_room_are_looked_at() -> None:
    """What a slot costs does not depend on how many slabs are full."""
    arena = dram_arena(32 * SLAB_BYTES, SLAB_BYTES)
    slots = arena.slots_in_a_slab(4096)
    shelf = Shelf(NamespaceEntry(1, Namespace("m", 4096, 16)), "")

    def take(count: int) -> list[tuple[Slab, list[int]]]:
        got = arena.allocate(4096, count)
        for slab, taken in got:
            for slot in taken:
                slab.blocks[slot] = Block(shelf, b"", slab, slot, slab.generations[slot], 0)
                arena.bytes_used += slab.slot_bytes
        return got

    assert sum(len(taken) for _, taken in take(32 * slots)) == 32 * slots
    arena.check()
    for index in (20, 7):
        arena.free_all(arena.slabs[index], [3, 1])
        arena.check()
    looked: list[int] = []
    real = SlotGrid.free.fget
    assert real is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotGrid, "free", property(lambda slab: looked.append(slab.index) or real(slab)))
        got = take(3)
    assert [(slab.index, taken) for slab, taken in got] == [(7, [1, 3]), (20, [1])]
    assert set(looked) == {7, 20}
    arena.check()
    for slab in arena.slabs:
        slab.blocks.clear()
    arena.close()


COLLECTOR = """
import gc, json
from kvstrata.storage.garbage import spare_the_old

class Held:
    __slots__ = ("other",)

class Seen:
    pass

spare_the_old()
before = gc.get_stats()[2]["collections"]
kept = []
for _ in range(1_000_000):
    kept.append(Held())
import weakref
one = Seen()
one.me, gone = one, weakref.ref(one)
del one
young = [Held() for _ in range(300_000)]
print(json.dumps([gc.get_stats()[2]["collections"] - before, gone() is None]))
"""


def test_the_collector_leaves_what_is_old_alone_and_takes_cycles_that_die_young() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTOR], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [0, True]
