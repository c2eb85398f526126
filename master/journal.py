"""Writes on their way to the state store: in order, retried until they are in, seen in health."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

from kvstrata.master.messages import (
    Save,
    SaveFallback,
    SaveGrants,
    SaveGroup,
    SaveNode,
    SavePolicy,
    SaveReplicas,
    SaveScope,
    SaveTombstone,
)
from kvstrata.master.stores.base import Deposed, StateStore
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: Distinct rows that may wait while the store refuses writes; past it the oldest is given up, and counted.
PENDING_MAX: Final = 20_000
WAIT_S: Final = 2.0


class Journal:
    """Keeps the newest version of each row until the store has taken it. Thread-safe.

    A store that is full or locked costs nothing but durability: the master goes on, and says so.
    """

    def __init__(self, store: StateStore) -> None:
        self.failures = 0
        self.given_up = 0
        self.on_deposed: Callable[[], None] = lambda: None  #: the store knows a later leader
        self._store = store
        self._epoch = 0
        self._pending: dict[tuple[str, str], Save] = {}
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._error = ""

    def add(self, writes: Iterable[Save]) -> None:
        """Queue writes; they are durable once :meth:`flush` has returned True."""
        with self._lock:
            for write in writes:
                key = row_key(write)
                self._pending.pop(key, None)
                self._pending[key] = write
            while len(self._pending) > PENDING_MAX:
                self._pending.pop(next(iter(self._pending)))
                self.given_up += 1

    def waiting(self) -> int:
        """Rows that the store has not taken yet."""
        with self._lock:
            return len(self._pending)

    def flush(self, wait_s: float = WAIT_S) -> bool:
        """Write all that waits now; True when it is durable. Waits ``wait_s`` for a write in progress."""
        if not self._flushing.acquire(timeout=wait_s):
            return False
        try:
            with self._lock:
                batch, epoch = dict(self._pending), self._epoch
            return not batch or self._write(batch, epoch)
        finally:
            self._flushing.release()

    def _write(self, batch: dict[tuple[str, str], Save], epoch: int) -> bool:
        try:
            self._store.save(batch.values(), epoch)
        except Deposed as error:
            self.failures += 1
            log.warning("state store refused a write", error=str(error), waiting=len(batch))
            self.on_deposed()
            return False
        except Unavailable as error:
            self.failures += 1
            self._error = str(error)
            log.error("state store refused a write", error=str(error), waiting=len(batch))
            return False
        with self._lock:
            self._error = ""
            for key, write in batch.items():
                if self._pending.get(key) is write:
                    del self._pending[key]
        return True

    def serve(self, epoch: int) -> None:
        """Write for the leader of this epoch from now on; what waits of another is given up: 0 is nobody's."""
        with self._lock:
            if not epoch or not self._epoch:
                self._pending.clear()
                self._error = ""
            self._epoch = epoch

    def problem(self) -> str:
        """Why rows wait, or an empty string."""
        with self._lock:
            return f"{self._error} ({len(self._pending)} rows wait)" if self._error else ""


def row_key(write: Save) -> tuple[str, str]:
    """What a write is the newest version of."""
    match write:
        case SaveNode():
            return "node", write.node_id
        case SaveGroup():
            return "group", write.namespace.group
        case SaveTombstone():
            return "tombstone", str(write.command)
        case SavePolicy():
            return "policy", write.salt
        case SaveFallback():
            return "fallback", ""
        case SaveGrants():
            return "grants", write.node_id
        case SaveScope():
            return "scope", str(write.command)
        case SaveReplicas():
            return "replicas", f"{write.group}/{write.salt}"
