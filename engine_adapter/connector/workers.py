"""A fixed set of threads that carry out one kind of job."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstrata.transfer.loops import Loop

#: A thread that was not woken looks for work this often all the same.
IDLE_S: Final = 1.0


class Workers:
    """``step()`` carries out one job, in any of ``count`` threads; False when there was none.

    ``bound_s``: no job takes longer; a thread that does is a problem in health.
    """

    def __init__(self, name: str, count: int, step: Callable[[], bool], *, bound_s: float) -> None:
        self._step = step
        self._busy = [False] * count
        self._loops = [
            Loop(f"{name}-{i}", IDLE_S, partial(self._turn, i), bound_s=bound_s + IDLE_S) for i in range(count)
        ]
        for loop in self._loops:
            loop.start()

    def wake(self) -> None:
        """There is work: an idle thread looks for it now; busy ones look again before they rest."""
        for index, loop in enumerate(self._loops):
            if not self._busy[index]:
                self._busy[index] = True  # or the next call would wake the same one again
                loop.wake()
                return
        for loop in self._loops:
            loop.wake()

    def ages_s(self) -> dict[str, float]:
        return {loop.name: loop.age_s() for loop in self._loops}

    def failures(self) -> int:
        """Steps that raised, since the start."""
        return sum(loop.failures for loop in self._loops)

    def problems(self) -> list[str]:
        return [problem for loop in self._loops if (problem := loop.problem())]

    def stop(self, timeout_s: float) -> None:
        """Each ends after the job it is at; waits at most ``timeout_s``."""
        until = time.monotonic() + timeout_s
        for loop in self._loops:
            loop.stop(0.0)
        for loop in self._loops:
            loop.stop(max(0.0, until - time.monotonic()))

    def _turn(self, index: int) -> None:
        self._busy[index], more = True, True
        try:
            more = self._step()
        finally:
            self._busy[index] = more
            if more:
                self._loops[index].wake()
