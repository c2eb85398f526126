"""Commands on their way to one node: bounded, in order, each with who leads."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstrata.master import messages as m

OUTBOX_MAX: Final = 20_000
#: A node that has this much to read yet is spared hints.
HINTS_BEHIND_MAX: Final = 256
#: Acknowledgements go out this far apart, the newest for all before it: nobody waits for one, and each costs a message.
ACK_S: Final = 0.25


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
        self._acked_at = -ACK_S
        self._gathering = False  #: the reader has an acknowledgement, and waits for what comes with it
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
            if not (self._gathering and isinstance(command, m.SendAck)):
                self._changed.notify()

    def close(self, reason: str) -> None:
        with self._changed:
            self.closed = self.closed or reason
            self._changed.notify()

    def get(self, timeout_s: float) -> tuple[m.Send, Stamp] | None:
        """The next command and who says it; None after ``timeout_s`` without one, or when closed and empty.

        For one reader. An acknowledgement may keep it ``ACK_S`` longer; nothing does where ``timeout_s`` is 0.
        """
        with self._changed:
            if timeout_s and self.closed is None:
                if not self._queue:
                    self._changed.wait(timeout_s)
                if len(self._queue) == 1 and isinstance(self._queue[0][0], m.SendAck) and self.closed is None:
                    self._gather()
            if not self._queue:
                return None
            said = self._queue.popleft()
            if isinstance(said[0], m.SendAck):
                self._acked_at = time.monotonic()
            return said

    def _gather(self) -> None:
        """Keep an acknowledgement until it is time for one, or something else is to be said after it."""
        left = self._acked_at + ACK_S - time.monotonic()
        if left > 0:
            self._gathering = True
            self._changed.wait(left)
            self._gathering = False
