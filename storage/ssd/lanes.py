"""Threads that move bytes for callers, who can leave when a device does not answer.

A thread that is stuck in the kernel cannot be called back, so it never holds memory of a caller's: bytes pass
through a buffer of the thread's own, and a thread touches a caller's memory only between :meth:`Batch.touching`
and its end, which a caller that gives up waits for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.ssd.base import HEADER_BYTES
from kvstrata.storage.ssd.raw_file import aligned_buffer

log = get_logger(__name__)

#: A thread's buffer: a slot of a block of up to 2 MiB, or a run of smaller ones. Pages come with use.
BUFFER_BYTES: Final = (2 << 20) + HEADER_BYTES


class GivenUp(Exception):
    """The caller has left: its memory must not be touched any more."""


class Batch:
    """The jobs of one call on one device, and whether their caller still waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending = 0
        self._inside = 0
        self.given_up = False

    def begin(self) -> None:
        with self._changed:
            self._pending += 1

    def end(self) -> None:
        with self._changed:
            self._pending -= 1
            if not self._pending:
                self._changed.notify_all()

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Memory of the caller's may be read and written inside. Raises :class:`GivenUp`."""
        with self._changed:
            if self.given_up:
                raise GivenUp
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """True when every job has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def give_up(self) -> None:
        """From its return on no thread touches the caller's memory. Waits for copies of one buffer at most."""
        with self._changed:
            self.given_up = True
            self._changed.wait_for(lambda: not self._inside)


@dataclass(frozen=True, slots=True)
class Job:
    """``run(buffer)`` in some thread of a lane; what it finds out it writes where its caller looks."""

    run: Callable[[memoryview], None]
    batch: Batch


class Lane:
    """Threads with a queue. ``wanted()`` is asked before each job, ``failed(error)`` told of each OSError.

    Threads start when jobs find none idle, as daemons: one that is stuck does not keep the process from ending.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        wanted: Callable[[], bool],
        failed: Callable[[OSError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._limit = threads
        self._wanted = wanted
        self._failed = failed
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()
        self._began: dict[int, float] = {}
        self._closed = False

    def submit(self, job: Job) -> None:
        job.batch.begin()
        with self._starting:
            if self._closed:
                job.batch.end()
                return
            busy = len(self._began) + self._jobs.qsize()
            if len(self._threads) < self._limit and busy >= len(self._threads):
                name = f"kvstrata-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)

    def oldest_s(self) -> float:
        """How long the job that has run longest has been running; 0 when none is."""
        began = list(self._began.values())
        return self._clock() - min(began) if began else 0.0

    def drop_queued(self) -> None:
        """End all jobs that no thread has begun, without running them."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.batch.end()

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, end the threads; False when one of them is stuck."""
        with self._starting:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        deadline = self._clock() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        buffer = aligned_buffer(BUFFER_BYTES)
        me = threading.get_ident()
        while (job := self._jobs.get()) is not None:
            if self._wanted() and not job.batch.given_up:
                self._began[me] = self._clock()
                self._run(job, buffer)
                del self._began[me]
            job.batch.end()

    def _run(self, job: Job, buffer: memoryview) -> None:
        try:
            job.run(buffer)
        except GivenUp:
            return  # the caller has its answer
        except OSError as error:
            self._failed(error)
        except Exception:
            log.error("a job on a device broke off", lane=self._name, exc_info=True)
