"""A tenant's blocks as the eviction policy holds them: a queue a shelf, grouped by slot size, and what hints keep."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvstrata.storage.eviction.orders import LruOrder, Order
from kvstrata.storage.records import Block, Shelf


class Keep:
    """Blocks of one shelf that one hint of a tenant holds back."""

    __slots__ = ("blocks", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.blocks: dict[Block, None] = {}


class Queue:
    """One shelf's visible blocks. ``kept`` leave after all others of the tenant; ``group`` None: retired."""

    __slots__ = ("count", "entry", "group", "kept", "order", "shelf")

    def __init__(self, shelf: Shelf, group: Group, order: Order) -> None:
        self.shelf = shelf
        self.group: Group | None = group
        self.order = order
        self.kept: LruOrder | None = None
        self.count = 0
        self.entry: tuple[int, int, Queue] | None = None

    def home(self, block: Block) -> Order:
        """The order that holds the block."""
        if block.keep is None:
            return self.order
        assert self.kept is not None
        return self.kept


class Group:
    """One tenant's queues of one slot size; ``heap`` has the stamps of their fronts."""

    __slots__ = ("entry", "heap", "queues", "slot_bytes", "tenant")

    def __init__(self, tenant: Tenant, slot_bytes: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.queues: dict[Queue, None] = {}
        self.heap: list[tuple[int, int, Queue]] = []
        self.entry: tuple[int, int, Group] | None = None


class Tenant:
    """``keeps`` are its hints, oldest first; ``kept_bytes`` what they hold back."""

    __slots__ = ("floor", "groups", "idle", "keeps", "kept_bytes", "salt", "used_at")

    def __init__(self, salt: str, floor: int, now: float) -> None:
        self.salt = salt
        self.floor = floor
        self.used_at = now
        self.idle = False
        self.groups: dict[int, Group] = {}
        self.keeps: dict[Keep, None] = {}
        self.kept_bytes = 0


def coldest(group: Group, before: int, serial: Iterator[int]) -> Block | None:
    """The group's next to leave that no call from ``before`` on has used; kept ones when there is no other."""
    heap = group.heap
    while heap:
        entry = heap[0]
        queue = entry[2]
        if queue.entry is not entry:
            heapq.heappop(heap)
            continue
        front = queue.order.front()
        if front is None:
            heapq.heappop(heap)
            queue.entry = None
        elif front.stamp != entry[0]:
            queue.entry = (front.stamp, next(serial), queue)
            heapq.heapreplace(heap, queue.entry)
        elif front.stamp < before:
            return front
        else:
            break
    kept = [front for queue in group.queues if queue.kept is not None and (front := queue.kept.front()) is not None]
    return min((block for block in kept if block.stamp < before), key=lambda block: block.stamp, default=None)


def in_turn(ends: list[Iterator[Block]]) -> Iterator[Block]:
    while ends:
        going = []
        for end in ends:
            block = next(end, None)
            if block is not None:
                going.append(end)
                yield block
        ends = going
