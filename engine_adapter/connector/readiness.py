"""Whether the pool can be used now: from how calls ended, and from one probe at a time. Sans-IO.

::

    ABSENT --probe answered--> READY
    READY  --refused, or LATE_CALLS_MAX late calls one after the other--> ABSENT
    READY  --nobody reached--> still READY, probed at once --no answer--> ABSENT

A call that reached nobody may have lost one node of many, so a probe decides. It costs nothing to go on
meanwhile: calls to what is known to be gone fail at once. Late calls cost their whole deadline each, so the
pool counts as absent until the same data comes in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvstrata.engine_adapter.connector.base import PoolState

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 1.0
#: Calls that were late for all their blocks, one after the other, until the pool counts as absent.
LATE_CALLS_MAX: Final = 2


class Verdict(IntEnum):
    """How a call of the pool ended, as a whole."""

    ANSWERED = 0  #: the pool said something of at least one block
    LOST = 1  #: no master or node was reached
    LATE = 2  #: every block was late: the pool is alive, and slow
    REFUSED = 3  #: this engine's blocks are not what the pool knows under their name, or the versions differ


@dataclass(slots=True)
class Readiness:
    """Times are monotonic seconds, and come in. Not thread-safe."""

    state: PoolState = PoolState.ABSENT
    reason: str = "not reached yet"
    data_late: bool = False  #: a probe must load something in time, not only ask
    _late_calls: int = 0
    _retry_at: float = field(default=0.0)
    _backoff_s: float = BACKOFF_FIRST_S
    _suspected: bool = True
    _probing: bool = False

    def call_ended(self, verdict: Verdict, reason: str, now: float) -> bool:
        """Enter how a call ended; True when a probe should be made now."""
        if verdict is Verdict.ANSWERED:
            self._late_calls = 0
            return False
        if verdict is Verdict.LATE:
            self._late_calls += 1
            if self._late_calls < LATE_CALLS_MAX:
                return False
            self.data_late = True
        if self.state is PoolState.ABSENT:
            return False
        self._retry_at, self._backoff_s, self._suspected = now, BACKOFF_FIRST_S, True
        if verdict is not Verdict.LOST:
            self.state, self.reason = PoolState.ABSENT, reason
        return True

    def begin_anew(self, reason: str, now: float) -> None:
        """What was known is void: absent until a probe that is due now, or the next one, has answered."""
        self.state, self.reason, self.data_late, self._late_calls = PoolState.ABSENT, reason, False, 0
        self._retry_at, self._backoff_s, self._suspected = now, BACKOFF_FIRST_S, True

    def claim_probe(self, now: float) -> bool:
        """True when one is due; it is the caller's until :meth:`probed`."""
        if self._probing or not self._suspected or now < self._retry_at:
            return False
        self._probing = True
        return True

    def probed(self, problem: str, now: float) -> None:
        """The claimed probe ended; ``problem`` is empty when the pool answered."""
        assert self._probing, "nobody claimed this probe"
        self._probing = False
        if not problem:
            self.state, self.reason, self.data_late = PoolState.READY, "", False
            self._late_calls, self._backoff_s, self._suspected = 0, BACKOFF_FIRST_S, False
            return
        self.state, self.reason = PoolState.ABSENT, problem
        self._retry_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)

    def check(self) -> None:
        """Assert every structural invariant."""
        assert self._suspected or self.state is PoolState.READY, "absent, and nobody will ask again"
        assert bool(self.reason) == (self.state is PoolState.ABSENT)
        assert BACKOFF_FIRST_S <= self._backoff_s <= BACKOFF_MAX_S
        assert not self._probing or self._suspected
