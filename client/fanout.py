"""Work for several nodes, or shards, at once, on a bounded set of threads; a single node's runs on the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kvstrata.proto.errors import Closed
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.tracing import TRACING

log = get_logger(__name__)

THREADS: Final = 16
#: Every task is bounded by its call's deadline; one that is not done by then is logged this often.
OVERDUE_S: Final = 5.0

T = TypeVar("T")


class Fanout:
    """Tasks must be bounded in time themselves and must not wait for other tasks."""

    def __init__(self, threads: int = THREADS, name: str = "kvstrata-node") -> None:
        self._threads = threads
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all, the first on this thread; returns when every one has ended, whatever happened.

        That holds on errors too, since tasks write to the caller's memory. The first error is raised.
        """
        if len(tasks) == 1:
            return [tasks[0]()]
        if not tasks:
            return []
        others: list[Future[T]] = []
        mine: Future[T] = Future()
        try:
            self._submit(tasks[1:], others)
            mine.set_result(tasks[0]())
        except BaseException as error:
            mine.set_exception(error)
            if not isinstance(error, Exception):
                for other in others:
                    _ended(other)
                raise
        for other in others:
            _ended(other)
        return [future.result() for future in (mine, *others)]

    def _submit(self, tasks: Sequence[Callable[[], T]], begun: list[Future[T]]) -> None:
        """``begun`` gets those that have been, also when the next cannot be."""
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=self._name)
            for task in tasks:
                begun.append(self._pool.submit(TRACING.carried(task)))

    def close(self) -> None:
        """Refuse new work; what runs ends by its own deadline."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)


def _ended(future: Future[T]) -> None:
    """Wait for a task's end: its memory is the caller's again only then."""
    while True:
        try:
            future.exception(OVERDUE_S)
            return
        except TimeoutError:
            log.error("a part of a call is overdue; its memory stays in use", waited_s=OVERDUE_S)
