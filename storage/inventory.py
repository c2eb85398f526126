"""Blocks of one tier and their slots: who has which, what is visible, and what leaves when there is no room.

The only place that allocates and frees slots, so that charges, LRU, delta log and allocator move
together. It knows nothing of sessions or deadlines.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvstrata.proto.status import BlockStatus, Departure, HintKind, Tier
from kvstrata.storage.arena import Arena
from kvstrata.storage.eviction.admission import Admission
from kvstrata.storage.eviction.ages import Ages
from kvstrata.storage.eviction.orders import HINTED
from kvstrata.storage.eviction.policy import EvictionPolicy
from kvstrata.storage.eviction.quotas import QuotaBook
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.masters.delta_log import DeltaLog
from kvstrata.storage.records import GONE, IN_FLIGHT, LEAVING, VISIBLE, Block, Counts, NamespaceEntry, Shelf
from kvstrata.storage.story import HASHES_MAX as STORY_BLOCKS
from kvstrata.storage.story import Story

if TYPE_CHECKING:
    from kvstrata.storage.serving.published import Published
    from kvstrata.storage.tiers.eraser import Eraser

#: Retired blocks that one admission lets go of at most, and beyond its need in one step.
SWEEP_AT_ADMISSION: Final = 4096
SWEEP_STEP: Final = 64
#: Slabs of other sizes that are looked at, the coldest first, before one is taken over.
SLABS_LOOKED_AT: Final = 8
#: Blocks looked at, beyond what is wanted, for one with a copy below when all have others after them.
COPIED_LOOKED_AT: Final = 4096

_ROOM, _QUOTA, _LOWERED = Departure.ROOM, Departure.QUOTA, Departure.LOWERED
_VERBS: Final = {
    Departure.ROOM: "evicted",
    Departure.QUOTA: "evicted for its own share",
    Departure.LOWERED: "evicted: its share was lowered",
    Departure.EPOCH: "weights changed",
    Departure.DROPPED: "dropped",
}


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
        quotas: QuotaBook | None = None,
        slot_bytes: Callable[[NamespaceEntry], int] = lambda entry: entry.slot_bytes,
    ) -> None:
        self.tier = tier
        self.slot_bytes = slot_bytes
        self.arena = arena
        self.policy = policy
        self.admission = Admission(self, quotas) if quotas is not None else None
        #: Called for each block that is evicted, while its bytes are still there.
        self.evicted: Callable[[Block], None] | None = None
        #: Called when blocks in flight were taken away: who waits for them need not.
        self.taken_away: Callable[[], None] = lambda: None
        #: Whether a block can be read from the tier below; None when there is none.
        self.copied: Callable[[Block], bool] | None = None
        #: Keeps slots of dropped scopes from being free before they are overwritten.
        self.eraser: Eraser | None = None
        #: Clients of this host read by it; None where they ask. What leaves it does so before its slot is free.
        self.published: Published | None = None
        self.deltas = deltas
        self.counts = counts
        self.story = Story()
        #: Stamps of the policy against time.
        self.ages = Ages()
        self.shelves: dict[tuple[int, str], Shelf] = {}
        self.visible = 0
        self._leaving: set[Block] = set()
        self._retired: dict[Shelf, Departure] = {}
        self._adopted: list[tuple[Block, bytes]] = []
        policy.capacity = arena.bytes_total
        if quotas is not None:
            policy.limit = lambda salt: quotas.limit(tier, salt, self.now)

    @property
    def now(self) -> float:
        """The owner's monotonic seconds, as of the call under way."""
        return self.policy.now

    @now.setter
    def now(self, now: float) -> None:
        self.policy.now = now

    def shelf(self, entry: NamespaceEntry, salt: str) -> Shelf:
        """The tenant's shelf; a new one counts only once :meth:`admit` puts something on it."""
        return self.shelves.get((entry.handle, salt)) or Shelf(entry, salt)

    # ------------------------------------------------------------------ a block's life

    def admit(
        self, shelf: Shelf, hashes: Sequence[bytes], indexes: Sequence[int], before: int | None = None
    ) -> tuple[list[Block], BlockStatus]:
        """Give slots to new blocks, in order, evicting what is colder than this call; maybe not to all.

        The status is what the others get: FULL or QUOTA. Each admitted one gets a new generation, written to
        the table that readers compare, before any byte moves. ``before``: nothing leaves that this call or a later
        one has used; None: the call under way.
        """
        if shelf.retired:
            return [], BlockStatus.ABORTED
        slot_bytes, salt = self.slot_bytes(shelf.entry), shelf.salt
        before = self.policy.stamp if before is None else before
        admission = self.admission
        allowed = admission.allowed(salt, slot_bytes, len(hashes), before) if admission is not None else len(hashes)
        blocks: list[Block] = []
        sweep = SWEEP_AT_ADMISSION
        while len(blocks) < allowed:
            done = len(blocks)
            for slab, slots in self.arena.allocate(slot_bytes, allowed - done):
                self._enter(shelf, hashes, indexes, slab, slots, blocks)
            if len(blocks) == allowed:
                break
            if self._retired and sweep > 0:
                sweep -= self.sweep(min(sweep, allowed - len(blocks) + SWEEP_STEP))
            elif not self._make_room(slot_bytes, allowed - len(blocks), salt, before):
                break
        if blocks:
            self.shelves.setdefault((shelf.entry.handle, salt), shelf)
            self.story.tell(self.now, "reserved", shelf, blocks)
        return blocks, BlockStatus.QUOTA if len(blocks) == allowed else BlockStatus.FULL

    def _enter(
        self,
        shelf: Shelf,
        hashes: Sequence[bytes],
        indexes: Sequence[int],
        slab: SlotGrid,
        slots: Sequence[int],
        blocks: list[Block],
    ) -> None:
        """Records for some slots of one slab, for the hashes after those that ``blocks`` has already."""
        arena, done, count = self.arena, len(blocks), len(slots)
        keys = hashes[done : done + count]
        numbers = arena.next_generations(count)
        slab.renew(slots, numbers)
        rows = zip(keys, slots, numbers, indexes[done : done + count], strict=True)
        fresh = [Block(shelf, key, slab, slot, generation, index) for key, slot, generation, index in rows]
        slab.blocks.update(zip(slots, fresh, strict=True))
        slab.pinned += count
        shelf.blocks.update(zip(keys, fresh, strict=True))
        blocks.extend(fresh)
        nbytes = count * self.slot_bytes(shelf.entry)
        arena.bytes_used += nbytes
        self.policy.charge(shelf.salt, nbytes)

    def publish(self, shelf: Shelf, blocks: Sequence[Block]) -> None:
        """Make blocks whose bytes are in place visible, all of one call."""
        if not blocks:
            return
        stamp = self.policy.next_stamp()
        for block in blocks:
            assert block.state == IN_FLIGHT
            block.state = VISIBLE
            block.slab.pinned -= 1
            block.born = stamp
        self.policy.insert(blocks)
        self.visible += len(blocks)
        if self.published is not None:
            self.published.publish(shelf, blocks)
        self.deltas.record(True, shelf, [block.hash for block in blocks], self.tier)
        self.story.tell(self.now, "committed", shelf, blocks)

    def backdate(self, blocks: Sequence[Block], stamps: Sequence[int]) -> None:
        """Blocks of one call, in chain order, just published, were used last by earlier calls: copies are not news."""
        self.policy.backdate(blocks, stamps)
        for block in blocks:
            block.born = block.stamp

    def withdraw(self, block: Block, verb: str, why: Departure = Departure.UNKNOWN, cause: str = "") -> None:
        """Nobody finds the block from here on. Its slot goes now, or when its last reader lets go.

        ``why`` it left, and the salt whose need it was, are told to the directory. A block in flight keeps
        its slot until its reservation calls :meth:`drop`.
        """
        shelf = block.shelf
        del shelf.blocks[block.hash]
        if not shelf.retired:
            if not shelf.blocks:
                self._take_down(shelf)
            self.story.tell_one(self.policy.now, verb, shelf, block)
        elif not shelf.blocks:
            del self._retired[shelf]
        if block.state == VISIBLE:
            self.policy.discard(block)
            if self.published is not None:
                self.published.withdraw(block)
            if not shelf.retired:
                self.visible -= 1
                self.deltas.record(False, shelf, [block.hash], self.tier, why, cause)
            if not block.leases:
                block.slab.pinned += 1  # as every block that is neither visible nor free; undone by drop
                self._free(block)
                return
        elif block.state == IN_FLIGHT:
            self.taken_away()
        block.state = LEAVING
        self._leaving.add(block)

    def drop(self, block: Block, verb: str = "aborted") -> None:
        """Free the slot of a block that is in flight or leaving: nobody reads or writes it any more."""
        if block.state == IN_FLIGHT:
            self.withdraw(block, verb)
        assert block.state == LEAVING and not block.leases
        self._leaving.discard(block)
        self._free(block)

    def drop_all(self, blocks: Sequence[Block], verb: str) -> None:
        """:meth:`drop` the blocks of one reservation, in their order."""
        shelf = blocks[0].shelf
        if not self._plain(shelf) or not all(block.state == IN_FLIGHT for block in blocks):
            for block in blocks:
                self.drop(block, verb)
            return
        self._forget_run(shelf, blocks, verb)
        pending, slot_bytes = 0, blocks[0].slab.slot_bytes
        for block in blocks:
            block.slab.pinned -= 1
            pending += slot_bytes
            parent = block.parent
            if parent is not None:
                if parent.parked:  # it may be listed by what its tenant has now
                    self.policy.discharge(shelf.salt, pending)
                    pending = 0
                self.policy.unlink(block)
        if pending:
            self.policy.discharge(shelf.salt, pending)
        self._free_run(blocks)

    def _free(self, block: Block) -> None:
        if self.eraser is not None and self.eraser.keeps(block):
            block.state = LEAVING
            self._leaving.add(block)
            return
        block.state = GONE
        slab = block.slab
        slab.pinned -= 1
        self.policy.discharge(block.shelf.salt, slab.slot_bytes)
        self.arena.free(slab, block.slot)
        self.policy.unlink(block)

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
            if not parent.children:
                parent.child = child
            parent.children += 1

    def link_all(self, shelf: Shelf, chain: Sequence[bytes], previous: bytes) -> None:
        """:meth:`link` those of a chain that are here to the one before each; ``previous`` is before the first."""
        get = shelf.blocks.get
        before = get(previous) if previous else None
        for key, block in zip(chain, map(get, chain), strict=True):
            if block is not None:
                if not block.before:
                    block.before = previous
                if before is not None and block.parent is None and before.index < block.index:
                    block.parent = before
                    if not before.children:
                        before.child = block
                    before.children += 1
            before, previous = block, key

    # ------------------------------------------------------------------ shares

    def evict_own(self, salt: str, nbytes: int, why: Departure, before: int) -> int:
        """Evict a tenant's own blocks, in its order, until ``nbytes`` are freed or nothing may leave; bytes freed.

        None that call ``before`` or a later one has used; retired ones first.
        """
        freed = self._sweep_own(salt, nbytes) if self._retired else 0
        while freed < nbytes and (victim := self.policy.own_victim(salt, before)) is not None:
            slot_bytes = victim.slab.slot_bytes
            freed += slot_bytes * self._evict_from(victim, -(-(nbytes - freed) // slot_bytes), why, salt, own=True)
        return freed if freed >= nbytes else freed + self._evict_copied(salt, nbytes - freed, why, before)

    def _evict_copied(self, salt: str, nbytes: int, why: Departure, before: int, slot_bytes: int = 0) -> int:
        """Evict from the midst of a tenant's chains what can be read from the tier below; bytes freed.

        For when nothing else may leave: a chain longer than its room goes on, and its head stays. The latest come
        first, since they are the deepest, and only those with one child, which then follows what was before
        them: what has no copy stays protected by all that is after it. ``slot_bytes`` 0: of any slot size.
        """
        copied = self.copied
        if copied is None:
            return 0
        freed = 0
        for shelf in self.policy.shelves_of(salt):
            size = self.slot_bytes(shelf.entry)
            if slot_bytes not in (0, size):
                continue
            latest = islice(reversed(shelf.blocks.values()), COPIED_LOOKED_AT + nbytes // size)
            found = (block for block in latest if _passable(block, before) and copied(block))
            for block in list(islice(found, -(-(nbytes - freed) // size))):
                _pass_by(block)
                self._evict(block, why, salt)
                freed += size
            if freed >= nbytes:
                break
        return freed

    def _sweep_own(self, salt: str, nbytes: int) -> int:
        before = self.policy.charges.get(salt, 0)
        for shelf in [shelf for shelf in self._retired if shelf.salt == salt]:
            missing = nbytes - (before - self.policy.charges.get(salt, 0))
            if missing <= 0:
                break
            self._sweep_shelf(shelf, -(-missing // self.slot_bytes(shelf.entry)))
        return before - self.policy.charges.get(salt, 0)

    def take_wanted(self) -> dict[str, int]:
        """Bytes by salt that shares have refused, or that own blocks made room for, since the last call."""
        return self.admission.take_wanted() if self.admission is not None else {}

    def drain(self, limit_bytes: int) -> int:
        """Evict what tenants have above their shares, ``limit_bytes`` of it now and at most a slot more; bytes freed.

        Called every tick: usage above a lowered share is gone after excess / ``limit_bytes`` ticks, but for
        what is leased. Ends hints whose time is over, too.
        """
        self.policy.lapse()
        return self.admission.drain(limit_bytes) if self.admission is not None else 0

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to be given back a bit at a time."""
        return not self._retired and (self.admission is None or not self.admission.drains)

    # ------------------------------------------------------------------ room

    def _make_room(self, slot_bytes: int, wanted: int, cause: str, before: int) -> int:
        """Free up to ``wanted`` slots of a size, none of them used by call ``before`` or a later one; slots freed.

        A whole slab of another size goes when all in it is colder than this size's coldest, when its
        tenants are further above their fair shares, or when this size has nothing to give.
        """
        freed = 0
        policy = self.policy
        while freed < wanted:
            victim = policy.victim(slot_bytes, cause, before)
            if not freed or victim is None:
                slab = self._slab_to_take(slot_bytes, victim, cause, before)
                if slab is not None:
                    self._clear(slab, cause)
                    freed += self.arena.slots_in_a_slab(slot_bytes)
                    continue
            if victim is None:
                missing = (wanted - freed) * slot_bytes
                return freed + self._evict_copied(cause, missing, Departure.ROOM, before, slot_bytes) // slot_bytes
            freed += self._evict_from(victim, wanted - freed, _ROOM, cause, own=False)
        return freed

    def _slab_to_take(self, slot_bytes: int, victim: Block | None, cause: str, before: int) -> SlotGrid | None:
        if not self.arena.slots_in_a_slab(slot_bytes):
            return None
        idle: list[SlotGrid] = self.arena.others(slot_bytes, lambda slab: not slab.pinned and slab.hot < before)
        if not idle:
            return None
        if self.policy.charges.keys() == {cause}:
            coldest = min(idle, key=lambda slab: slab.hot)
            return coldest if victim is None or coldest.hot < victim.stamp else None
        for slab in heapq.nsmallest(SLABS_LOOKED_AT, idle, key=lambda slab: slab.hot):
            if self._may_take(slab, victim, cause):
                return slab
        return None

    def _may_take(self, slab: SlotGrid, victim: Block | None, cause: str) -> bool:
        """Floors hold without the slab, and nobody loses it who is closer to a fair share than the victim."""
        policy = self.policy
        losses: dict[str, int] = {}
        for block in slab.blocks.values():
            if not block.shelf.retired and block.shelf.salt != cause:
                losses[block.shelf.salt] = losses.get(block.shelf.salt, 0) + slab.slot_bytes
        if not all(policy.may_lose(salt, nbytes) for salt, nbytes in losses.items()):
            return False
        if victim is None:
            return True
        over = policy.over(victim.shelf.salt)
        if slab.hot < victim.stamp:
            return all(policy.over(salt) >= min(over, nbytes) for salt, nbytes in losses.items())
        return bool(losses) and all(policy.over(salt) > over + self.arena.slab_bytes for salt in losses)

    def _clear(self, slab: SlotGrid, cause: str) -> None:
        self.counts.slabs_taken_over += 1
        for block in list(slab.blocks.values()):
            if block.shelf.retired:
                self.withdraw(block, "swept")
            else:
                self._evict(block, Departure.ROOM, cause)

    def _evict_from(self, victim: Block, limit: int, why: Departure, cause: str, own: bool) -> int:
        """Evict what the policy named, and up to ``limit`` - 1 more that it would name next; how many."""
        shelf = victim.shelf
        runs = limit > 1 and shelf.salt == cause and self._plain(shelf)
        blocks = self.policy.take(victim, limit, own) if runs else ()
        if not blocks:
            self._evict(victim, why, cause)
            return 1
        self._count_evicted(blocks, why)
        if self.published is not None:
            self.published.withdraw_all(blocks)
        hashes = self._forget_run(shelf, blocks, "evicted" if why is _ROOM else _VERBS[why])
        self.visible -= len(blocks)
        while hashes:  # a batch ends where it would, told of them one by one
            room = self.deltas.room
            self.deltas.record(False, shelf, hashes[:room], self.tier, why, cause)
            hashes = hashes[room:]
        self.policy.discharge(shelf.salt, len(blocks) * blocks[0].slab.slot_bytes)
        self._free_run(blocks)
        return len(blocks)

    def _plain(self, shelf: Shelf) -> bool:
        """Whether blocks of the shelf may leave as a run: it is not retired, and nothing of it is to be overwritten."""
        return not shelf.retired and (self.eraser is None or not self.eraser.left((shelf,)))

    def _forget_run(self, shelf: Shelf, blocks: Sequence[Block], verb: str) -> list[bytes]:
        """Nobody finds blocks of a plain shelf from here on; their hashes."""
        hashes = [block.hash for block in blocks]
        for key in hashes:
            del shelf.blocks[key]
        if not shelf.blocks:
            self._take_down(shelf)
        self.story.tell_each(self.policy.now, verb, shelf, blocks)
        return hashes

    def _free_run(self, blocks: Sequence[Block]) -> None:
        """Slots of blocks that nobody finds, reads or writes, and that are unlinked and discharged."""
        slab, slots = blocks[0].slab, list[int]()
        for block in blocks:
            block.state = GONE
            if block.slab is not slab:
                self.arena.free_all(slab, slots)
                slab, slots = block.slab, []
            slots.append(block.slot)
        self.arena.free_all(slab, slots)

    def _count_evicted(self, blocks: Sequence[Block], why: Departure) -> None:
        counts = self.counts
        counts.evicted += len(blocks)
        if why is _QUOTA:
            counts.evicted_quota += len(blocks)
        elif why is _LOWERED:
            counts.evicted_lowered += len(blocks)
        if self.evicted is not None:
            for block in blocks:
                self.evicted(block)

    def _evict(self, block: Block, why: Departure, cause: str) -> None:
        self._count_evicted((block,), why)
        verb = "evicted" if why is _ROOM else _VERBS[why]
        self.withdraw(block, verb, block.hinted if block.stamp == HINTED else why, cause)

    def coldest_blocks(self, limit: int) -> Iterator[Block]:
        """Up to ``limit`` blocks from the cold end of each queue in turn, for who wants to copy them elsewhere.

        Nothing is parked or changed by it; not to be used across other calls.
        """
        return self.policy.coldest_blocks(limit)

    # ------------------------------------------------------------------ whole shelves

    def retire(self, shelf: Shelf, why: Departure) -> int:
        """Nobody finds the shelf from here on; how many blocks had a slot in it. O(1), and O(blocks under lease).

        No delta is recorded: whoever asked for it forgets the whole scope. Its blocks are victims before all
        others, and go by :meth:`sweep`; what is being written ends ABORTED. Readers that hold slots find another
        generation from now on, and count what they copied as lost.
        """
        key = (shelf.entry.handle, shelf.salt)
        if shelf.retired or self.shelves.get(key) is not shelf:
            return 0
        self._take_down(shelf)
        shelf.retired = True
        self._retired[shelf] = why
        self.visible -= self.policy.retire(shelf)
        self.counts.retired += len(shelf.blocks)
        for lease in shelf.leases:
            for block in lease.blocks:
                if block.shelf is shelf:
                    block.slab.generations[block.slot] = self.arena.next_generation()
        self.story.tell(self.now, _VERBS.get(why, "dropped"), shelf, list(islice(shelf.blocks.values(), STORY_BLOCKS)))
        self.taken_away()
        return len(shelf.blocks)

    def _take_down(self, shelf: Shelf) -> None:
        """Nobody finds anything by this shelf from here on."""
        del self.shelves[shelf.entry.handle, shelf.salt]
        if self.published is not None:
            self.published.end(shelf)

    def sweep(self, limit: int) -> int:
        """Let go of up to ``limit`` blocks of retired shelves; how many. What is held goes with its holder."""
        swept = 0
        while self._retired and swept < limit:
            swept += self._sweep_shelf(next(iter(self._retired)), limit - swept)
        return swept

    def _sweep_shelf(self, shelf: Shelf, limit: int) -> int:
        blocks = list(islice(shelf.blocks.values(), limit))
        for block in blocks:
            self.withdraw(block, "swept")
        return len(blocks)

    @property
    def retired(self) -> int:
        """Shelves that are retired and not swept yet."""
        return len(self._retired)

    # ------------------------------------------------------------------ devices

    def adopt(
        self,
        shelf: Shelf,
        slab: SlotGrid,
        slot: int,
        key: bytes,
        generation: int,
        checksum: int,
        index: int,
        parent: bytes = b"",
    ) -> Block | None:
        """Enter a block that was found in its slot at the start; None when its key is here already.

        The slot is one that :meth:`Arena.adopt` took; one that is not adopted must be freed by
        :meth:`Arena.disown`. It is found by nobody before :meth:`settle`.
        """
        if shelf.retired or key in shelf.blocks:
            return None
        slab.generations[slot] = generation
        block = Block(shelf, key, slab, slot, generation, index)
        block.checksum = checksum
        block.before = parent
        slab.blocks[slot] = block
        slab.pinned += 1
        shelf.blocks[key] = block
        self.shelves.setdefault((shelf.entry.handle, shelf.salt), shelf)
        self.arena.bytes_used += slab.slot_bytes
        self.policy.charge(shelf.salt, slab.slot_bytes)
        self._adopted.append((block, parent))
        return block

    def settle(self) -> int:
        """Make all adopted blocks visible, the newest generation as the most recent, and chains of them; how many.

        No delta is recorded: a snapshot tells the directory of them.
        """
        adopted, self._adopted = self._adopted, []
        for block, parent in adopted:
            if parent:
                self.link(block.shelf.blocks.get(parent), block)
        blocks = sorted((block for block, _ in adopted if block.state == IN_FLIGHT), key=lambda block: block.generation)
        for block in blocks:
            block.state = VISIBLE
            block.slab.pinned -= 1
            self.policy.next_stamp()
            self.policy.insert((block,))
        self.visible += len(blocks)
        if self.admission is not None:
            self.admission.look_again()
        return len(blocks)

    def lose(self, slab: SlotGrid) -> int:
        """Its device failed: everything in it is withdrawn, and its room is gone for good; blocks lost.

        What is held or being written there leaves with its holder.
        """
        self.arena.exclude(slab)
        self.policy.capacity = self.arena.bytes_total
        lost = 0
        for block in list(slab.blocks.values()):
            if block.state in (VISIBLE, IN_FLIGHT):
                self.withdraw(block, "device failed", Departure.DEVICE)
                lost += 1
        self.counts.evicted_device += lost
        return lost

    # ------------------------------------------------------------------ hints

    def hint(self, shelf: Shelf, hashes: Sequence[bytes], kind: HintKind, until: float) -> list[bytes]:
        """Do as the owner of blocks says, in chain order; those it changed. Only against its other blocks.

        KEEP until a time: at most half of what the tenant may use, older hints lapse first.
        """
        found = [shelf.blocks.get(key) for key in dict.fromkeys(hashes)]
        blocks = [block for block in found if block is not None and block.state == VISIBLE]
        if shelf.retired or not blocks:
            return []
        self.policy.next_stamp()
        if kind == HintKind.KEEP:
            blocks = blocks[: self.policy.keep(blocks, until)]
        elif kind == HintKind.FORGET:
            blocks = [block for block in blocks if block.keep is not None]
            self.policy.forget(blocks)
        else:
            self.cool(blocks, Departure.HINT)
        return [block.hash for block in blocks]

    def orphaned(self, shelf: Shelf, hashes: Sequence[bytes]) -> int:
        """Nobody finds these, for want of other shards': they leave first, but for those a hint keeps; how many."""
        found = [shelf.blocks.get(key) for key in dict.fromkeys(hashes)]
        blocks = [block for block in found if block is not None and block.state == VISIBLE and block.keep is None]
        self.cool(blocks, Departure.ORPHAN)
        return len(blocks)

    def cool(self, blocks: Sequence[Block], why: Departure) -> None:
        """Visible blocks of one shelf, in chain order, leave before all others of the tenant, for this reason."""
        self.policy.cool(blocks)
        for block in blocks:
            block.hinted = why

    # ------------------------------------------------------------------ what there is

    def holdings(self, key: tuple[int, str]) -> bytes:
        """Packed hashes of all that is visible on one shelf; empty when it is gone."""
        shelf = self.shelves.get(key)
        if shelf is None:
            return b""
        return b"".join([block.hash for block in shelf.blocks.values() if block.state == VISIBLE])

    @property
    def leaving(self) -> Collection[Block]:
        """Blocks that nobody finds, and whose slots somebody still holds."""
        return self._leaving

    def retired_shelves(self) -> list[Shelf]:
        """Shelves that nobody finds and that have not been swept yet."""
        return list(self._retired)

    def blocks(self) -> Iterator[Block]:
        """Every block that has a slot."""
        for shelf in (*self.shelves.values(), *self._retired):
            yield from shelf.blocks.values()
        yield from self._leaving

    def check(self) -> None:
        """Assert that slots, records, charges, LRU and chains agree. O(blocks)."""
        self.arena.check()
        if self.eraser is not None:
            self.eraser.check()
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
            assert block.row in (b"", block.made_row()), "readers are told of another slot"
            charged[block.shelf.salt] = charged.get(block.shelf.salt, 0) + block.slab.slot_bytes
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
            if block.state != VISIBLE or block.leases:
                pinned[block.slab.index] = pinned.get(block.slab.index, 0) + 1
        assert charged == dict(self.policy.charges), f"charges {dict(self.policy.charges)}, allocated {charged}"
        assert sum(charged.values()) == self.arena.bytes_used
        assert all(block.children == children.get(block, 0) for block in everything), "children are miscounted"
        assert all(block.child is None or block.child.parent is block for block in everything), "a child of another"
        assert all(slab.pinned == pinned.get(slab.index, 0) for slab in self.arena.slabs), "pins are miscounted"
        assert self.visible == sum(block.state == VISIBLE and not block.shelf.retired for block in everything)
        if self.published is not None:
            self.published.check(everything)
        assert all(shelf.retired and shelf.blocks for shelf in self._retired)
        for key, shelf in self.shelves.items():
            assert shelf.blocks and not shelf.retired and key == (shelf.entry.handle, shelf.salt)
            assert all(block.state != LEAVING and block.shelf is shelf for block in shelf.blocks.values())


def _passable(block: Block, before: int) -> bool:
    """Protected by one known child alone, and neither used by call ``before`` or a later one nor kept by a hint."""
    return (
        block.children == 1
        and block.child is not None
        and block.state == VISIBLE
        and not block.leases
        and block.stamp < before
        and block.keep is None
    )


def _pass_by(block: Block) -> None:
    """Its only child follows the block before it from here on."""
    child, parent = block.child, block.parent
    assert child is not None
    child.parent = parent
    block.parent = block.child = None
    block.children = 0
    if parent is not None and parent.child is block:
        parent.child = child
