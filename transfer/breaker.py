"""A circuit breaker for one peer: after a failure, calls fail at once until a probe succeeds.

Sans-IO: time comes in. Not thread-safe by itself beyond single attribute writes; owners may race, and
the worst outcome is one extra probe.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 1.0


@dataclass(slots=True)
class Breaker:
    """Closed: calls pass. Open: calls are refused; ``due(now)`` says when one probe may go."""

    open_since: float | None = None
    retry_at: float = 0.0
    backoff_s: float = BACKOFF_FIRST_S
    reason: str = ""
    opened: int = 0

    @property
    def closed(self) -> bool:
        return self.open_since is None

    def failed(self, now: float, reason: str) -> None:
        """Open, or stay open for twice as long (at most ``BACKOFF_MAX_S``)."""
        if self.open_since is None:
            self.open_since = now
            self.opened += 1
            self.backoff_s = BACKOFF_FIRST_S
        else:
            self.backoff_s = min(self.backoff_s * 2, BACKOFF_MAX_S)
        self.retry_at = now + self.backoff_s
        self.reason = reason

    def succeeded(self) -> None:
        self.open_since = None
        self.reason = ""

    def due(self, now: float) -> bool:
        """True when the breaker is open and one probe may go; claims that probe."""
        if self.open_since is None or now < self.retry_at:
            return False
        self.retry_at = now + self.backoff_s
        return True
