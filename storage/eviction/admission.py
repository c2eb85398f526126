"""Admission by share: how much of a call a tenant's share has room for, and how lowered shares drain.

Usage is never above a limit, but for what was there before the limit was lowered or loaded: then nothing is
admitted, and :meth:`Admission.drain` brings it down a bounded step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata.proto.status import Departure
from kvstrata.storage.eviction.quotas import QuotaBook

if TYPE_CHECKING:
    from kvstrata.storage.inventory import Inventory

#: Salts whose refused bytes are remembered between two reports.
WANTED_SALTS_MAX: Final = 4096


class Admission:
    """One tier's. Not thread-safe: its owner's lock covers it."""

    def __init__(self, inventory: Inventory, book: QuotaBook) -> None:
        self._inventory = inventory
        self._book = book
        self._wanted: dict[str, int] = {}
        #: Salts above their shares, as of this version of the book; the next to drain is the last.
        self._over: list[str] = []
        self._seen = 0

    def allowed(self, salt: str, slot_bytes: int, wanted: int, before: int) -> int:
        """How many new blocks the share has room for, once own ones that no call from ``before`` on has used left."""
        inventory, book = self._inventory, self._book
        self._look()
        limit = book.limit(inventory.tier, salt, inventory.now)
        if limit is None:
            return wanted
        used = self._used(salt)
        if book.lapsed(inventory.now):
            limit = min(limit, used)
        missing = used + wanted * slot_bytes - limit
        if missing <= 0:
            return wanted
        self._want(salt, min(missing, wanted * slot_bytes))
        if used > limit:
            return 0
        fits = min(wanted, limit // slot_bytes)
        inventory.evict_own(salt, used + fits * slot_bytes - limit, Departure.QUOTA, before)
        return min(fits, (limit - self._used(salt)) // slot_bytes)

    def drain(self, limit_bytes: int) -> int:
        """See :meth:`Inventory.drain`."""
        self._look()
        freed = 0
        over, stamp = self._over, self._inventory.policy.stamp + 1
        while over and freed < limit_bytes:
            salt = over[-1]
            asked = min(self._excess(salt), limit_bytes - freed)
            done = self._inventory.evict_own(salt, asked, Departure.LOWERED, stamp) if asked > 0 else 0
            freed += done
            if done >= asked and self._excess(salt) > 0:
                break
            over.pop()
            if self._excess(salt) > 0:  # the rest is leased or being written: the others first, it next time
                over.insert(0, salt)
                break
        return freed

    @property
    def drains(self) -> bool:
        """Whether tenants were above their shares after the last :meth:`drain`."""
        return bool(self._over)

    def take_wanted(self) -> dict[str, int]:
        """See :meth:`Inventory.take_wanted`."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def look_again(self) -> None:
        """Usage has grown by other ways than admission."""
        self._seen = -1

    def _look(self) -> None:
        """Take in the shares as they are now, when they have changed. O(tenants) then."""
        inventory, book = self._inventory, self._book
        if book.version == self._seen:
            return
        self._seen = book.version
        inventory.policy.set_floors(book.floors(inventory.tier))
        self._over = [salt for salt in inventory.policy.charges if self._excess(salt) > 0]

    def _used(self, salt: str) -> int:
        return self._inventory.policy.charges.get(salt, 0)

    def _excess(self, salt: str) -> int:
        inventory = self._inventory
        limit = self._book.limit(inventory.tier, salt, inventory.now)
        return self._used(salt) - limit if limit is not None else 0

    def _want(self, salt: str, nbytes: int) -> None:
        if salt in self._wanted or len(self._wanted) < WANTED_SALTS_MAX:
            self._wanted[salt] = self._wanted.get(salt, 0) + nbytes
