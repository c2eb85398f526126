"""Tickets fetched from a master for a token or a certificate, in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from google.protobuf.message import DecodeError

from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.greeting import greet
from kvstrata.client.security.holding import RETRY_MIN_S, Holding
from kvstrata.client.security.https import request
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Closed, ConfigError, Forbidden, KVError, Refused, Unauthenticated, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.identity import named_host
from kvstrata.transfer.loops import Loop

log = get_logger(__name__)

#: Only the first call waits for a ticket, and no longer than this.
FIRST_S: Final = 2.0
#: One master is given so long to answer.
MASTER_S: Final = 2.0
#: Age at which the loop counts as stuck: every master may have used up its time.
BOUND_S: Final = 60.0
STOP_S: Final = 0.5
#: Seconds of life below which a ticket that could not be replaced is a problem of its own.
SHORT_S: Final = 60.0

Fetch = Callable[[str, Credentials, float], pb.Ticket]


class FetchedTickets:
    """A :class:`~kvstrata.transfer.security.tickets.TicketSource`: one ticket, replaced at half of its life.

    A loop of its own asks the masters in turn, so that a slow one holds up nothing else; ``current`` never asks. While
    no master gives a new one the old one is shown until its life ends.
    """

    def __init__(self, masters: Sequence[str], credentials: Credentials, *, fetch: Fetch | None = None) -> None:
        self._masters = tuple(masters)
        self._credentials = credentials
        self._fetch = fetch or fetch_ticket
        self._holding = Holding()
        self._tried = threading.Event()
        self._closed = False
        self.loop = Loop("client-tickets", RETRY_MIN_S, self.turn, bound_s=BOUND_S)

    @classmethod
    def shown_for(cls, masters: Sequence[str], credentials: Credentials) -> FetchedTickets | None:
        """A source, not started, for whoever has something to show; None for others.

        Raises :class:`ConfigError` for files that cannot be used now: later that is a problem in health."""
        credentials.checked()
        return cls(masters, credentials) if credentials.identifies else None

    def start(self) -> FetchedTickets:
        """Begin to fetch; the caller closes it."""
        self.loop.start()
        return self

    def current(self) -> pb.Ticket:
        """The ticket to prove. The first call may wait ``FIRST_S`` for it; later ones never do.

        Raises :class:`Unauthenticated` or :class:`Forbidden` with what to do when masters refuse, and
        :class:`Unavailable` when none can be asked.
        """
        holding = self._holding
        ticket = holding.good(time.monotonic())
        if ticket is not None:
            return ticket
        if not self._tried.wait(FIRST_S):
            raise Unavailable(f"no master gave a ticket within {FIRST_S:g} s")
        ticket = holding.good(time.monotonic())
        if ticket is not None:
            return ticket
        if self._closed:
            raise Closed("the client is closed")
        problem = holding.problem or Unavailable("the ticket has run out, and no master was asked for another yet")
        raise type(problem)(str(problem))

    def refused(self, ticket: pb.Ticket) -> None:
        """Somebody did not take this ticket: have a fresh one fetched soon, as the pool's keys may have changed."""
        self._holding.refused(ticket, time.monotonic())
        self.loop.wake()

    def turn(self) -> float:
        """Fetch, if it is time: what the loop does. Returns the seconds until it is time again."""
        if self._holding.due(time.monotonic()):
            self._fetch_one()
        return self._holding.due_in(time.monotonic())

    def _fetch_one(self) -> None:
        holding = self._holding
        had = holding.problem
        try:
            ticket = self._ask_masters()
            holding.take(ticket, time.monotonic())
        except KVError as error:
            holding.fail(error, time.monotonic())
            if had is None:
                log.warning("no fresh ticket", reason=str(error), good_s=round(self.seconds_left()))
        else:
            if had is not None:
                log.info("tickets are given again", subject=holding.claims.subject)
        self._tried.set()

    def _ask_masters(self) -> pb.Ticket:
        """Raises the first refusal if there was one, else what the last master's silence was."""
        refusal: KVError | None = None
        problem: KVError = Unavailable("there is no master to ask")
        for address in self._masters:
            if self._closed:
                break
            try:
                return self._fetch(address, self._credentials, time.monotonic() + MASTER_S)
            except ConfigError as error:  # a file that was good at the start
                refusal = refusal or Unauthenticated(str(error))
            except Refused as error:
                refusal = refusal or error
            except KVError as error:
                problem = error
        raise refusal or problem

    def seconds_left(self) -> float:
        return max(0.0, self._holding.good_until - time.monotonic())

    def problems(self) -> list[str]:
        """What is wrong, for health: a refusal at once, an absent master once the ticket's end is near."""
        found = [self.loop.problem()] if self.loop.problem() else []
        problem = self._holding.problem
        if problem is not None and (isinstance(problem, Refused) or self.seconds_left() < SHORT_S):
            found.append(f"tickets: {problem}")
        return found

    def counts(self) -> dict[str, int]:
        """Tickets asked for, by outcome."""
        holding = self._holding
        return {"fetched": holding.fetched, "failed": holding.failed}

    def health(self) -> dict[str, object]:
        holding = self._holding
        return {
            "subject": holding.claims.subject,
            "role": holding.claims.role,
            "seconds_left": round(self.seconds_left(), 1),
            "fetched": holding.fetched,
            "failed": holding.failed,
            "problem": str(holding.problem or ""),
        }

    def close(self) -> None:
        self._closed = True
        self._tried.set()
        self.loop.stop(STOP_S)

    def __enter__(self) -> FetchedTickets:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fetch_ticket(address: str, credentials: Credentials, deadline: float) -> pb.Ticket:
    """Ask the master at a channel ``address`` for a ticket. Raises :class:`Retryable` errors, or a refusal."""
    hello = greet(address)
    if not hello.http:
        raise Unavailable(f"the master at {address} names no HTTP endpoint: start it with --http HOST:PORT")
    answer = request(
        credentials, "POST", hello.http, "/ticket", named=named_host(address, hello.http), deadline=deadline
    )
    if answer.status == 200:
        with suppress(DecodeError):
            return pb.Ticket.FromString(answer.body)
        raise Unavailable(f"{hello.http}/ticket answers with something that is no ticket")
    raise _meaning(answer.status, f"the master at {address}")


def _meaning(status: int, who: str) -> KVError:
    if status == 401:
        return Unauthenticated(f"{who} does not know this token: is it the right pool, or was the token removed?")
    if status == 403:
        return Forbidden(f"{who} gives no ticket for a token of this role")
    if status in (404, 405):
        return Unauthenticated(
            f"{who} gives no tickets: it runs without --tokens, or is older. Give no token where a pool wants none"
        )
    if status == 429:
        return Busy(f"{who} was asked for too many tickets: the next attempt comes later")
    return Unavailable(f"{who} answers {status} to a request for a ticket")
