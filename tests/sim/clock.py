"""Virtual time, processes that live in it, and tasks that wait in it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from kvstrata.transfer.loops import Loop, Loops

Run = Callable[[], None]
#: What a task yields: seconds to sleep, or something to wait for. It is sent the outcome.
Steps = Generator["float | Future", Any, Any]


class Broken(Exception):
    """What was waited for will not come."""


class Scheduler:
    """Events in the order of their times, and of their arrival where these are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._heap: list[tuple[float, int, Run]] = []

    def after(self, seconds: float, run: Run) -> None:
        self.count += 1
        heapq.heappush(self._heap, (self.now + seconds, self.count, run))

    def run_until(self, when: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= when:
            self.now, _, run = pop(heap)
            run()
        self.now = when

    def every(self, seconds: float, run: Run) -> None:
        """For ever."""

        def turn() -> None:
            run()
            self.after(seconds, turn)

        self.after(seconds, turn)


class Process:
    """One process: it runs, stands still, dies. What it has scheduled dies with it.

    ``skew`` is what its monotonic clock shows at the beginning of the story: no two processes agree.
    """

    def __init__(self, scheduler: Scheduler, name: str, skew: float) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.ends: list[Run] = []  #: what happens when it dies
        self.worked: Run = lambda: None  #: called after it has taken in something that may have changed it
        self._scheduler = scheduler
        self._skew = skew
        self._held: deque[Run] = deque()

    def skew_to(self, other: Process) -> float:
        """What this clock shows more than the other."""
        return self._skew - other._skew

    def clock(self) -> float:
        return self._scheduler.now + self._skew

    def after(self, seconds: float, run: Run) -> None:
        self._scheduler.after(seconds, lambda: self.take(run))

    def take(self, run: Run) -> None:
        """Do it now, or when the process goes on; never if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._held.append(run)
        else:
            run()

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        while self._held and self.alive and not self.stopped:
            self._held.popleft()()

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self._held.clear()
            for end in self.ends:
                end()

    def every(self, seconds: float, run: Run, first: float | None = None) -> None:
        """For as long as it lives."""

        def turn() -> None:
            run()
            self.after(seconds, turn)

        self.after(seconds if first is None else first, turn)

    def start(self, steps: Steps) -> Future:
        """Run a task; the future has what it returns."""
        over = Future()

        def advance(outcome: Callable[[], Any]) -> None:
            try:
                waits = outcome()
            except StopIteration as end:
                over.resolve(end.value)
                return
            except Broken as error:
                over.fail(str(error))
                return
            if isinstance(waits, Future):
                waits.then(lambda: self.take(lambda: advance(lambda: _resume(steps, waits))))
            else:
                self.after(waits, lambda: advance(lambda: steps.send(None)))

        self.take(lambda: advance(lambda: next(steps)))
        return over


def _resume(steps: Steps, future: Future) -> Any:
    if future.problem is not None:
        return steps.throw(Broken(future.problem))
    return steps.send(future.value)


class Future:
    """Something that will have come, or not, once."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.problem: str | None = None
        self._waiting: list[Run] = []

    def resolve(self, value: Any = None) -> None:
        self._end(value, None)

    def fail(self, problem: str) -> None:
        self._end(None, problem)

    def then(self, run: Run) -> None:
        if self.done:
            run()
        else:
            self._waiting.append(run)

    def _end(self, value: Any, problem: str | None) -> None:
        if self.done:
            return
        self.done, self.value, self.problem = True, value, problem
        for run in self._waiting:
            run()


def all_of(futures: list[Future]) -> Future:
    """Done when all are, well or not."""
    over = Future()
    left = len(futures)

    def one() -> None:
        nonlocal left
        left -= 1
        if not left:
            over.resolve()

    if not futures:
        over.resolve()
    for future in futures:
        future.then(one)
    return over


class SimLoops(Loops):
    """Loops of a process on virtual time: the shipped turns, without their threads. ``then`` is done after each."""

    def __init__(self, process: Process, then: Run = lambda: None) -> None:
        super().__init__()
        self._process = process
        self._then = then

    def add(self, loop: Loop) -> Loop:
        shipped = loop._turn  # a loop has no other way to be stepped by hand
        woken = False

        def turn() -> None:
            shipped()
            self._then()

        def run() -> None:
            nonlocal woken
            woken = False
            turn()

        def wake() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self._process.after(0.002, run)

        loop.wake = wake  # type: ignore[method-assign]
        self._process.every(max(loop.period_s, 0.05), turn)
        return loop

    def ages_s(self) -> dict[str, float]:
        return {}

    def problems(self) -> list[str]:
        return []

    def stop(self, timeout_s: float = 0.0) -> None:
        """They stop with the process."""
