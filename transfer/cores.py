"""How many cores this process may use, and whether one of them is there for a second thread."""

from __future__ import annotations

import os
from typing import Final

#: Two threads that run at once work so many seconds a second at least.
AT_ONCE: Final = 1.4
#: Where the second one got no core of its own, so many pieces of work at most go by between two attempts.
ALONE_MAX: Final = 15


def usable_cores() -> int:
    """At least 1. Of a machine's cores a process may be given some only."""
    return len(os.sched_getaffinity(0))


class SecondCore:
    """Whether there is a core for a second thread: what the last pieces of work that had one say.

    Other processes may want all cores, as clients that load at the same time do. Used by many threads without a lock:
    a count that is lost is one attempt more or less.
    """

    def __init__(self) -> None:
        self._vain = 0  #: pieces of work that the last attempt in vain kept from being split
        self._alone = 0  #: of those, what is left; below zero if two threads took the last one at once

    def free(self) -> bool:
        """To be asked once a piece of work."""
        if usable_cores() < 2:
            return False
        if self._alone > 0:
            self._alone -= 1
            return False
        return True

    def tried(self, worked_s: float, took_s: float) -> None:
        """Two threads took so long, and ran for so long of it, both together."""
        if worked_s >= AT_ONCE * took_s:
            self._vain = 0
        else:
            self.in_vain()

    def in_vain(self) -> None:
        """The second thread did not get a core."""
        self._vain = min(2 * self._vain + 1, ALONE_MAX)
        self._alone = self._vain
