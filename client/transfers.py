"""Loads and stores in the background: a bounded pool of threads, and a handle on each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from kvstrata.proto.errors import Closed, Unavailable
from kvstrata.transfer.tracing import TRACING

THREADS: Final = 8
PENDING_MAX: Final = 1024
#: A call ends by its deadline plus what one silent peer can add; ``result()`` waits no longer than this past it.
GRACE_S: Final = 2.0


class Settling(Protocol):
    """A result, of which some memory may still be in use."""

    def settled(self, deadline: float | None = None) -> bool:
        """True once it is not; waits until ``deadline`` (monotonic seconds), if one is given."""


R = TypeVar("R", bound=Settling)


class TransferState(Enum):
    """PENDING: the memory it names must not be reused. Everything else is terminal."""

    PENDING = "pending"
    DONE = "done"  #: ended with a result, which may be all misses
    REFUSED = "refused"  #: ended with an error, which ``result()`` raises


class Transfer(Generic[R]):
    """A load or a store under way. Deadlines are monotonic seconds, as ``time.monotonic()`` gives them.

    Its call may end before its memory is free: when one-sided transfers have not settled (see ``settled()`` of the
    result). It is PENDING until they have.
    """

    def __init__(self, future: Future[R], deadline: float) -> None:
        self._future = future
        self._deadline = deadline

    @property
    def state(self) -> TransferState:
        if not self._future.done():
            return TransferState.PENDING
        if self._future.exception() is not None:
            return TransferState.REFUSED
        return TransferState.DONE if self._future.result().settled() else TransferState.PENDING

    def done(self) -> bool:
        """True once it is terminal: its memory is the caller's again."""
        return self.state is not TransferState.PENDING

    def wait(self, deadline: float | None = None) -> bool:
        """Wait until it is terminal or ``deadline`` passes (default: its own, plus a grace); ``done()``."""
        until = self._until(deadline)
        if not self._call_ended(until):
            return False
        return self._future.exception() is not None or self._future.result().settled(until)

    def result(self) -> R:
        """The result of the call, waited for as by ``wait()``; rows of it may be PENDING. Raises what the call would
        have raised, or :class:`Unavailable` while it has not ended: all its memory is in use then."""
        if not self._call_ended(self._until(None)):
            raise Unavailable("the transfer has not ended: its memory is still in use; ask again")
        return self._future.result()

    def _until(self, deadline: float | None) -> float:
        return self._deadline + GRACE_S if deadline is None else deadline

    def _call_ended(self, until: float) -> bool:
        try:
            self._future.exception(max(0.0, until - time.monotonic()))
        except TimeoutError:
            return False
        return True


class Transfers:
    """Runs calls in the background. At most ``PENDING_MAX`` are accepted at a time."""

    def __init__(self, threads: int = THREADS, pending_max: int = PENDING_MAX) -> None:
        self._threads = threads
        self._pending_max = pending_max
        self._pool: ThreadPoolExecutor | None = None
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pending(self) -> int:
        return self._pending

    def submit(self, call: Callable[[], R], shed: Callable[[], R]) -> Future[R]:
        """Run ``call`` soon; past the bound ``shed()`` is the result at once. Raises :class:`Closed`."""
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            full = self._pending >= self._pending_max
            if not full:
                self._pending += 1
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvstrata-transfer")
                future = self._pool.submit(TRACING.carried(call))
        if full:
            future = Future()
            future.set_result(shed())
            return future
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[R]) -> None:
        with self._lock:
            self._pending -= 1

    def close(self) -> None:
        """Accept no more; those that wait run out (the client refuses them), those that run end by deadline."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=False)
