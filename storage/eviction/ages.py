"""How long ago calls were: stamps of the eviction policy against time, coarse and bounded. Sans-IO.

Blocks carry the number of the call that used them last. That orders the blocks of one node; to compare them with
another node's, which counts calls of its own, numbers become seconds here, and back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

#: Seconds between two points, at the least.
STEP_S: Final = 1.0
#: Points kept: when there are more, every other one of the older half goes.
POINTS_MAX: Final = 1024


class Ages:
    """Points (time, last stamp given by then), oldest first. ``now`` is monotonic seconds everywhere."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._stamps: list[int] = []

    def note(self, stamp: int, now: float) -> None:
        """The last stamp given is ``stamp``; called now and then. O(1), amortised."""
        times, stamps = self._times, self._stamps
        if times and now < times[-1] + STEP_S:
            return
        times.append(now)
        stamps.append(stamp)
        if len(times) > POINTS_MAX:
            del times[1 : POINTS_MAX // 2 : 2]
            del stamps[1 : POINTS_MAX // 2 : 2]

    def idle_s(self, stamp: int, now: float) -> float:
        """Seconds since the call of this stamp, up to a gap between points too many; since the first point if older."""
        after = bisect_left(self._stamps, stamp)  # the first point by which it had been given
        if after == len(self._stamps):
            return 0.0
        return max(0.0, now - (self._times[after - 1] if after else self._times[0]))

    def idle_all_s(self, stamps: npt.NDArray[np.int64], now: float) -> npt.NDArray[np.float64]:
        """:meth:`idle_s` of many."""
        times, given = np.array(self._times, np.float64), np.array(self._stamps, np.int64)
        if not len(times):
            return np.zeros(len(stamps))
        after = np.searchsorted(given, stamps, "left")
        idle = np.maximum(0.0, now - times[np.maximum(0, after - 1)])
        idle[after == len(given)] = 0.0
        return idle

    def stamp_at(self, when: float) -> int:
        """The last stamp given at ``when``, or somewhat before; 0 where that is not remembered."""
        after = bisect_right(self._times, when)
        return self._stamps[after - 1] if after else 0

    def check(self) -> None:
        """Assert that both lists rise and are bounded."""
        assert len(self._times) == len(self._stamps) <= POINTS_MAX
        assert self._times == sorted(self._times) and self._stamps == sorted(self._stamps)
