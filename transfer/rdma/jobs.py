"""What callers hold of an engine: a job, and a registration. See the protocols in ``engine``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstrata.proto.logs import get_logger
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.rdma.engine import JobState, Pieces
from kvstrata.transfer.rdma.ledger import SETTLED, Held, Transfer

log = get_logger(__name__)


class RailJob(Transfer):
    """See :class:`kvstrata.transfer.rdma.engine.Job`."""

    def __init__(self, peer: str, local: Pieces, remote: Pieces, drop: Callable[[RailJob], None]) -> None:
        super().__init__(peer, local, remote)
        self.handle: object = None  # of the agent, while it is posted
        self._drop_waiting = drop
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def settled(self) -> bool:
        return self._ended.is_set()

    def wait(self, deadline: float) -> bool:
        if self._ended.is_set():
            return True
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def give_up(self) -> bool:
        self._drop_waiting(self)
        return self._ended.is_set()

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._calls.append(call)
                return
        call()

    def refuse(self, problem: str) -> RailJob:
        """It never came as far as waiting."""
        self.state, self.problem = JobState.DROPPED, problem
        self.ended()
        return self

    def ended(self) -> None:
        """Wake who waits. Called once, by whoever settled it, with no lock held."""
        assert self.state in SETTLED
        with self._lock:
            self._ended.set()
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                log.error("what follows a one-sided transfer failed", peer=self.peer, exc_info=True)


class RailRegistration:
    """See :class:`kvstrata.transfer.rdma.engine.Registration`."""

    def __init__(self, held: Held, metadata: bytes, close: Callable[[Held], None]) -> None:
        self.address = held.address
        self.nbytes = held.nbytes
        self.memory: Memory = held.memory
        self.metadata = metadata
        self._held = held
        self._close = close

    def close(self) -> None:
        self._close(self._held)
