"""Chains longer than the memory, or the share, of their tenant: what is on SSD makes room from the midst of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstrata.proto.status import BlockStatus, Departure, HintKind
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.records import Block
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.moves import TierBooks, TierMoves
from kvstrata.storage.tiers.recovery import recover

from .conftest import holds, key, keys
from .memory_store import MemoryStore
from .tier_node import TierNode

STEP = 8
STORED, FULL, QUOTA = int(BlockStatus.STORED), int(BlockStatus.FULL), int(BlockStatus.QUOTA)


@pytest.fixture
def make() -> Iterator[Callable[..., TierNode]]:
    made: list[TierNode] = []

    def build(slabs: int = 2, extents: int = 12, **options: object) -> TierNode:
        made.append(TierNode(slabs, extents, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for one in made:
        one.assert_quiet()
        one.arena.close()


def piece(node: TierNode, start: int, version: int = 1, count: int = STEP, salt: str = "") -> list[int]:
    parent = key(start - 1) if start else b""
    return node.store(range(start, start + count), version, parent=parent, first_index=start, salt=salt)


def write_all(node: TierNode) -> None:
    while node.demote(4 * 4096):
        pass


def written(node: TierNode, blocks: int, salt: str = "") -> None:
    """A chain in pieces, each written before the next comes."""
    for start in range(0, blocks, STEP):
        assert set(piece(node, start, salt=salt)) == {STORED}, f"the piece from {start} on"
        write_all(node)


def read_whole(node: TierNode, blocks: int, salt: str = "") -> None:
    for start in range(0, blocks, STEP):
        got = node.read(range(start, start + STEP), salt)
        assert len(got) == STEP, f"the piece from {start} on"
        assert all(holds(block, 1) for block in got)
        node.now += 10.0
        node.state.expire(node.now)


def test_a_chain_of_three_memories_is_stored_and_read_back(make: Callable[..., TierNode]) -> None:
    node = make()
    whole = 3 * node.capacity // STEP * STEP
    written(node, whole)
    assert node.state.counts.evicted_unwritten == 0
    assert node.on_ssd(range(whole)) == list(range(whole))
    assert node.present(range(node.capacity - 2 * STEP)) == list(range(node.capacity - 2 * STEP)), "the head stays"
    read_whole(node, whole)


def test_a_chain_of_three_shares_is_stored_and_read_back(make: Callable[..., TierNode]) -> None:
    node = make(slabs=4)
    share = 4 * STEP
    node.share("a", dram=share * 4096)
    node.store(range(1000, 1000 + STEP), salt="b")
    written(node, 3 * share, "a")
    assert node.state.counts.quota == 0
    assert node.state.inventory.policy.charges["a"] <= share * 4096
    assert len(node.present(range(1000, 1000 + STEP), "b")) == STEP, "a chain replaces its own"
    read_whole(node, 3 * share, "a")


def test_with_another_order(make: Callable[..., TierNode]) -> None:
    node = make()
    state = node.state = NodeState(node.arena, ssd=node.store_, order=SegmentedOrder)
    assert state.ssd is not None
    node.ssd, node.handle = state.ssd, state.open_namespace(node.namespace)[0]
    node.moves = TierMoves(TierBooks(state.inventory, state.leases, state.reservations), state.ssd, state.counts)
    state.inventory.evicted = node.moves.evicted
    whole = 3 * node.capacity // STEP * STEP
    written(node, whole)
    assert state.counts.evicted_unwritten == 0
    read_whole(node, whole)


def test_what_is_not_on_ssd_does_not_leave_from_the_midst(make: Callable[..., TierNode]) -> None:
    node = make()
    for start in range(0, node.capacity, STEP):
        piece(node, start)
    full = piece(node, node.capacity)
    assert set(full) == {FULL} and node.present(range(node.capacity)) == list(range(node.capacity))
    move = node.moves.demotions(3 * 4096, node.now)
    assert move is not None and node.finish(move) == [True] * 3
    assert piece(node, node.capacity) == [STORED, STORED] + [FULL] * 6, "those written, but for the parent of the call"
    assert node.state.counts.evicted_unwritten == 0


def test_without_an_ssd_nothing_leaves_from_the_midst(make: Callable[..., TierNode]) -> None:
    node = make()
    node.state.inventory.copied = None
    for start in range(0, node.capacity, STEP):
        piece(node, start)
    write_all(node)
    assert set(piece(node, node.capacity)) == {FULL}


def test_what_others_follow_stays_for_all_of_them(make: Callable[..., TierNode]) -> None:
    """A block with two children is no way for one of them to make room: the other still needs it here."""
    node = make()
    head, fork = 2 * STEP, key(2 * STEP - 1)
    for start in range(0, head, STEP):
        piece(node, start)
    branch = range(500, 500 + STEP)
    node.store(branch, 1, parent=fork, first_index=head)
    write_all(node)
    held = node.acquire(branch, seconds=60.0)
    for start in range(head, 3 * node.capacity // STEP * STEP, STEP):
        assert set(piece(node, start)) == {STORED}
        write_all(node)
    assert node.present([head - 1]) == [head - 1] and node.present(branch) == list(branch)
    assert held.lease is not None
    node.state.release(node.SESSION, [held.lease.id])


def test_the_midst_does_not_leave_while_it_is_read_kept_or_dropped_below(make: Callable[..., TierNode]) -> None:
    node = make()
    for start in range(0, node.capacity, STEP):
        piece(node, start)
    write_all(node)
    last = node.capacity - STEP
    held = node.acquire(range(last, node.capacity), seconds=60.0)
    node.state.hint(node.handle, "", keys(range(last - 4, last)), 0, HintKind.KEEP, 60.0, node.now)
    shelf = node.ssd.shelves[node.handle, ""]
    for n in range(last - 8, last - 4):
        node.ssd.withdraw(shelf.blocks[key(n)], "gone", Departure.CORRUPT)
    assert set(piece(node, node.capacity)) == {STORED}, "what is before them makes room"
    assert node.present(range(last - 8, node.capacity)) == list(range(last - 8, node.capacity))
    assert node.present(range(last - 16, last - 8)) == []
    assert held.lease is not None
    node.state.release(node.SESSION, [held.lease.id])


def test_promotions_pass_by_a_piece_that_is_being_read(make: Callable[..., TierNode]) -> None:
    """A reader that goes on while it holds the last piece, in a memory full of the chain before that."""
    node = make()
    whole = 3 * node.capacity // STEP * STEP
    written(node, whole)
    before: list[Block] = []
    for start in range(0, whole, STEP):
        got = node.read(range(start, start + STEP))
        assert len(got) == STEP, f"the piece from {start} on"
        assert all(holds(block, 1) for block in got)
        assert start == 0 or all(b.leases for b in before), "the piece before it is still being read"
        before = got
        node.now += 1.5
        node.state.expire(node.now)
    assert node.state.counts.promote_refused == 0


def test_the_lower_tier_keeps_the_order_of_the_chain(make: Callable[..., TierNode]) -> None:
    """Links there are by what was before a block, not by what was in memory, nor by the batch it was written in."""
    node = make()
    clean, whole = node.capacity // STEP * STEP, node.capacity + 2 * STEP
    written(node, clean)
    piece(node, clean, count=node.capacity - clean)
    assert set(piece(node, node.capacity)) == {STORED} and node.present([clean - 1]) == []
    write_all(node)  # what follows a block that has left meanwhile
    assert set(piece(node, node.capacity + STEP)) == {STORED}
    write_all(node)
    shelf = node.ssd.shelves[node.handle, ""]
    for n in range(1, whole):
        parent = shelf.blocks[key(n)].parent
        assert parent is not None and parent.hash == key(n - 1), f"block {n}"
    after = TierNode(2, store=MemoryStore(12, node.store_.disk))
    try:
        recover(after.store_, after.state, after.now)
        found = after.ssd.shelves[after.handle, ""].blocks
        assert all((b := found[key(n)].parent) is not None and b.hash == key(n - 1) for n in range(1, whole))
    finally:
        after.arena.close()
