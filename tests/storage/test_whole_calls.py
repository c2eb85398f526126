"""What is done for a whole call at once, against the same block by block; and what a node at rest leaves undone."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.storage import state as node_state
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.node import StorageNode
from kvstrata.storage.records import VISIBLE, Block, NamespaceEntry, Shelf, packed_rows
from kvstrata.storage.story import Story
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.identity import Identity

from .conftest import Node, key, until

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
    until(lambda: running.state.at_rest, 5.0)
    assert running.state.counts.reservations_expired == 1
    channel.close()


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
