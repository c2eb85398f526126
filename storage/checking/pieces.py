"""The invariants of a node's state, looked at in pieces, so that no reader waits for long. Sans-IO.

``NodeState.check()`` takes about 2 microseconds a block under the node's lock: fine for a small node, seconds for
one of a million blocks. Here each step is of a few thousand blocks, and asserts what must hold of them at that
moment; between steps the node goes on. Sums that need all blocks at once are made of sums that are kept by shelf
and by slab. Two things only the whole check sees: the exact count of children within a chain of more than
``SHELF_BLOCKS`` blocks, and the order within the eviction queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import IN_FLIGHT, LEAVING, VISIBLE, Block, Shelf
from kvstrata.storage.reservations import ReservationBook
from kvstrata.storage.state import NodeState
from kvstrata.storage.tiers.moves import TierMoves

#: Blocks of one step: about 5 ms under the lock.
STEP_BLOCKS: Final = 2048
#: A slab of more slots, or a shelf of more blocks, is not looked at as a whole: about 30 ms under the lock.
SLAB_SLOTS: Final = 1 << 16
SHELF_BLOCKS: Final = 1 << 15


class PieceCheck:
    """One look at all of a state. ``moves`` when the node has an SSD."""

    def __init__(self, state: NodeState, moves: TierMoves | None = None) -> None:
        self.blocks = 0  #: looked at so far
        self._state = state
        self._moves = moves
        self._pieces = self._all()

    def step(self) -> bool:
        """Do the next piece, with the node's lock held; False when there is none.

        Raises AssertionError for what does not hold; the next call goes on behind it.
        """
        piece = next(self._pieces, None)
        if piece is None:
            return False
        piece()
        return True

    def _all(self) -> Iterator[Callable[[], None]]:
        yield self._state.known.check
        yield self._state.deltas.check
        for inventory, reservations in self._tiers():
            yield partial(_sums, inventory)
            for slab in inventory.arena.slabs:
                if len(slab.blocks) <= SLAB_SLOTS:
                    yield partial(_whole_slab, slab)
                slots = sorted(slab.blocks)
                for start in range(0, len(slots), STEP_BLOCKS):
                    yield partial(self._look, inventory, reservations, slab, slots[start : start + STEP_BLOCKS])
            for key in list(inventory.shelves):
                yield partial(self._shelf, inventory, key)

    def _tiers(self) -> list[tuple[Inventory, ReservationBook]]:
        tiers = [(self._state.inventory, self._state.reservations)]
        if self._moves is not None:
            tiers.append((self._moves.ssd.inventory, self._moves.ssd.reservations))
        return tiers

    def _look(self, inventory: Inventory, reservations: ReservationBook, slab: SlotGrid, slots: Sequence[int]) -> None:
        """What must hold of each block that has one of these slots now."""
        blocks = [block for slot in slots if (block := slab.blocks.get(slot)) is not None]
        self.blocks += len(blocks)
        leased: Counter[Block] = Counter()
        for shelf in {block.shelf for block in blocks if block.leases}:
            for lease in shelf.leases:
                leased.update(block for block in lease.blocks if block.shelf is shelf)
        written = reservations.named() if any(block.state == IN_FLIGHT for block in blocks) else set()
        for block in blocks:
            _check_block(inventory, slab, block)
            name = block.hash.hex()
            assert block.leases == leased[block], f"block {name}: {block.leases} leases counted, {leased[block]} stand"
            assert block.state != IN_FLIGHT or block in written, f"block {name} is in flight and nobody writes it"

    def _shelf(self, inventory: Inventory, key: tuple[int, str]) -> None:
        shelf = inventory.shelves.get(key)
        if shelf is None:
            return
        entry = self._state.known.entry(key[0])
        where = f"shelf of {entry.namespace.group} shard {entry.namespace.shard}"
        assert entry is shelf.entry and shelf.salt == key[1], f"{where}: under another key"
        assert shelf.blocks and not shelf.retired, f"{where}: empty or retired, and still to be found"
        assert shelf.epoch == entry.epoch, f"{where}: blocks of other weights can be found"
        if len(shelf.blocks) <= SHELF_BLOCKS and len(inventory.leaving) <= STEP_BLOCKS:
            _check_chains(inventory, shelf, where)


def _sums(inventory: Inventory) -> None:
    """Bytes and counts of one tier, from what slabs and shelves say of themselves. O(slabs + shelves + leaving)."""
    arena, policy = inventory.arena, inventory.policy
    used = sum(len(slab.blocks) * slab.slot_bytes for slab in arena.slabs)
    assert used == arena.bytes_used, f"{inventory.tier.name}: {arena.bytes_used} bytes counted as used, {used} are"
    charged: Counter[str] = Counter()
    shelves = [*inventory.shelves.values(), *inventory.retired_shelves()]
    for shelf in shelves:
        charged[shelf.salt] += len(shelf.blocks) * inventory.slot_bytes(shelf.entry)
    for block in inventory.leaving:
        charged[block.shelf.salt] += block.slab.slot_bytes
    assert +charged == dict(policy.charges), f"{inventory.tier.name}: charges of tenants are not what they have"
    visible = sum(shelf.queue.count for shelf in inventory.shelves.values() if shelf.queue is not None)
    assert visible == inventory.visible, f"{inventory.tier.name}: {inventory.visible} blocks counted, {visible} are"


def _whole_slab(slab: SlotGrid) -> None:
    slab.check()
    pinned = sum(block.state != VISIBLE or block.leases > 0 for block in slab.blocks.values())
    assert slab.pinned == pinned, f"grid {slab.index}: {slab.pinned} pins counted, {pinned} are"


def _check_block(inventory: Inventory, slab: SlotGrid, block: Block) -> None:
    shelf, name = block.shelf, block.hash.hex()
    assert block.slab is slab and slab.blocks[block.slot] is block, f"block {name}: not in its slot"
    assert block.state in (IN_FLIGHT, VISIBLE, LEAVING), f"block {name}: gone, and in a slot"
    assert (block.state == VISIBLE) == (block.queue is not None), f"block {name}: visible and in no queue, or not so"
    leaving = block.state == LEAVING
    assert leaving == (block in inventory.leaving), f"block {name}: leaving, and not known to be"
    assert leaving or shelf.blocks.get(block.hash) is block, f"block {name}: its shelf does not have it"
    same = slab.generations[block.slot] == block.generation
    assert same or shelf.retired, f"block {name}: its slot has another generation"
    if block.queue is not None:
        assert block.queue.shelf is shelf, f"block {name}: in another's queue"
        assert block.parked or block.stamp <= min(slab.hot, inventory.policy.stamp), f"block {name}: used in future"
    parent, child = block.parent, block.child
    if parent is not None:  # which may have been removed since
        assert parent.children > 0 and parent.index < block.index, f"block {name}: a parent that is none"
    assert child is None or child.parent is block, f"block {name}: a child of another"


def _check_chains(inventory: Inventory, shelf: Shelf, where: str) -> None:
    members = [*shelf.blocks.values(), *(block for block in inventory.leaving if block.shelf is shelf)]
    children = Counter(block.parent for block in members if block.parent is not None)
    wrong = next((block for block in members if block.children != children[block]), None)
    assert wrong is None, f"{where}: children of block {wrong.hash.hex() if wrong else ''} are miscounted"
