"""How many bytes copies may move a second: a token bucket for the whole node, as source and as target."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

#: The bucket holds what comes in over this time.
BURST_S: Final = 0.25
#: Who waits looks up this often, to see whether it still should.
LOOK_S: Final = 0.1


class Bandwidth:
    """Sans-IO: ``now`` is monotonic seconds. ``bytes_per_second`` 0: no bound. Not thread-safe.

    Bytes are booked before they move. A piece larger than the bucket is let through once the bucket is full, and
    the next one waits for longer.
    """

    def __init__(self, bytes_per_second: int, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._capacity = bytes_per_second * BURST_S
        self._tokens = self._capacity
        self._at = now

    def wait_s(self, nbytes: int, now: float) -> float:
        """Seconds until so many bytes could be taken; 0.0 when they can be now."""
        if not self.bytes_per_second:
            return 0.0
        self._fill(now)
        missing = min(nbytes, self._capacity) - self._tokens
        return max(0.0, missing / self.bytes_per_second)

    def take(self, nbytes: int, now: float) -> bool:
        """Book the bytes; False when that has to wait."""
        if not self.bytes_per_second:
            return True
        if self.wait_s(nbytes, now) > 0.0:
            return False
        self._tokens -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Bytes that were booked, and did not move after all."""
        self._tokens = min(self._capacity, self._tokens + nbytes)

    def _fill(self, now: float) -> None:
        self._tokens = min(self._capacity, self._tokens + max(0.0, now - self._at) * self.bytes_per_second)
        self._at = max(self._at, now)


class Pace:
    """One :class:`Bandwidth` for all threads of a node."""

    def __init__(self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bandwidth = Bandwidth(bytes_per_second, clock())

    def take(self, nbytes: int, deadline: float, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Wait until so many bytes may move; False when that is past ``deadline``, or ``go_on`` says no."""
        while go_on():
            with self._lock:
                now = self._clock()
                if self._bandwidth.take(nbytes, now):
                    return True
                wait_s = self._bandwidth.wait_s(nbytes, now)
            if now + wait_s > deadline:
                return False
            time.sleep(min(wait_s, LOOK_S))
        return False

    def give_back(self, nbytes: int) -> None:
        """See :meth:`Bandwidth.give_back`."""
        if nbytes:
            with self._lock:
                self._bandwidth.give_back(nbytes)
