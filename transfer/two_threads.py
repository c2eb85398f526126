"""Work in two halves at once: one by the thread that asks, one by a thread of a pool while there is a core for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvstrata.transfer.cores import SecondCore, usable_cores

#: Threads of the pool at most: a machine's memory is busy long before as many copy.
THREADS_MAX: Final = 16

#: Who claims a half.
ASKER, HELPER = "asker", "helper"

_second_core = SecondCore()
_helpers: Helpers | None = None


class Half:
    """Work for whoever claims it first: the thread that asks, or a helper. Whoever claims it does it, once."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.worked_s = 0.0  #: CPU seconds of the helper
        self.problem: BaseException | None = None
        self._claims: dict[str, str] = {}
        self._ended = threading.Lock()
        self._ended.acquire()

    def claim(self, who: str = ASKER) -> bool:
        """Whether it is theirs. May be asked again, as by one that was interrupted before it knew: of helpers one asks.

        By role and not by thread: a thread that has ended leaves its number to the next one.
        """
        return self._claims.setdefault("by", who) == who

    def end(self) -> None:
        """Said by a helper that claimed it."""
        self._ended.release()

    def settle(self) -> None:
        """Return when no helper is at it, nor will be. What a signal's handler raises while it waits is raised then.

        Waits as long as the work takes: its caller's memory is written until then, whatever the caller's deadline.
        """
        raised: BaseException | None = None
        while True:
            try:
                if not self.claim():
                    with self._ended:
                        pass
                break
            except BaseException as error:  # noqa: BLE001  raised below
                raised = error
        if raised is not None:
            raise raised


class Helpers:
    """Threads for second halves: with the threads that have the first ones, as many as there are cores."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._size = max(1, min(THREADS_MAX, usable_cores() // 2))
        self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="kvstrata-half")
        self._lock = threading.Lock()
        self._at_work = 0  # changed by helpers alone: no signal's handler runs there

    @property
    def full(self) -> bool:
        return self._at_work >= self._size

    def offer(self, half: Half) -> None:
        self._threads.submit(self._do, half)

    def _do(self, half: Half) -> None:
        if not half.claim(HELPER):
            return
        with self._lock:
            self._at_work += 1
        try:
            half.worked_s = _timed(half.work)
        except BaseException as error:  # noqa: BLE001  raised by the thread that asked
            half.problem = error
        finally:
            with self._lock:
                self._at_work -= 1
            half.end()


def worth_it() -> bool:
    """Whether work of many bytes is to be split. To be asked once a piece of work."""
    return not _of_this_process().full and _second_core.free()


def run_both(mine: Callable[[], None], others: Callable[[], None]) -> None:
    """Both ended when it returns or raises: no byte lands after that. Signals' handlers may raise, too, but for the
    few instructions between two rounds of :meth:`Half.settle`."""
    start = time.perf_counter()
    helpers, half = _of_this_process(), Half(others)
    try:
        helpers.offer(half)
        worked_s = _timed(mine)
        if half.claim():  # no helper has come to it yet
            if not helpers.full:
                _second_core.in_vain()
            others()
            return
    finally:
        half.settle()
    if half.problem is not None:
        raise half.problem
    _second_core.tried(worked_s + half.worked_s, time.perf_counter() - start)


def _timed(work: Callable[[], None]) -> float:
    """CPU seconds of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _of_this_process() -> Helpers:
    """A process that was forked has none of its parent's threads."""
    global _helpers
    if _helpers is None or _helpers.pid != os.getpid():
        _helpers = Helpers()
    return _helpers
