"""Commands on their way to one node: bounded, in order, each with who leads."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstrata.master import messages as m

OUTBOX_MAX: Final = 20_000
#: A node that has this much to read yet is spared hints.
HINTS_BEHIND_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who says something to a node: the leader of an epoch, or a master that does not lead (0 and "")."""

    epoch: int = 0
    leader_id: str = ""


NOBODY: Final = Stamp()


class Outbox:
    """``closed`` holds the reason once the session is over. Thread-safe."""

    def __init__(self) -> None:
        self._queue: deque[tuple[m.Send, Stamp]] = deque()
        self._changed = threading.Condition()
        self.closed: str | None = None

    def put(self, command: m.Send, stamp: Stamp = NOBODY) -> None:
        with self._changed:
            if isinstance(command, m.SendHint) and len(self._queue) >= HINTS_BEHIND_MAX:
                return
            if self.closed is None and len(self._queue) >= OUTBOX_MAX:
                self.closed = "the node does not read what it is sent"
            if isinstance(command, m.SendAck) and self._queue and isinstance(self._queue[-1][0], m.SendAck):
                self._queue.pop()  # the newer acknowledgement says it all
            self._queue.append((command, stamp))
            self._changed.notify()

    def close(self, reason: str) -> None:
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify()

    def get(self, timeout_s: float) -> tuple[m.Send, Stamp] | None:
        """The next command and who says it; None after ``timeout_s`` without one, or when closed and empty."""
        with self._changed:
            if not self._queue and self.closed is None:
                self._changed.wait(timeout_s)
            return self._queue.popleft() if self._queue else None
