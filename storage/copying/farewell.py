"""A node that is told to stop asks to be drained first, and waits for that, within a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.logs import get_logger
from kvstrata.storage.copying.draining import DrainState
from kvstrata.storage.copying.offers import Drains, Line
from kvstrata.storage.state import NodeState

log = get_logger(__name__)

#: No leader has taken up the drain within this: the node stops without.
TAKEN_UP_S: Final = 10.0
#: Progress is logged this often.
PROGRESS_S: Final = 5.0
LOOK_S: Final = 0.1


class Told(Protocol):
    """One master's link."""

    master: str

    def line(self) -> Line | None:
        """Where that master is told something now; None while there is no attachment."""
        ...


class Farewell:
    """Over one node; :meth:`wait` is for the thread that stops it."""

    def __init__(
        self,
        state: NodeState,
        lock: threading.Lock,
        drains: Drains,
        links: Sequence[Told],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._lock = lock
        self._drains = drains
        self._links = links
        self._clock = clock

    def wait(self, budget_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Ask every master, and serve on until the leader says that this node is drained; True then.

        False when the budget is over, ``hurry`` says so, or nobody takes it up. Every new attachment is asked: its
        master may be a new leader.
        """
        begun = self._clock()
        told: dict[str, Line] = {}
        next_line = begun
        while True:
            now = self._clock()
            with self._lock:
                state, facts = self._state.draining.state, self._state.draining.facts(now)
                given = self._state.copies.counts.given_bytes
            if state is DrainState.DRAINED:
                log.info("stopping: drained", seconds=round(now - begun, 1), problem=facts["problem"])
                return True
            left_s = begun + budget_s - now
            why = self._why_not(state, left_s, now - begun, hurry)
            if why:
                log.warning("stopping before the node is drained", reason=why, bytes_given=given, **facts)
                return False
            self._ask(told, left_s)
            if now >= next_line:
                next_line = now + PROGRESS_S
                log.info("waiting to be drained", seconds_left=round(left_s, 1), bytes_given=given, **facts)
            self._drains.changed.wait(min(LOOK_S, left_s))
            self._drains.changed.clear()

    def _why_not(self, state: DrainState, left_s: float, waited_s: float, hurry: Callable[[], bool]) -> str:
        if hurry():
            return "told to stop at once"
        if left_s <= 0:
            return "its time is over: give it more by --drain-on-stop"
        if state is DrainState.NONE and waited_s > TAKEN_UP_S:
            return "no master took up the drain"
        return ""

    def _ask(self, told: dict[str, Line], left_s: float) -> None:
        for link in self._links:
            line = link.line()
            if line is not None and told.get(link.master) is not line:
                told[link.master] = line
                leaving = control.Leaving(budget_ms=int(left_s * 1e3), reason="the node is told to stop")
                line.tell(control.NodeMessage(leaving=leaving))
