"""Who may still be using something that its owner has let go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class Holders:
    """Thread-safe. A holder that is collected holds no longer: :meth:`look` finds that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._then: Callable[[], None] | None = None

    def add(self, holder: object) -> None:
        with self._lock:
            self._holders.add(holder)

    def discard(self, holder: object) -> None:
        """Safe twice."""
        with self._lock:
            self._holders.discard(holder)
        self.look()

    def when_none(self, then: Callable[[], None]) -> None:
        """``then`` runs once, in the thread of the last holder that goes; here and now when there is none."""
        with self._lock:
            self._then = then
        self.look()

    def look(self) -> None:
        """Run what waits for the last holder, if there is none."""
        with self._lock:
            then = None if len(self._holders) else self._then
            if then is not None:
                self._then = None
        if then is not None:
            then()
