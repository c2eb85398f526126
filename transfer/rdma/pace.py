"""How long the owner of an agent may sleep: quick right after something happened, then ever slower. Time comes in."""

from __future__ import annotations

from typing import Final

#: Between turns with nothing in hand: an agent must answer another one's first contact.
IDLE_S: Final = 0.050
#: The same, while a peer is expected to need this agent.
STIRRED_S: Final = 0.001
#: And while this agent reads by itself: a turn is in the way of a caller's own read.
READING_S: Final = 0.005
STIR_S: Final = 0.25
#: A turn comes no later than this part of the time that a transfer has taken so far.
_PART: Final = 16.0
_FIRST_S: Final = 20e-6


class Pace:
    """Not thread-safe beyond single attribute writes."""

    def __init__(self, now: float) -> None:
        self._active = now - STIR_S
        self._stirred = now - STIR_S
        self._progressed = 0.0

    def active(self, now: float) -> None:
        """Something was posted, or has settled."""
        self._active = now

    def stir(self, now: float) -> None:
        self._stirred = now

    def nap_s(self, now: float, *, posted: bool) -> float:
        """At most :data:`IDLE_S`."""
        if not posted:
            return self._step_s(now)
        return min(self._step_s(now), max(_FIRST_S, (now - self._active) / _PART))

    def progress_due(self, now: float) -> bool:
        """Whether other agents are to be answered in this turn; claims it."""
        if now - self._progressed < self._step_s(now) / 2:
            return False
        self._progressed = now
        return True

    def _step_s(self, now: float) -> float:
        if now - self._stirred < STIR_S:
            return STIRRED_S
        return READING_S if now - self._active < STIR_S else IDLE_S
