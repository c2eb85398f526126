"""How much may still be written to the node's SSDs: a daily allowance, as a token bucket.

Flash wears by bytes written. The bucket fills evenly over the day and holds at most :data:`BURST_S` worth,
so that a quiet night does not buy a storm at noon. While it is less than half full, only what was used again
since it was stored is worth a write.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

DAY_S: Final = 86_400.0
#: The bucket holds what comes in over this time.
BURST_S: Final = 3_600.0


class Allowance(Enum):
    """What the budget says to a write that may wait or be left out."""

    AMPLE = "ample"
    SHORT = "short"  #: only for blocks that were used since they were stored
    SPENT = "spent"  #: not now


class WriteBudget:
    """Sans-IO: ``now`` is monotonic seconds. ``daily_bytes`` None: no limit.

    It begins half full: a node that keeps starting again does not get a burst each time.
    """

    def __init__(self, daily_bytes: int | None, now: float) -> None:
        self.daily_bytes = daily_bytes
        self._rate = (daily_bytes or 0) / DAY_S
        self._capacity = self._rate * BURST_S
        self._tokens = self._capacity / 2
        self._at = now

    def allowance(self, now: float) -> Allowance:
        if self.daily_bytes is None:
            return Allowance.AMPLE
        self._fill(now)
        if self._tokens <= 0:
            return Allowance.SPENT
        return Allowance.AMPLE if self._tokens * 2 >= self._capacity else Allowance.SHORT

    def spend(self, nbytes: int, now: float) -> None:
        """Bytes that are about to be written. The last batch may overdraw; the next ones wait for it."""
        if self.daily_bytes is not None:
            self._fill(now)
            self._tokens -= nbytes

    def refund(self, nbytes: int, now: float) -> None:
        """Bytes that were spent and will not be written."""
        if self.daily_bytes is not None:
            self._fill(now)
            self._tokens = min(self._capacity, self._tokens + nbytes)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
