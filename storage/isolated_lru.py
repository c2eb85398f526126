"""Least-recently-used order, kept for each tenant apart, by chains.

All blocks of one call get one stamp, and among equals the deeper block goes first, so that suffixes are
evicted before their prefixes. Calls that extend a chain do not carry the blocks before; so a block that
has a resident child is not a victim either: met at the cold end, it is parked, and comes back to the cold
end when its last child has gone. Leased blocks are parked the same way, which makes a scan over any
number of protected blocks cost each of them once.

Across tenants the victim is that of the queue whose coldest block has the oldest stamp, found by a lazy
heap. Charges are kept a tenant: later admission by quota needs them, and so does every check.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

from kvstrata.storage.records import VISIBLE, Block

#: The heap is rebuilt when it holds this many entries and most of them are stale.
HEAP_SLACK: Final = 64


class EvictionPolicy(Protocol):
    """Who leaves when there is no room. Told of every visible block, and of every byte charged."""

    charges: Counter[str]
    stamp: int

    def charge(self, salt: str, nbytes: int) -> None: ...
    def discharge(self, salt: str, nbytes: int) -> None: ...
    def next_stamp(self) -> int: ...
    def insert(self, blocks: Sequence[Block]) -> None: ...
    def touch(self, blocks: Sequence[Block]) -> None: ...
    def discard(self, block: Block) -> None: ...
    def unprotect(self, block: Block) -> None: ...
    def coldest(self, slot_bytes: int) -> Block | None: ...
    def check(self) -> None: ...


class Queue:
    """One tenant's visible blocks of one slot size, coldest first. ``listed`` is its stamp in the heap."""

    __slots__ = ("count", "listed", "order", "salt", "serial", "slot_bytes")

    def __init__(self, salt: str, slot_bytes: int, serial: int) -> None:
        self.salt = salt
        self.slot_bytes = slot_bytes
        self.serial = serial
        self.order: OrderedDict[Block, None] = OrderedDict()
        self.count = 0
        self.listed: int | None = None


class IsolatedLRU:
    """The reference :class:`EvictionPolicy`. All calls O(1) a block, amortised, but for the heap's log."""

    def __init__(self) -> None:
        self.charges: Counter[str] = Counter()
        self.stamp = 0
        self._queues: dict[tuple[int, str], Queue] = {}
        self._heaps: dict[int, list[tuple[int, int, Queue]]] = {}
        self._serial = 0

    # ------------------------------------------------------------------ charges

    def charge(self, salt: str, nbytes: int) -> None:
        self.charges[salt] += nbytes

    def discharge(self, salt: str, nbytes: int) -> None:
        self.charges[salt] -= nbytes
        if not self.charges[salt]:
            del self.charges[salt]

    # ------------------------------------------------------------------ order

    def next_stamp(self) -> int:
        """The stamp of the call that begins now."""
        self.stamp += 1
        return self.stamp

    def insert(self, blocks: Sequence[Block]) -> None:
        """Take in blocks of one call, in chain order, as its newest."""
        stamp = self.stamp
        for block in reversed(blocks):
            queue = self._queue(block.shelf.salt, block.slab.slot_bytes)
            queue.count += 1
            queue.order[block] = None
            block.queue = queue
            block.stamp = block.slab.hot = stamp
            block.parked = False
            if queue.listed is None:
                self._list(queue, stamp)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Make blocks of one call, in chain order, the newest: the deepest of them leaves first."""
        stamp = self.stamp
        for block in reversed(blocks):
            block.stamp = block.slab.hot = stamp
            queue = block.queue
            assert queue is not None
            if block.parked:
                block.parked = False
                queue.order[block] = None
                if queue.listed is None:
                    self._list(queue, stamp)
            else:
                queue.order.move_to_end(block)

    def discard(self, block: Block) -> None:
        """Forget a block that is no longer visible."""
        queue = block.queue
        assert queue is not None
        if not block.parked:
            del queue.order[block]
        block.queue = None
        block.parked = False
        queue.count -= 1
        if not queue.count:
            queue.listed = None
            del self._queues[queue.slot_bytes, queue.salt]

    def unprotect(self, block: Block) -> None:
        """Its last lease or its last child has gone: a parked block is the coldest again."""
        queue = block.queue
        if queue is None or not block.parked or block.leases or block.children:
            return
        block.parked = False
        queue.order[block] = None
        queue.order.move_to_end(block, last=False)
        if queue.listed is None or block.stamp < queue.listed:
            self._list(queue, block.stamp)

    def coldest(self, slot_bytes: int) -> Block | None:
        """The next victim among blocks of one slot size; None when every one is protected."""
        heap = self._heaps.get(slot_bytes)
        while heap:
            stamp, serial, queue = heap[0]
            if stamp != queue.listed:
                heapq.heappop(heap)
                continue
            front = _front(queue)
            if front is None:
                heapq.heappop(heap)
                queue.listed = None
            elif front.stamp != stamp:
                queue.listed = front.stamp
                heapq.heapreplace(heap, (front.stamp, serial, queue))
            else:
                return front
        if heap is not None:
            del self._heaps[slot_bytes]
        return None

    # ------------------------------------------------------------------ inside

    def _queue(self, salt: str, slot_bytes: int) -> Queue:
        queue = self._queues.get((slot_bytes, salt))
        if queue is None:
            self._serial += 1
            queue = self._queues[slot_bytes, salt] = Queue(salt, slot_bytes, self._serial)
        return queue

    def _list(self, queue: Queue, stamp: int) -> None:
        queue.listed = stamp
        heap = self._heaps.setdefault(queue.slot_bytes, [])
        heapq.heappush(heap, (stamp, queue.serial, queue))
        if len(heap) > 2 * len(self._queues) + HEAP_SLACK:
            heap[:] = {entry[1]: entry for entry in heap if entry[0] == entry[2].listed}.values()
            heapq.heapify(heap)

    def check(self) -> None:
        """Assert that each visible block is in exactly one queue, and each queue that has one is listed."""
        assert all(amount > 0 for amount in self.charges.values()), f"charges of nothing: {self.charges}"
        for (slot_bytes, salt), queue in self._queues.items():
            assert queue.slot_bytes == slot_bytes and queue.salt == salt
            assert queue.count > 0 and len(queue.order) <= queue.count
            for block in queue.order:
                assert block.queue is queue and not block.parked and block.state == VISIBLE
                assert block.stamp <= block.slab.hot <= self.stamp
            if queue.order:
                heap = self._heaps[slot_bytes]
                assert any(entry[2] is queue and entry[0] == queue.listed for entry in heap), f"{salt!r}: not listed"


def _front(queue: Queue) -> Block | None:
    """The coldest block that may leave; protected ones on the way are parked."""
    order = queue.order
    while order:
        block = next(iter(order))
        if not block.leases and not block.children:
            return block
        del order[block]
        block.parked = True
    return None
