"""Jobs that are over and whose memory is not: one-sided transfers that their calls gave up may still touch it.

Their outcome waits for that, so that the engine keeps the blocks referenced. A stopped node's transfers settle when it
goes on or dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvstrata.client.results import all_settled
from kvstrata.transfer.loops import Loop

if TYPE_CHECKING:
    from kvstrata.engine_adapter.connector.outbox import OpenJob

PERIOD_S: Final = 0.02
#: While more than one in this many of the engine's blocks wait so, no new jobs are begun.
SHARE: Final = 4
#: It is a problem when one waits longer than this.
LONG_S: Final = 10.0


class Parking:
    """Thread-safe. ``leave`` is called, by a thread of this object, with each job whose memory has become free.

    ``blocks_max``: of the engine. The thread is started by the first job that parks.
    """

    def __init__(self, leave: Callable[[OpenJob, str], None], blocks_max: int) -> None:
        self._leave = leave
        self._blocks_max = blocks_max
        self._lock = threading.Lock()
        self._parked: dict[int, tuple[OpenJob, str, float]] = {}
        self._loop: Loop | None = None

    def park(self, opened: OpenJob, untried: str) -> None:
        with self._lock:
            self._parked[opened.job.job_id] = opened, untried, time.monotonic()
            if self._loop is None:
                self._loop = Loop("connector-parking", PERIOD_S, self.turn).start()

    def turn(self) -> None:
        """Let go of what has settled. Each job leaves once."""
        with self._lock:
            free = [(opened, untried) for opened, untried, _ in self._parked.values() if all_settled(opened.pending)]
            for opened, _ in free:
                del self._parked[opened.job.job_id]
        for opened, untried in free:
            self._leave(opened, untried)

    def drop(self, opened: OpenJob) -> None:
        """It is over, whatever its memory does."""
        with self._lock:
            self._parked.pop(opened.job.job_id, None)

    def full(self) -> bool:
        """Too many of the engine's blocks wait here."""
        with self._lock:
            return SHARE * sum(len(opened.status) for opened, *_ in self._parked.values()) > self._blocks_max

    def __len__(self) -> int:
        return len(self._parked)

    def ages_s(self) -> dict[str, float]:
        return {} if self._loop is None else {self._loop.name: self._loop.age_s()}

    def failures(self) -> int:
        return 0 if self._loop is None else self._loop.failures

    def problems(self) -> list[str]:
        problems = [] if self._loop is None else [self._loop.problem()]
        with self._lock:
            since = min((parked for *_, parked in self._parked.values()), default=None)
        if since is not None and time.monotonic() - since > LONG_S:
            problems.append(
                f"{len(self)} jobs keep their blocks: transfers with a node that stands still do not settle"
            )
        return [problem for problem in problems if problem]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.stop()
