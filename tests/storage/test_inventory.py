"""Whole shelves and whole devices: retired, swept, adopted, lost; and who hears of evictions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.storage.eviction.quotas import NodeShare
from kvstrata.storage.records import Block, Shelf
from kvstrata.storage.state import NodeState
from tests.storage.conftest import Node, fill, holds, key
from tests.storage.memory_store import MemoryStore

STORED, ABORTED, QUOTA = int(BlockStatus.STORED), int(BlockStatus.ABORTED), int(BlockStatus.QUOTA)
BLOCK = 4096
SSD_SLOT = 2 * BLOCK

MakeNode = Callable[..., Node]


def retire(node: Node, salt: str = "", why: Departure = Departure.DROPPED) -> Shelf:
    shelf = node.state.inventory.shelves[node.handle, salt]
    node.state.inventory.retire(shelf, why)
    node.state.check()
    return shelf


# ---------------------------------------------------------------- retired shelves


def test_a_retired_shelf_is_found_by_nobody_and_tells_no_delta(node: Node) -> None:
    node.chain(range(20), 5)
    node.state.deltas.close_batch()
    seq = node.state.deltas.open_seq
    shelf = retire(node)
    assert not node.acquire(range(20)).blocks and node.state.inventory.visible == 0
    assert node.state.deltas.close_batch() == seq - 1, "the directory forgets the scope itself"
    assert node.state.inventory.retire(shelf, Departure.DROPPED) == 0, "once is enough"
    assert node.store(range(20), version=2) == [STORED] * 20
    assert node.arena.bytes_used == 40 * BLOCK
    assert [node.state.inventory.sweep(8) for _ in range(4)] == [8, 8, 4, 0]
    assert node.arena.bytes_used == 20 * BLOCK
    node.state.check()
    assert all(holds(block, 2) for block in node.acquire(range(20)).blocks)


def test_a_reader_of_a_retired_shelf_sees_another_generation_at_once(node: Node) -> None:
    node.store(range(3))
    held = node.acquire(range(2), seconds=1e6)
    rows = [(block.slab, block.slot, block.generation) for block in held.blocks]
    retire(node)
    assert all(slab.generations[slot] != generation for slab, slot, generation in rows)
    node.state.inventory.sweep(100)
    assert node.arena.bytes_used == 2 * BLOCK, "its slots are not given to others while it may still copy"
    assert all(holds(block, 0) for block in held.blocks)
    assert held.lease is not None
    node.state.release(Node.SESSION, [held.lease.id])
    assert node.arena.bytes_used == 0
    node.state.check()


def test_what_was_being_written_is_aborted(node: Node) -> None:
    flying = node.reserve(range(4)).reservation
    swept = node.reserve(range(10, 12)).reservation
    assert flying is not None and swept is not None
    retire(node)
    assert list(node.state.commit(Node.SESSION, flying.id, [0] * 4, None, node.now)) == [ABORTED] * 4
    node.state.inventory.sweep(100)
    assert node.store([10]) == [STORED], "the key is free"
    assert list(node.state.commit(Node.SESSION, swept.id, [0] * 2, None, node.now)) == [ABORTED] * 2
    assert node.arena.bytes_used == BLOCK
    node.state.check()


def test_retired_blocks_are_the_first_victims(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    half = node.capacity // 2
    node.store(range(half), salt="cold")
    node.store(range(100, 100 + node.capacity - half), salt="retired")
    retire(node, "retired")
    assert node.store(range(1000, 1005), salt="new") == [STORED] * 5
    assert node.present(range(half), "cold") == list(range(half)) and node.state.counts.evicted == 0


def test_retired_blocks_of_another_size_make_room(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    large = node.state.open_namespace(Namespace("large", 20_000, 16))[0]
    node.store(range(node.capacity))
    retire(node)
    assert node.store(range(6), handle=large) == [STORED] * 6
    assert node.state.counts.evicted == 0


def test_a_tenants_retired_blocks_count_in_its_share_and_go_before_its_others(make_node: MakeNode) -> None:
    node = make_node()
    other = node.state.open_namespace(Namespace("other", BLOCK, 16))[0]
    node.state.quotas.apply([NodeShare("a", 10 * BLOCK)], [], True, None, 0.0, node.now)
    node.store(range(5), salt="a", handle=other)
    node.store(range(5), salt="a")
    retire(node, "a")
    assert node.store(range(100, 105), salt="a") == [STORED] * 5
    assert len(node.state.inventory.shelves[other, "a"].blocks) == 5
    assert node.state.inventory.policy.charges["a"] == 10 * BLOCK


# ---------------------------------------------------------------- devices


@pytest.fixture
def tiered(make_node: MakeNode) -> tuple[Node, MemoryStore]:
    node = make_node()
    store = MemoryStore(extents=3, extent_bytes=64 << 10)
    node.state = NodeState(node.arena, ssd=store)
    node.handle = node.state.open_namespace(node.namespace)[0]
    return node, store


def adopt(node: Node, store: MemoryStore, slots: dict[int, tuple[int, int, int]], extent: int = 0) -> list[Block]:
    """Blocks found in an extent: slot -> (key, generation, index); each is the child of the key before it."""
    ssd = node.state.ssd
    assert ssd is not None
    grid = store.arena.slabs[extent]
    store.arena.adopt(grid, SSD_SLOT, list(slots), max(generation for _, generation, _ in slots.values()))
    shelf = ssd.shelf(node.state.entry(node.handle), "a")
    made = []
    for slot, (number, generation, index) in slots.items():
        parent = key(number - 1) if index else b""
        made.append(ssd.adopt(shelf, grid, slot, key(number), generation, number, index, parent))
        if made[-1] is None:
            store.arena.disown(grid, [slot])
    return [block for block in made if block is not None]


def test_blocks_found_on_a_device_come_back_in_their_order(tiered: tuple[Node, MemoryStore]) -> None:
    node, store = tiered
    ssd = node.state.ssd
    assert ssd is not None
    adopt(node, store, {5: (1, 12, 1), 0: (0, 11, 0), 3: (7, 3, 0)})
    adopt(node, store, {1: (2, 13, 2)}, extent=2)
    assert ssd.visible == 0
    assert ssd.settle() == 4 and ssd.visible == 4
    node.state.check()
    assert [block.hash for block in ssd.coldest_blocks(10)] == [key(7), key(0), key(1), key(2)]
    shelf = ssd.shelves[node.handle, "a"]
    assert shelf.blocks[key(2)].parent is shelf.blocks[key(1)] and shelf.blocks[key(1)].parent is shelf.blocks[key(0)]
    assert ssd.policy.charges == {"a": 4 * SSD_SLOT}
    assert node.state.deltas.close_batch() == 0, "a snapshot tells of them"
    ssd.policy.next_stamp()
    blocks, _ = ssd.admit(shelf, [key(50)], [0])
    assert blocks[0].generation > 13, "numbers go on where the last start ended"
    assert blocks[0].slab.index in (0, 2), "a free slot beside them is used"
    ssd.drop(blocks[0])


def test_a_key_found_twice_is_adopted_once(tiered: tuple[Node, MemoryStore]) -> None:
    node, store = tiered
    assert len(adopt(node, store, {0: (1, 5, 0)})) == 1
    assert adopt(node, store, {0: (1, 4, 0)}, extent=1) == []
    assert store.arena.free_slabs == 2, "nothing is left in that extent"
    assert node.state.ssd is not None and node.state.ssd.settle() == 1
    node.state.check()


def test_survivors_above_a_share_drain(tiered: tuple[Node, MemoryStore]) -> None:
    node, store = tiered
    ssd = node.state.ssd
    assert ssd is not None
    node.state.quotas.apply([NodeShare("a", None, 2 * SSD_SLOT)], [], True, None, 0.0, node.now)
    assert ssd.drain(SSD_SLOT) == 0
    adopt(node, store, {slot: (slot, slot + 1, 0) for slot in range(5)})
    ssd.settle()
    assert [ssd.drain(SSD_SLOT) for _ in range(4)] == [SSD_SLOT] * 3 + [0]
    assert [block.hash for block in ssd.coldest_blocks(10)] == [key(3), key(4)]


def test_a_lost_device_takes_its_blocks_and_its_room(tiered: tuple[Node, MemoryStore]) -> None:
    node, store = tiered
    ssd = node.state.ssd
    assert ssd is not None
    adopt(node, store, {slot: (slot, slot + 1, 0) for slot in range(5)})
    adopt(node, store, {slot: (100 + slot, 100 + slot, 0) for slot in range(3)}, extent=1)
    ssd.settle()
    shelf = ssd.shelves[node.handle, "a"]
    held = shelf.blocks[key(2)]
    ssd.pin([held])
    ssd.policy.next_stamp()
    (flying,), _ = ssd.admit(shelf, [key(60)], [0])
    assert flying.slab is held.slab
    assert ssd.lose(store.arena.slabs[0]) == 6
    assert store.arena.bytes_total == 2 * (64 << 10) and ssd.visible == 3
    assert ssd.policy.charges["a"] == 5 * SSD_SLOT, "what is held is charged until it is let go of"
    node.state.deltas.close_batch()
    (batch,) = node.state.deltas.after(0) or []
    assert {(run.why, run.tier) for run in batch.runs} == {(Departure.DEVICE, Tier.SSD)}
    assert sum(len(run.hashes) for run in batch.runs) == 5 * 16
    ssd.unpin([held])
    ssd.drop(flying)
    assert ssd.policy.charges["a"] == 3 * SSD_SLOT
    node.state.check()
    ssd.policy.next_stamp()
    blocks, status = ssd.admit(shelf, [key(n) for n in range(200, 220)], [0] * 20)
    assert all(block.slab is not held.slab for block in blocks) and len(blocks) == 14
    assert status == BlockStatus.FULL
    for block in blocks:
        ssd.drop(block)


# ---------------------------------------------------------------- who hears


def test_evictions_are_told_while_the_bytes_are_there(make_node: MakeNode) -> None:
    node = make_node(slabs=2)
    told: list[bytes] = []

    def evicted(block: Block) -> None:
        assert holds(block, 0)
        told.append(block.hash)

    node.state.inventory.evicted = evicted
    node.store(range(node.capacity))
    node.store([1000, 1001])
    node.state.remove(node.namespace, "", key(3), node.now)
    assert told == [key(node.capacity - 1), key(node.capacity - 2)]


def test_a_shelf_that_was_retired_takes_nothing_in(node: Node) -> None:
    node.store([1])
    shelf = retire(node)
    assert node.state.inventory.admit(shelf, [key(5)], [0]) == ([], BlockStatus.ABORTED)
    got = node.reserve([2]).reservation
    assert got is not None
    fill(got.blocks[0], 0)
    assert got.shelf is not shelf
