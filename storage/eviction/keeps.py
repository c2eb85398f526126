"""What hints keep: which blocks, for whom, until when, and no more than a part of what their tenant may use."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Final

from kvstrata.storage.eviction.queues import Keep, Tenant
from kvstrata.storage.records import Block

#: Hints may keep one part in this many of what their tenant may use.
KEEP_SHARE: Final = 2
#: The heap is rebuilt when it holds this many entries and most of them are of keeps that have ended.
SLACK: Final = 64


class Keeps:
    """All keeps of one tier. Where their blocks stand in queues is the policy's business.

    ``room`` gives the bytes that a tenant may use.
    """

    def __init__(self, room: Callable[[Tenant], int]) -> None:
        #: Those that keep anything.
        self.tenants: dict[Tenant, None] = {}
        self._room = room
        self._by_end: list[tuple[float, int, Keep]] = []
        self._serial = count()

    def most(self, tenant: Tenant) -> int:
        """Bytes that hints may keep for the tenant now."""
        return self._room(tenant) // KEEP_SHARE

    def begin(self, tenant: Tenant, blocks: Sequence[Block], until: float) -> None:
        """Keep these from now on; what kept any of them before has less."""
        keep = Keep(tenant)
        for block in blocks:
            if block.keep is not None:
                self.end(block)
            block.keep = keep
            keep.blocks[block] = None
            tenant.kept_bytes += block.slab.slot_bytes
        tenant.keeps[keep] = None
        self.tenants[tenant] = None
        heapq.heappush(self._by_end, (until, next(self._serial), keep))
        if len(self._by_end) > SLACK + 2 * sum(len(one.keeps) for one in self.tenants):
            self._by_end = [entry for entry in self._by_end if entry[2].blocks]
            heapq.heapify(self._by_end)

    def end(self, block: Block) -> None:
        """This block is kept no longer."""
        keep, block.keep = block.keep, None
        assert keep is not None
        del keep.blocks[block]
        tenant = keep.tenant
        tenant.kept_bytes -= block.slab.slot_bytes
        if not keep.blocks:
            del tenant.keeps[keep]
            if not tenant.keeps:
                del self.tenants[tenant]

    def over_by(self, now: float) -> Iterator[list[Block]]:
        """The blocks of each keep whose time is over, in chain order; the caller ends them before it goes on."""
        while self._by_end and self._by_end[0][0] <= now:
            yield list(heapq.heappop(self._by_end)[2].blocks)

    def above(self, tenant: Tenant) -> Iterator[list[Block]]:
        """As :meth:`over_by`: the tenant's oldest keeps, until the others are no more than they may be."""
        while tenant.keeps and tenant.kept_bytes > self.most(tenant):
            yield list(next(iter(tenant.keeps)).blocks)

    def __len__(self) -> int:
        """Entries of the heap, those that have ended included."""
        return len(self._by_end)

    def check(self, tenants: Iterable[Tenant]) -> None:
        """Assert that ``tenants``, all there are, keep what is counted. O(blocks kept)."""
        tenants = list(tenants)
        assert self.tenants.keys() == {tenant for tenant in tenants if tenant.keeps}
        for tenant in tenants:
            kept = [block for keep in tenant.keeps for block in keep.blocks]
            nbytes = sum(block.slab.slot_bytes for block in kept)
            assert nbytes == tenant.kept_bytes, f"{tenant.salt!r}: {tenant.kept_bytes} bytes kept, {nbytes} are"
            assert all(keep.blocks and keep.tenant is tenant for keep in tenant.keeps)
