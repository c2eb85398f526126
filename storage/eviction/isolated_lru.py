"""Who leaves: charges and an order for each tenant apart, and a fair choice between tenants.

A tenant's blocks lie in one queue a shelf, each in an :class:`~kvstrata.storage.eviction.orders.Order`; fronts of the
queues are compared by the stamp of the call that used them last. All blocks of one call have one stamp.

Between tenants the one most over its fair share gives way first: its floor, and an equal part of what the
floors leave, counted over tenants that used the node lately; one that has been idle counts with its floor
alone. A tenant that a block less would bring below its floor gives nothing to others.

Both choices are lazy heaps: an entry is valid while its owner names it, and is corrected when it comes up.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Final

from kvstrata.storage.eviction.keeps import Keeps
from kvstrata.storage.eviction.orders import HINTED, LruOrder, Order
from kvstrata.storage.eviction.queues import Group, Queue, Tenant, coldest, in_turn
from kvstrata.storage.records import VISIBLE, Block, Shelf

#: A heap is rebuilt when it holds this many entries and most of them are stale.
HEAP_SLACK: Final = 64
#: A tenant that has used nothing for so long has no part in what floors leave.
IDLE_S: Final = 600.0


class IsolatedLRU:
    """The ``EvictionPolicy`` of both tiers. All calls O(1) a block, amortised, but for the heaps' logs.

    ``now`` and ``capacity`` (bytes of the tier) are set by the inventory. Blocks of one call are of one shelf.
    """

    def __init__(self, order: Callable[[], Order] = LruOrder) -> None:
        self.charges: Counter[str] = Counter()
        self.stamp = 0
        self.now = 0.0
        self.capacity = 0
        self._make_order = order
        self._floor_by_salt: Mapping[str, int] = {}
        self._floors = 0
        self._tenants: dict[str, Tenant] = {}
        self._active: OrderedDict[Tenant, None] = OrderedDict()
        #: slot size -> heaps of the groups of active and of idle tenants, by charge above floor, greatest first
        self._heaps: dict[int, tuple[list[tuple[int, int, Group]], list[tuple[int, int, Group]]]] = {}
        #: A salt's limit in bytes, None where it has none.
        self.limit: Callable[[str], int | None] = lambda salt: None
        self._keeps = Keeps(self._room)
        self._serial = count(1)

    # ------------------------------------------------------------------ charges, floors, fair shares

    def charge(self, salt: str, nbytes: int) -> None:
        """The allocator holds so much more for the tenant."""
        self.charges[salt] += nbytes
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = self._tenants[salt] = Tenant(salt, self._floor_by_salt.get(salt, 0), self.now)
            self._active[tenant] = None
            if len(self._tenants) == 2:  # one alone was not listed
                for other in self._tenants.values():
                    self._relist(other)
            return
        self._use(tenant)
        if len(self._tenants) > 1:
            for group in tenant.groups.values():
                self._list_group(group)

    def discharge(self, salt: str, nbytes: int) -> None:
        """So much less. A tenant without charges is forgotten."""
        left = self.charges[salt] - nbytes
        if left:
            self.charges[salt] = left
            return
        del self.charges[salt]
        tenant = self._tenants.pop(salt)
        self._active.pop(tenant, None)

    def set_floors(self, floors: Mapping[str, int]) -> None:
        """Floors have changed: these are all there are. O(tenants)."""
        self._floor_by_salt = floors
        self._floors = sum(floors.values())
        self._heaps.clear()
        for tenant in self._tenants.values():
            tenant.floor = floors.get(tenant.salt, 0)
            self._relist(tenant)

    def over(self, salt: str) -> int:
        """Bytes that a tenant has above its fair share; negative below it."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            return -self._floor_by_salt.get(salt, 0) - self._equal_part(salt)
        return self.charges[salt] - tenant.floor - (0 if tenant.idle else self._equal_part(salt))

    def may_lose(self, salt: str, nbytes: int) -> bool:
        """True when its floor still holds without so many bytes."""
        tenant = self._tenants.get(salt)
        return tenant is not None and self.charges[salt] - tenant.floor >= nbytes

    def _equal_part(self, salt: str) -> int:
        """What each active tenant, with ``salt`` among them, may have above its floor."""
        tenant = self._tenants.get(salt)
        sharing = len(self._active) + (tenant is None or tenant.idle)
        return max(0, self.capacity - self._floors) // max(1, sharing)

    def _room(self, tenant: Tenant) -> int:
        """Bytes the tenant may use: its fair share, or more where it has more, and no more than its limit."""
        used, limit = self.charges[tenant.salt], self.limit(tenant.salt)
        fair = max(used, tenant.floor + self._equal_part(tenant.salt))
        return fair if limit is None else min(fair, limit)

    def _use(self, tenant: Tenant) -> None:
        tenant.used_at = self.now
        if tenant.idle:
            tenant.idle = False
            self._active[tenant] = None
            self._relist(tenant)
        else:
            self._active.move_to_end(tenant)

    def _let_idle(self) -> None:
        active, since = self._active, self.now - IDLE_S
        while active and (tenant := next(iter(active))).used_at <= since:
            del active[tenant]
            tenant.idle = True
            self._relist(tenant)

    # ------------------------------------------------------------------ order

    def next_stamp(self) -> int:
        """The stamp of the call that begins now."""
        self.stamp += 1
        return self.stamp

    def insert(self, blocks: Sequence[Block]) -> None:
        """Take in charged blocks of one call, in chain order, as its newest."""
        queue = blocks[0].shelf.queue or self._open(blocks[0])
        queue.count += len(blocks)
        for block in blocks:
            block.queue = queue
        queue.order.insert(blocks, self.stamp)
        if queue.entry is None:
            self._list(queue, self.stamp)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make blocks of one call, in chain order, the newest: the deepest of them leaves first."""
        if not blocks:
            return
        queue = blocks[0].queue
        assert queue is not None and queue.group is not None
        if queue.kept is None:
            queue.order.touch(blocks, self.stamp)
        else:
            queue.order.touch([block for block in blocks if block.keep is None], self.stamp)
            queue.kept.touch([block for block in blocks if block.keep is not None], self.stamp)
        self._use(queue.group.tenant)
        if queue.entry is None:
            self._list(queue, self.stamp)

    def backdate(self, blocks: Sequence[Block], stamps: Sequence[int]) -> None:
        """Blocks of one call, in chain order, just inserted, were used last by earlier calls, of these stamps.

        Those of the older half stand at the cold end of their queue from here on, the deepest the coldest.
        """
        for block, stamp in zip(blocks, stamps, strict=True):
            queue = block.queue
            assert queue is not None and block.keep is None
            if stamp >= block.stamp:
                continue
            front = queue.entry[0] if queue.entry is not None else HINTED
            if 2 * stamp < front + block.stamp:
                queue.order.remove(block)
                block.stamp = stamp
                queue.order.unpark(block)
                self._list(queue, stamp)

    def discard(self, block: Block) -> None:
        """Forget a block that is no longer visible."""
        queue = block.queue
        assert queue is not None
        if block.keep is None:
            queue.order.remove(block)
        else:
            queue.home(block).remove(block)
            self._keeps.end(block)
        block.queue = None
        queue.count -= 1
        if not queue.count:
            queue.shelf.queue = None
            self._close(queue)

    def unprotect(self, block: Block) -> None:
        """Its last lease or its last child has gone: a parked block is the coldest again."""
        queue = block.queue
        if queue is None or not block.parked or block.leases or block.children:
            return
        queue.home(block).unpark(block)
        if queue.entry is None or block.stamp < queue.entry[0]:
            self._list(queue, block.stamp)

    def unlink(self, block: Block) -> None:
        """The block has left: it protects the one before it no longer."""
        parent, block.parent = block.parent, None
        if parent is None:
            return
        parent.children -= 1
        if parent.child is block:
            parent.child = None
        if not parent.children and parent.parked:
            parent.stamp = max(parent.stamp, block.stamp)
            parent.slab.hot = max(parent.slab.hot, parent.stamp)
            self.unprotect(parent)

    def take(self, victim: Block, limit: int, own: bool) -> list[Block]:
        """Forget and unlink a victim, and up to ``limit`` - 1 of its call that are next each time, in that order.

        ``own``: it is what :meth:`own_victim` gave, else what :meth:`victim` gave to its own tenant. Nothing happens,
        and none are returned, where a block that leaves may change whose turn it is.
        """
        queue, stamp = victim.queue, victim.stamp
        assert queue is not None and queue.group is not None
        others = len(queue.group.tenant.groups) > 1 if own else len(self._tenants) > 1
        if others or victim.keep is not None or stamp == HINTED:
            return []
        order, taken, block = queue.order, [victim], victim
        while True:
            order.remove(block)
            block.queue = None
            self.unlink(block)
            front = order.front() if len(taken) < limit else None
            if front is None or front.stamp != stamp:
                break
            taken.append(block := front)
        queue.count -= len(taken)
        if not queue.count:
            queue.shelf.queue = None
            self._close(queue)
        return taken

    def retire(self, shelf: Shelf) -> int:
        """The shelf's blocks are victims before all others, and its owner's business; how many. O(1)."""
        queue = shelf.queue
        if queue is None:
            return 0
        self._close(queue)
        return queue.count

    def _open(self, block: Block) -> Queue:
        shelf, slot_bytes = block.shelf, block.slab.slot_bytes
        tenant = self._tenants[shelf.salt]
        group = tenant.groups.get(slot_bytes)
        if group is None:
            group = tenant.groups[slot_bytes] = Group(tenant, slot_bytes)
        queue = shelf.queue = Queue(shelf, group, self._make_order())
        group.queues[queue] = None
        return queue

    def _close(self, queue: Queue) -> None:
        group, queue.group, queue.entry = queue.group, None, None
        if group is None:
            return
        del group.queues[queue]
        if not group.queues:
            group.entry = None
            del group.tenant.groups[group.slot_bytes]

    # ------------------------------------------------------------------ who leaves

    def victim(self, slot_bytes: int, salt: str, before: int) -> Block | None:
        """The next to leave for ``salt`` among blocks of one slot size; None when there is none.

        Never one of ``salt``'s that was used by call ``before`` or a later one.
        """
        own = self._tenants.get(salt)
        own_group = own.groups.get(slot_bytes) if own is not None else None
        if own is not None and len(self._tenants) == 1:
            return coldest(own_group, before, self._serial) if own_group is not None else None
        self._let_idle()
        heaps = self._heaps.get(slot_bytes)
        aside: list[Group] = []
        victim = None
        while heaps is not None and (group := self._most_over(heaps, slot_bytes, salt)) is not None:
            victim = coldest(group, before, self._serial)
            if victim is not None:
                break
            group.entry = None
            aside.append(group)
        for group in aside:
            if group.heap or any(queue.kept for queue in group.queues):  # else: listed again when that changes
                self._list_group(group)
        if victim is None and own_group is not None:
            return coldest(own_group, before, self._serial)  # at its floor: it may replace its own
        return victim

    def own_victim(self, salt: str, before: int) -> Block | None:
        """The tenant's next to leave, of any slot size; those that a hint keeps come last."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            return None
        fronts = [coldest(group, before, self._serial) for group in tenant.groups.values()]
        return min(
            (block for block in fronts if block is not None),
            key=lambda block: (block.keep is not None, block.stamp),
            default=None,
        )

    def shelves_of(self, salt: str) -> list[Shelf]:
        """The tenant's shelves on which something is visible."""
        tenant = self._tenants.get(salt)
        return [queue.shelf for group in tenant.groups.values() for queue in group.queues] if tenant else []

    def coldest_blocks(self, limit: int) -> Iterator[Block]:
        """Blocks from the cold end of each queue in turn, up to ``limit`` of all; nothing changes by it.

        Those that a hint keeps are left out. Not to be used across other calls.
        """
        ends = [
            iter(queue.order.blocks())
            for tenant in self._tenants.values()
            for group in tenant.groups.values()
            for queue in group.queues
        ]
        return islice(in_turn(ends), limit)

    def _most_over(
        self, heaps: tuple[list[tuple[int, int, Group]], list[tuple[int, int, Group]]], slot_bytes: int, salt: str
    ) -> Group | None:
        """Of the groups whose tenant's floor allows it, that of the one most over its fair share."""
        active, idle = self._top(heaps[0]), self._top(heaps[1])
        if active is not None and -active[0] < slot_bytes:
            active = None
        if idle is not None and -idle[0] < slot_bytes:
            idle = None
        if active is None or idle is None:
            entry = active or idle
        else:
            entry = active if -active[0] - self._equal_part(salt) >= -idle[0] else idle
        return entry[2] if entry is not None else None

    def _top(self, heap: list[tuple[int, int, Group]]) -> tuple[int, int, Group] | None:
        while heap:
            entry = heap[0]
            group = entry[2]
            if group.entry is not entry:
                heapq.heappop(heap)
                continue
            above = self.charges[group.tenant.salt] - group.tenant.floor
            if above == -entry[0]:
                return entry
            group.entry = (-above, next(self._serial), group)
            heapq.heapreplace(heap, group.entry)
        return None

    def _list(self, queue: Queue, stamp: int) -> None:
        """Enter a queue's front; and its group, when that had nothing to give."""
        group = queue.group
        if group is None:
            return
        heap = group.heap
        queue.entry = (stamp, next(self._serial), queue)
        heapq.heappush(heap, queue.entry)
        if len(heap) > 2 * len(group.queues) + HEAP_SLACK:
            heap[:] = [entry for entry in heap if entry is entry[2].entry]
            heapq.heapify(heap)
        if group.entry is None:
            self._list_group(group)

    def _list_group(self, group: Group) -> None:
        tenant = group.tenant
        above = self.charges[tenant.salt] - tenant.floor
        if group.entry is not None and -group.entry[0] >= above:
            return
        heaps = self._heaps.setdefault(group.slot_bytes, ([], []))
        heap = heaps[tenant.idle]
        group.entry = (-above, next(self._serial), group)
        heapq.heappush(heap, group.entry)
        if len(heap) > 2 * len(self._tenants) + HEAP_SLACK:
            heap[:] = [entry for entry in heap if entry is entry[2].entry]
            heapq.heapify(heap)

    def _relist(self, tenant: Tenant) -> None:
        for group in tenant.groups.values():
            group.entry = None
            self._list_group(group)

    # ------------------------------------------------------------------ hints

    def keep(self, blocks: Sequence[Block], until: float) -> int:
        """Hold blocks of one shelf, in chain order, back until a time; how many: a prefix of them.

        What a tenant keeps is at most half of what it may use: older hints lapse first.
        """
        if not blocks:
            return 0
        queue = blocks[0].queue
        assert queue is not None and queue.group is not None
        tenant = queue.group.tenant
        blocks = blocks[: self._keeps.most(tenant) // queue.group.slot_bytes]
        if not blocks:
            return 0
        for block in blocks:
            queue.home(block).remove(block)
        self._keeps.begin(tenant, blocks, until)
        if queue.kept is None:
            queue.kept = LruOrder()
        queue.kept.insert(blocks, self.stamp)
        if queue.group.entry is None:
            self._list_group(queue.group)
        self._release_all(self._keeps.above(tenant))
        return len(blocks)

    def forget(self, blocks: Sequence[Block]) -> int:
        """End what hints hold back of these; how many."""
        kept = [block for block in blocks if block.keep is not None]
        self._release(kept)
        return len(kept)

    def cool(self, blocks: Sequence[Block]) -> int:
        """Blocks of one shelf, in chain order, leave before all others of the tenant; how many."""
        if not blocks:
            return 0
        self.forget(blocks)
        queue = blocks[0].queue
        assert queue is not None
        for block in blocks:
            queue.order.cool(block)
        self._list(queue, HINTED)
        return len(blocks)

    def lapse(self) -> int:
        """End hints whose time is over, and those above what their tenants may keep now; how many blocks."""
        lapsed = self._release_all(self._keeps.over_by(self.now))
        for tenant in list(self._keeps.tenants):
            lapsed += self._release_all(self._keeps.above(tenant))
        return lapsed

    def _release_all(self, ending: Iterator[list[Block]]) -> int:
        lapsed = 0
        for blocks in ending:
            lapsed += len(blocks)
            self._release(blocks)
        return lapsed

    def _release(self, blocks: Sequence[Block]) -> None:
        """Back to where they would be: the hot end when used lately, else the cold one."""
        hot: list[Block] = []
        for block in blocks:  # in chain order, so that the deepest is the coldest
            queue = block.queue
            assert queue is not None
            queue.home(block).remove(block)
            self._keeps.end(block)
            front = queue.entry[0] if queue.entry is not None else HINTED
            if 2 * block.stamp >= front + self.stamp:
                hot.append(block)
                continue
            queue.order.unpark(block)
            if queue.entry is None or block.stamp < queue.entry[0]:
                self._list(queue, block.stamp)
        for block in reversed(hot):
            queue = block.queue
            assert queue is not None
            youngest = block.slab.hot
            queue.order.insert((block,), block.stamp)
            block.slab.hot = youngest
            if queue.entry is None:
                self._list(queue, block.stamp)

    # ------------------------------------------------------------------ proof

    def check(self) -> None:
        """Assert that each visible block is in exactly one queue, and all that may leave can be found. O(blocks)."""
        assert all(amount > 0 for amount in self.charges.values()), f"charges of nothing: {self.charges}"
        assert self._tenants.keys() == self.charges.keys(), "tenants without charges, or charges without tenants"
        self._keeps.check(self._tenants.values())
        for salt, tenant in self._tenants.items():
            assert tenant.salt == salt and tenant.floor == self._floor_by_salt.get(salt, 0)
            assert tenant.idle != (tenant in self._active)
            for slot_bytes, group in tenant.groups.items():
                assert group.tenant is tenant and group.slot_bytes == slot_bytes and group.queues
                self._check_group(group)

    def _check_group(self, group: Group) -> None:
        listed = {id(entry) for entry in group.heap}
        may_leave = False
        for queue in group.queues:
            assert queue.group is group and queue.shelf.queue is queue and not queue.shelf.retired
            queue.order.check()
            members = list(queue.order.blocks())
            assert len(members) == len(queue.order)
            kept = list(queue.kept.blocks()) if queue.kept is not None else []
            assert queue.count and len(members) + len(kept) <= queue.count
            for block in (*members, *kept):
                assert block.queue is queue and not block.parked and block.state == VISIBLE
                assert block.stamp <= self.stamp
            assert all(block.keep is None for block in members) and all(block.keep is not None for block in kept)
            assert not members or id(queue.entry) in listed, f"{group.tenant.salt!r}: a queue is not listed"
            may_leave = may_leave or any(not block.leases and not block.children for block in (*members, *kept))
        if may_leave and len(self._tenants) > 1:
            heap = self._heaps[group.slot_bytes][group.tenant.idle]
            assert any(entry is group.entry for entry in heap), f"{group.tenant.salt!r} is not listed"
            assert group.entry is not None
            assert -group.entry[0] >= self.charges[group.tenant.salt] - group.tenant.floor
