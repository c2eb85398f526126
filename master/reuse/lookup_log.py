"""Lookups and placements on their way from the threads that answer them to the what-if predictions.

Answering must not wait for statistics: a call puts down what it was about, and a loop hears it later. What
finds the log full is not heard, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.probing import Keys
from kvstrata.master.reuse.what_if import WhatIf

T = TypeVar("T")

#: Memory of the calls that wait: so much for each of their hashes, and for a call as such.
WAITING_BYTES_MAX: Final = 17 << 20
HASH_BYTES: Final = 17
CALL_BYTES: Final = 700
#: CPU seconds of a turn: with four turns a second, a fifth of a core at the most. Answers go first, so that on a
#: busy master it takes longer by the clock, but no longer than ``TURN_MAX_S``.
TURN_S: Final = 0.05
TURN_MAX_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Call:
    """A lookup (``present``: which blocks the pool has), or a placement (None). ``block_bytes``: all shards'."""

    group: int
    salt: str
    keys: Keys
    present: npt.NDArray[np.bool_] | None
    block_bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class Gone:
    """The blocks of a tenant (None: of all) in a group (None: in all) are no more."""

    group: int | None
    salt: str | None


class LookupLog:
    """Thread-safe. ``hear`` is for one loop; readers ask by ``read``."""

    def __init__(self, what_if: WhatIf) -> None:
        self._what_if = what_if
        self._lock = threading.Lock()
        self._calls: deque[Call | Gone] = deque()
        self._waiting = 0
        self._counting = threading.Lock()
        self.missed = 0  #: calls that found the log full

    def put(self, call: Call) -> None:
        """Note a call; it keeps its arrays. Never waits for predictions."""
        nbytes = bytes_of(call)
        with self._counting:
            if self._waiting + nbytes > WAITING_BYTES_MAX:
                self.missed += 1
                return
            self._waiting += nbytes
            self._calls.append(call)

    def gone(self, group: int | None, salt: str | None) -> None:
        """Note that blocks are no more, after the calls that were put down before. Never refused."""
        with self._counting:
            self._calls.append(Gone(group, salt))

    def hear(self) -> int:
        """Take in what was put down, oldest first, for at most one turn; how many entries."""
        heard = 0
        busy, ends = time.thread_time() + TURN_S, time.perf_counter() + TURN_MAX_S
        while time.thread_time() < busy and time.perf_counter() < ends:
            with self._counting:
                if not self._calls:
                    break
                call = self._calls.popleft()
                self._waiting -= 0 if isinstance(call, Gone) else bytes_of(call)
            with self._lock:
                self._take(call)
            heard += 1
            time.sleep(0)  # the interpreter goes to a thread that answers somebody, if one waits for it
        return heard

    def _take(self, call: Call | Gone) -> None:
        if isinstance(call, Gone):
            self._what_if.forget(call.salt, call.group)
        elif call.present is None:
            self._what_if.stored(call.group, call.salt, call.keys, call.block_bytes, call.at)
        else:
            self._what_if.asked(call.group, call.salt, call.keys, call.present, call.block_bytes, call.at)

    def read(self, question: Callable[[WhatIf], T]) -> T:
        """Ask the predictions something. The question must be quick and keep nothing."""
        with self._lock:
            return question(self._what_if)


def bytes_of(call: Call) -> int:
    """About the memory that a call which waits takes."""
    return CALL_BYTES + HASH_BYTES * len(call.keys)
