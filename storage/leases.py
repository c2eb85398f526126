"""Read leases: granted for a batch, ended by release, deadline or the session's death.

A renewed lease is a view. Views of one session hold at most a share of the pool, and each at most for an
age, because nothing they hold can be evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Final

from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import Block, Holdings, Lease, Shelf

#: A lease outlives its caller's deadline by this: one-sided copies cannot be recalled.
MARGIN_S: Final = 1.0
LEASE_MAX_S: Final = 60.0
VIEW_AGE_MAX_S: Final = 600.0
#: Views of one session may hold one part in this many of the pool's bytes.
VIEW_SHARE: Final = 4


def granted_seconds(deadline_ms: int) -> float:
    """How long a lease or reservation lasts for a caller who has ``deadline_ms`` left."""
    return min(deadline_ms / 1e3 + MARGIN_S, LEASE_MAX_S)


class LeaseBook:
    """Not thread-safe: its owner's lock covers it."""

    def __init__(self, inventory: Inventory, sessions: dict[bytes, Holdings]) -> None:
        self._inventory = inventory
        self._sessions = sessions
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._sent: set[int] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, session: bytes, blocks: list[Block], seconds: float, now: float) -> Lease:
        """Lease visible blocks of one shelf, in chain order, to a session until ``now + seconds``."""
        self._last += 1
        lease = Lease(self._last, session, blocks, now, now + seconds)
        self._pin(lease, (blocks[0].shelf,))
        self._leases[lease.id] = lease
        holdings = self._sessions.get(session)
        if holdings is None:
            holdings = self._sessions[session] = Holdings()
        holdings.leases.add(lease.id)
        heapq.heappush(self._deadlines, (lease.deadline, lease.id))
        return lease

    def hold(self, blocks: list[Block], now: float, *, sent: bool = False) -> Lease:
        """A lease for bytes that this node itself moves, or sends to a reader (``sent``).

        No deadline, since it ends by :meth:`end` for certain.
        """
        self._last += 1
        if sent:
            self._sent.add(self._last)
        lease = self._leases[self._last] = Lease(self._last, b"", blocks, now, float("inf"))
        self._pin(lease, (blocks[0].shelf,) if sent else {block.shelf for block in blocks})
        return lease

    def _pin(self, lease: Lease, shelves: Collection[Shelf]) -> None:
        self._inventory.pin(lease.blocks)
        lease.shelves = shelves
        for shelf in shelves:
            shelf.leases.add(lease)

    def sending(self) -> list[Lease]:
        """Reads whose bytes are being sent now, of blocks that nobody finds any more. O(such reads)."""
        return [lease for lease in map(self._leases.__getitem__, self._sent) if lease.blocks[0].shelf.retired]

    def stands(self, lease: Lease) -> bool:
        return lease.id in self._leases

    def release(self, session: bytes, numbers: Sequence[int]) -> None:
        """End leases of that session; unknown ones (ended before, or another's) are passed over."""
        for number in numbers:
            lease = self._leases.get(number)
            if lease is not None and lease.session == session:
                self.end(lease)

    def renew(self, session: bytes, number: int, seconds: float, now: float) -> float:
        """Seconds the lease stands from now on; 0 when it is gone or past what a view may have."""
        lease = self._leases.get(number)
        if lease is None or lease.session != session or lease.deadline <= now:
            return 0.0
        holdings = self._sessions[session]
        if not lease.view_bytes:
            view_bytes = sum(block.slab.slot_bytes for block in lease.blocks)
            if (holdings.view_bytes + view_bytes) * VIEW_SHARE > self._inventory.arena.bytes_total:
                return 0.0
            lease.view_bytes = view_bytes
            holdings.view_bytes += view_bytes
        deadline = min(now + seconds, lease.granted_at + VIEW_AGE_MAX_S)
        if deadline <= now:
            return 0.0
        if deadline > lease.deadline:
            lease.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, number))
        return deadline - now

    def end(self, lease: Lease) -> None:
        """End a lease that stands. Safe for one that has ended."""
        if self._leases.pop(lease.id, None) is None:
            return
        self._sent.discard(lease.id)
        if lease.session:
            holdings = self._sessions[lease.session]
            holdings.leases.discard(lease.id)
            holdings.view_bytes -= lease.view_bytes
            if holdings.empty():
                del self._sessions[lease.session]
        for shelf in lease.shelves:
            shelf.leases.discard(lease)
        self._inventory.unpin(lease.blocks)

    def end_all(self, numbers: set[int]) -> None:
        for number in list(numbers):
            self.end(self._leases[number])

    def expire(self, now: float) -> int:
        """End leases whose deadline has come; how many."""
        count = 0
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, number = heapq.heappop(deadlines)
            lease = self._leases.get(number)
            if lease is not None and lease.deadline <= now:
                self.end(lease)
                count += 1
        return count

    def check(self) -> None:
        """Assert that each block's count is that of the leases that name it."""
        assert self._sent <= self._leases.keys()
        named: dict[Block, int] = {}
        for lease in self._leases.values():
            assert not lease.session or lease.id in self._sessions[lease.session].leases
            assert {block.shelf for block in lease.blocks} == set(lease.shelves)
            assert all(lease in shelf.leases for shelf in lease.shelves), "a lease that its shelf does not know"
            for block in lease.blocks:
                named[block] = named.get(block, 0) + 1
        for block in self._inventory.blocks():
            assert block.leases == named.get(block, 0), f"{block.leases} leases counted, {named.get(block, 0)} stand"
            if block.leases:
                same = block.generation == block.slab.generations[block.slot]
                assert same or block.shelf.retired, "a slot was given away under its reader"
        assert all(block.slab.blocks.get(block.slot) is block for block in named), "a leased slot was given away"
        for session, holdings in self._sessions.items():
            assert not holdings.empty(), f"session {session.hex()} holds nothing and is still known"
            views = sum(self._leases[number].view_bytes for number in holdings.leases)
            assert views == holdings.view_bytes
