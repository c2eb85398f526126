"""Background loops with an owner, a bound and an age: what runs, how long ago it last came round.

Every thread that does something on its own is a :class:`Loop`. A turn that raises is counted, logged
and tried again; a loop whose age passes its bound, or whose last turn failed, is a problem in health.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstrata.proto.logs import get_logger

log = get_logger(__name__)


class Loop:
    """Runs ``turn()`` every ``period_s`` seconds in a daemon thread until stopped.

    ``bound_s`` is the age at which the loop counts as stuck (default: five periods, at least 1 s).
    ``wake()`` runs the next turn now. A turn must itself be bounded in time. One that returns a number waits so many
    seconds in place of the period, and no longer than half of its bound: it has nothing to do before, unless woken.
    """

    def __init__(
        self, name: str, period_s: float, turn: Callable[[], float | None], *, bound_s: float | None = None
    ) -> None:
        self.name = name
        self.period_s = period_s
        self.bound_s = bound_s if bound_s is not None else max(1.0, 5 * period_s)
        self.failures = 0
        self.last_error = ""
        self._turn = turn
        self._wake = threading.Event()
        self._stopping = False
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"kvstrata-{name}", daemon=True)

    def start(self) -> Loop:
        self._beat = time.monotonic()
        self._thread.start()
        return self

    def wake(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after the current turn; waits at most ``timeout_s``. Safe from the loop itself."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def age_s(self) -> float:
        """Seconds since the last turn ended, whether it worked or not."""
        return time.monotonic() - self._beat

    def problem(self) -> str:
        """Why this loop is not well, or an empty string."""
        if not self._thread.is_alive() and not self._stopping:
            return f"{self.name}: its thread is dead"
        if self.age_s() > self.bound_s:
            return f"{self.name}: no turn for {self.age_s():.1f} s (bound {self.bound_s:.1f} s)"
        return f"{self.name}: {self.last_error}" if self.last_error else ""

    def _run(self) -> None:
        while not self._stopping:
            pause_s: float | None = None
            try:
                pause_s = self._turn()
                self.last_error = ""
            except Exception as error:
                self.failures += 1
                self.last_error = f"{type(error).__name__}: {error}"
                log.error("loop turn failed", loop=self.name, failures=self.failures, exc_info=True)
            self._beat = time.monotonic()
            self._wake.wait(self.period_s if pause_s is None else min(pause_s, self.bound_s / 2))
            self._wake.clear()


class Loops:
    """The loops of one process, for its health."""

    def __init__(self) -> None:
        self._loops: list[Loop] = []

    def add(self, loop: Loop) -> Loop:
        """Start a loop and keep it."""
        self._loops.append(loop.start())
        return loop

    def ages_s(self) -> dict[str, float]:
        return {loop.name: loop.age_s() for loop in self._loops}

    def problems(self) -> list[str]:
        return [problem for loop in self._loops if (problem := loop.problem())]

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop all, last added first, within ``timeout_s`` in all."""
        deadline = time.monotonic() + timeout_s
        for loop in self._loops:
            loop.stop(0.0)  # all are told first, so that they end side by side
        for loop in reversed(self._loops):
            loop.stop(max(0.0, deadline - time.monotonic()))
