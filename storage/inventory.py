"""Blocks of one tier and their slots: who has which, what is visible, and what leaves when there is no room.

The only place that allocates and frees slots, so that charges, LRU, delta log and allocator move
together. It knows nothing of sessions or deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvstrata.proto.status import BlockStatus, Departure, Tier
from kvstrata.storage.arena import Arena
from kvstrata.storage.delta_log import DeltaLog
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.isolated_lru import EvictionPolicy
from kvstrata.storage.records import GONE, IN_FLIGHT, LEAVING, VISIBLE, Block, Counts, NamespaceEntry, Shelf
from kvstrata.storage.story import Story


class Inventory:
    """Not thread-safe: its owner's lock covers it. ``now`` is set by the owner for the log's sake."""

    def __init__(
        self,
        arena: Arena[Any],
        policy: EvictionPolicy,
        deltas: DeltaLog,
        counts: Counts,
        *,
        tier: Tier = Tier.DRAM,
        slot_bytes: Callable[[NamespaceEntry], int] = lambda entry: entry.slot_bytes,
    ) -> None:
        self.tier = tier
        self.slot_bytes = slot_bytes
        self.arena = arena
        self.policy = policy
        self.deltas = deltas
        self.counts = counts
        self.story = Story()
        self.shelves: dict[tuple[int, str], Shelf] = {}
        self.now = 0.0
        self.visible = 0
        self._leaving: set[Block] = set()

    def shelf(self, entry: NamespaceEntry, salt: str) -> Shelf:
        """The tenant's shelf; a new one counts only once :meth:`admit` puts something on it."""
        return self.shelves.get((entry.handle, salt)) or Shelf(entry, salt)

    # ------------------------------------------------------------------ a block's life

    def admit(self, shelf: Shelf, hashes: Sequence[bytes], indexes: Sequence[int]) -> tuple[list[Block], BlockStatus]:
        """Give slots to new blocks, in order, evicting what is colder than this call; maybe not to all.

        The status is what the others get: FULL or QUOTA. Each admitted one gets a new generation, written to
        the table that readers compare, before any byte moves.
        """
        slot_bytes = self.slot_bytes(shelf.entry)
        arena = self.arena
        blocks: list[Block] = []
        self._enter(shelf, hashes, indexes, arena.allocate(slot_bytes, len(hashes)), blocks)
        while len(blocks) < len(hashes) and self._make_room(slot_bytes, len(hashes) - len(blocks), shelf.salt):
            done = len(blocks)
            slots = arena.allocate(slot_bytes, len(hashes) - done)
            self._enter(shelf, hashes[done:], indexes[done:], slots, blocks)
        if blocks:
            self.shelves.setdefault((shelf.entry.handle, shelf.salt), shelf)
            self.policy.charge(shelf.salt, len(blocks) * slot_bytes)
            self.story.tell(self.now, "reserved", shelf, blocks)
        return blocks, BlockStatus.FULL

    def _enter(
        self,
        shelf: Shelf,
        hashes: Sequence[bytes],
        indexes: Sequence[int],
        slots: Sequence[tuple[SlotGrid, int]],
        blocks: list[Block],
    ) -> None:
        arena = self.arena
        for (slab, slot), key, index in zip(slots, hashes, indexes, strict=False):
            generation = arena.next_generation()
            slab.generations[slot] = generation
            block = Block(shelf, key, slab, slot, generation, index)
            slab.blocks[slot] = block
            slab.pinned += 1
            shelf.blocks[key] = block
            blocks.append(block)
        arena.bytes_used += len(slots) * self.slot_bytes(shelf.entry)

    def publish(self, shelf: Shelf, blocks: Sequence[Block]) -> None:
        """Make blocks whose bytes are in place visible, all of one call."""
        if not blocks:
            return
        for block in blocks:
            assert block.state == IN_FLIGHT
            block.state = VISIBLE
            block.slab.pinned -= 1
        stamp = self.policy.next_stamp()
        self.policy.insert(blocks)
        for block in blocks:
            block.born = stamp
        self.visible += len(blocks)
        self.deltas.record(True, shelf, [block.hash for block in blocks], self.tier)
        self.story.tell(self.now, "committed", shelf, blocks)

    def withdraw(self, block: Block, verb: str, why: Departure = Departure.UNKNOWN, cause: str = "") -> None:
        """Nobody finds the block from here on. Its slot goes now, or when its last reader lets go.

        ``why`` it left, and the salt whose need it was, are told to the directory. A block in flight keeps
        its slot until its reservation calls :meth:`drop`.
        """
        shelf = block.shelf
        del shelf.blocks[block.hash]
        if not shelf.blocks:
            del self.shelves[shelf.entry.handle, shelf.salt]
        self.story.tell(self.now, verb, shelf, (block,))
        if block.state == VISIBLE:
            self.policy.discard(block)
            self.visible -= 1
            self.deltas.record(False, shelf, [block.hash], self.tier, why, cause)
            if not block.leases:
                block.slab.pinned += 1  # as every block that is neither visible nor free; undone by drop
                self._free(block)
                return
        block.state = LEAVING
        self._leaving.add(block)

    def drop(self, block: Block, verb: str = "aborted") -> None:
        """Free the slot of a block that is in flight or leaving: nobody reads or writes it any more."""
        if block.state == IN_FLIGHT:
            self.withdraw(block, verb)
        assert block.state == LEAVING and not block.leases
        self._leaving.discard(block)
        self._free(block)

    def _free(self, block: Block) -> None:
        block.state = GONE
        slab = block.slab
        slab.pinned -= 1
        self.policy.discharge(block.shelf.salt, slab.slot_bytes)
        self.arena.free(slab, block.slot)
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children and parent.parked:
                parent.stamp = max(parent.stamp, block.stamp)
                parent.slab.hot = max(parent.slab.hot, parent.stamp)
                self.policy.unprotect(parent)

    # ------------------------------------------------------------------ leases and chains

    def pin(self, blocks: Iterable[Block]) -> None:
        """One more reader of each."""
        for block in blocks:
            if not block.leases:
                block.slab.pinned += 1
            block.leases += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        """One reader less of each, in chain order; a leaving block goes with its last."""
        for block in blocks:
            block.leases -= 1
            if block.leases:
                continue
            if block.state == LEAVING:
                self.drop(block)
                continue
            block.slab.pinned -= 1
            if block.parked:
                self.policy.unprotect(block)

    def link(self, parent: Block | None, child: Block) -> None:
        """Remember that ``child`` follows ``parent``: it is to leave first.

        Hashes come from clients, which could close a ring of them; positions in a chain cannot.
        """
        if parent is not None and child.parent is None and parent.index < child.index:
            child.parent = parent
            parent.children += 1

    # ------------------------------------------------------------------ room

    def _make_room(self, slot_bytes: int, wanted: int, cause: str) -> int:
        """Free up to ``wanted`` slots of a size, none of them touched by this call; slots freed.

        A whole slab of another size goes when all in it is colder than this size's coldest, or when
        this size has nothing to give.
        """
        freed = 0
        policy, this_call = self.policy, self.policy.stamp
        while freed < wanted:
            victim = policy.coldest(slot_bytes)
            if victim is not None and victim.stamp >= this_call:
                victim = None
            if not freed or victim is None:
                slab = self._slab_to_take(slot_bytes, this_call if victim is None else victim.stamp)
                if slab is not None:
                    self._clear(slab, cause)
                    freed += self.arena.slots_in_a_slab(slot_bytes)
                    continue
            if victim is None:
                break
            self.counts.evicted += 1
            self.withdraw(victim, "evicted", Departure.ROOM, cause)
            freed += 1
        return freed

    def _slab_to_take(self, slot_bytes: int, colder_than: int) -> SlotGrid | None:
        if not self.arena.slots_in_a_slab(slot_bytes):
            return None
        idle = self.arena.others(slot_bytes, lambda slab: not slab.pinned and slab.hot < colder_than)
        return min(idle, key=lambda slab: slab.hot, default=None)

    def _clear(self, slab: SlotGrid, cause: str) -> None:
        self.counts.slabs_taken_over += 1
        self.counts.evicted += len(slab.blocks)
        for block in list(slab.blocks.values()):
            self.withdraw(block, "evicted", Departure.ROOM, cause)

    # ------------------------------------------------------------------ what there is

    def holdings(self, key: tuple[int, str]) -> bytes:
        """Packed hashes of all that is visible on one shelf; empty when it is gone."""
        shelf = self.shelves.get(key)
        if shelf is None:
            return b""
        return b"".join([block.hash for block in shelf.blocks.values() if block.state == VISIBLE])

    def blocks(self) -> Iterator[Block]:
        """Every block that has a slot."""
        for shelf in self.shelves.values():
            yield from shelf.blocks.values()
        yield from self._leaving

    def check(self) -> None:
        """Assert that slots, records, charges, LRU and chains agree. O(blocks)."""
        self.arena.check()
        self.policy.check()
        self.deltas.check()
        everything = list(self.blocks())
        by_slot = {(block.slab.index, block.slot) for block in everything}
        assert len(by_slot) == len(everything), "two blocks share a slot"
        charged: dict[str, int] = {}
        children: dict[Block, int] = {}
        pinned: dict[int, int] = {}
        for block in everything:
            assert block.slab.blocks[block.slot] is block
            assert (block.state == VISIBLE) == (block.queue is not None), "the LRU holds what is visible"
            charged[block.shelf.salt] = charged.get(block.shelf.salt, 0) + block.slab.slot_bytes
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
            if block.state != VISIBLE or block.leases:
                pinned[block.slab.index] = pinned.get(block.slab.index, 0) + 1
        assert charged == dict(self.policy.charges), f"charges {dict(self.policy.charges)}, allocated {charged}"
        assert sum(charged.values()) == self.arena.bytes_used
        assert all(block.children == children.get(block, 0) for block in everything), "children are miscounted"
        assert all(slab.pinned == pinned.get(slab.index, 0) for slab in self.arena.slabs), "pins are miscounted"
        assert self.visible == sum(block.state == VISIBLE for block in everything)
        for key, shelf in self.shelves.items():
            assert shelf.blocks and key == (shelf.entry.handle, shelf.salt)
            assert all(block.state != LEAVING and block.shelf is shelf for block in shelf.blocks.values())
