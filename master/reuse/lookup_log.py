"""Lookups and placements on their way from the threads that answer them to the what-if predictions.

Answering must not wait for statistics: a call puts down what it was about, and a loop hears it later. What
finds the log full is not heard, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
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
#: In a turn, the interpreter goes this often to a thread that answers somebody, if one waits for it.
BREATH_S: Final = 0.0002
#: Placements in a row are taken in together, up to so many hashes.
TOGETHER_MAX: Final = 256


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
        breath = time.perf_counter()
        while time.thread_time() < busy and (now := time.perf_counter()) < ends:
            if now >= breath:
                time.sleep(0)
                breath = time.perf_counter() + BREATH_S
            calls = self._next()
            if not calls:
                break
            with self._lock:
                self._take(calls)
            heard += len(calls)
        return heard

    def _next(self) -> list[Call | Gone]:
        """The oldest entry, and the placements of the same blocks' tenant that follow it if it is one."""
        calls: list[Call | Gone] = []
        blocks = 0
        with self._counting:
            while self._calls:
                call = self._calls[0]
                if isinstance(call, Call):
                    blocks += len(call.keys)
                if calls and (blocks > TOGETHER_MAX or not _alike(calls[0], call)):
                    break
                calls.append(self._calls.popleft())
                self._waiting -= 0 if isinstance(call, Gone) else bytes_of(call)
                if isinstance(call, Gone) or call.present is not None:
                    break
        return calls

    def _take(self, calls: Sequence[Call | Gone]) -> None:
        call = calls[-1]
        if isinstance(call, Gone):
            self._what_if.forget(call.salt, call.group)
        elif call.present is not None:
            self._what_if.asked(call.group, call.salt, call.keys, call.present, call.block_bytes, call.at)
        else:
            # Of one call the first block is the hottest, of many the last call's: as if it were one, back to front.
            keys = [each.keys for each in reversed(calls) if isinstance(each, Call)]
            together = keys[0] if len(keys) == 1 else np.concatenate(keys)
            self._what_if.stored(call.group, call.salt, together, call.block_bytes, call.at)

    def read(self, question: Callable[[WhatIf], T]) -> T:
        """Ask the predictions something. The question must be quick and keep nothing."""
        with self._lock:
            return question(self._what_if)


def _alike(one: Call | Gone, other: Call | Gone) -> bool:
    """Both are placements of one tenant in one group."""
    return (
        isinstance(one, Call)
        and isinstance(other, Call)
        and one.present is other.present is None
        and (one.group, one.salt, one.block_bytes) == (other.group, other.salt, other.block_bytes)
    )


def bytes_of(call: Call) -> int:
    """About the memory that a call which waits takes."""
    return CALL_BYTES + HASH_BYTES * len(call.keys)
