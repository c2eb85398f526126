"""The life of a client's ticket: when the next one is due, and until when the present one is shown. No clock is read.

Times are monotonic seconds. How long a ticket lives is taken from its claims and counted from its coming, so that
clocks that differ between hosts do not matter.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import KVError, Unavailable
from kvstrata.transfer.security.tickets import CLAIMS_BYTES_MAX

#: Waits between attempts that failed: they double from the first to the last.
RETRY_MIN_S: Final = 0.25
RETRY_MAX_S: Final = 15.0
#: Time between two tickets that are fetched because somebody did not take the last one; doubles while that goes on.
REFUSED_MIN_S: Final = 30.0
REFUSED_MAX_S: Final = 300.0
#: A ticket whose claims say less is fetched again no sooner.
LIFE_MIN_S: Final = 1.0


class Holding:
    """The ticket in hand, and what was last wrong. One thread changes it; ``ticket`` may be read by all."""

    def __init__(self) -> None:
        self.ticket: pb.Ticket | None = None
        self.claims = pb.TicketClaims()
        self.problem: KVError | None = None
        self.good_until = 0.0
        self.fetched = 0
        self.failed = 0
        self._due_at = 0.0
        self._retry_s = RETRY_MIN_S
        self._heed_at = 0.0
        self._heed_s = REFUSED_MIN_S

    def due(self, now: float) -> bool:
        return now >= self._due_at

    def due_in(self, now: float) -> float:
        """Seconds until the next one is due; 0 when it is."""
        return max(0.0, self._due_at - now)

    def good(self, now: float) -> pb.Ticket | None:
        """The one to show; None while there is none, or when its life has ended."""
        return self.ticket if now < self.good_until else None

    def take(self, ticket: pb.Ticket, now: float) -> None:
        """A fresh one has come: the next is due at half of its life. Raises :class:`Unavailable` for nonsense."""
        claims = read_claims(ticket)
        life_s = max(LIFE_MIN_S, (claims.expires_ms - claims.issued_ms) / 1e3)
        self._due_at = now + life_s / 2  # before it can be shown: whoever refuses it then changes that
        self.ticket, self.claims, self.problem = ticket, claims, None
        self.good_until = now + life_s
        self._retry_s = RETRY_MIN_S
        self.fetched += 1
        self.check()

    def fail(self, problem: KVError, now: float) -> None:
        """None could be had: the one in hand goes on while it is good."""
        self.problem = problem
        self.failed += 1
        self._due_at = now + self._retry_s
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)
        self.check()

    def refused(self, ticket: pb.Ticket, now: float) -> None:
        """Somebody did not take ``ticket``: a fresh one is due, unless one came meanwhile, or an attempt just failed.

        At once for the first in a while: who takes none at all does not have them fetched without end."""
        if ticket is not self.ticket or self.problem is not None:
            return
        if now >= self._heed_at + self._heed_s:
            self._heed_s = REFUSED_MIN_S
        at = max(now, self._heed_at)
        if at < self._due_at:
            self._due_at = at
            self._heed_at = at + self._heed_s
            self._heed_s = min(REFUSED_MAX_S, 2 * self._heed_s)

    def check(self) -> None:
        """Raises :class:`AssertionError` when it contradicts itself."""
        assert RETRY_MIN_S <= self._retry_s <= RETRY_MAX_S
        assert REFUSED_MIN_S <= self._heed_s <= REFUSED_MAX_S
        assert self.ticket is not None or self.good_until == 0.0
        assert self.ticket is None or self.ticket.secret, "a ticket without its secret proves nothing"
        assert (self.fetched > 0) == (self.ticket is not None)


def read_claims(ticket: pb.Ticket) -> pb.TicketClaims:
    """Raises :class:`Unavailable` for what no master gives."""
    try:
        claims = pb.TicketClaims.FromString(ticket.claims) if len(ticket.claims) <= CLAIMS_BYTES_MAX else None
    except DecodeError:
        claims = None
    if claims is None or not ticket.secret or claims.expires_ms <= claims.issued_ms:
        raise Unavailable("the master gave something that is no ticket: is it of a later version?")
    return claims
