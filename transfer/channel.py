"""The framed channel, connecting side: a bounded pool of connections to one peer, behind a breaker.

When a connection finds its peer silent or gone the breaker opens, and every further call fails at once
until a probe gets through.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Closed, TicketExpired, Unauthenticated, Unavailable
from kvstrata.transfer.breaker import Breaker
from kvstrata.transfer.connection import SILENCE_S, Connection
from kvstrata.transfer.frames import Disconnected, Frame, Silent
from kvstrata.transfer.identity import Identity

CONNECTIONS_MAX: Final = 16


class Channel:
    """Connections to one peer: a bounded pool, a breaker, and calls from any thread.

    ``addresses`` are tried in order (a unix socket before the same node's TCP port). A call made on an
    idle connection that turns out closed is repeated once on a fresh one: the request never reached a
    living peer. ``accept`` may refuse a peer by its hello (another incarnation): before anything is proved to it, so it
    keeps nothing of what it is told; ``greeted`` may, once the peer has proved what it is, and may refuse it too. With
    ``self_probing`` a caller makes the probe that closes an open breaker; without it the owner must
    call :meth:`probe` now and then, and no caller ever waits for a dead peer.

    A peer that does not take this side's ticket, or has not got the pool's keys, opens the breaker too. Calls raise
    :class:`Unauthenticated` then, or with ``strangers_are_lost`` :class:`Unavailable`: it is one node of many.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        *,
        accept: Callable[[pb.HelloOk], None] = lambda _: None,
        greeted: Callable[[pb.HelloOk], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        connections_max: int = CONNECTIONS_MAX,
        self_probing: bool = True,
        strangers_are_lost: bool = False,
    ) -> None:
        self.addresses = tuple(addresses)
        self.identity = identity
        self.silence_s = silence_s
        self.breaker = Breaker()
        self.hello: pb.HelloOk | None = None
        self.address = self.addresses[0]
        self._accept = accept
        self._greeted = greeted
        self._self_probing = self_probing
        self._strangers_are_lost = strangers_are_lost
        self._refusal: Unauthenticated | None = None  #: why the breaker is open, where it is that
        self._connections_max = connections_max
        self._free: list[Connection] = []
        self._in_use = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._closed = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------ calls

    def call(self, kind: int, message: bytes, deadline: float, *, meanwhile: Callable[[], None] | None = None) -> Frame:
        """One request, one answer without raw bytes. Raises as :meth:`Connection.call`."""
        connection, reused = self._checkout(deadline)
        try:
            return self._attempt(connection, reused, kind, message, deadline, (), meanwhile)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        except Unauthenticated as error:
            raise self._unauthenticated(error) from error
        finally:
            self._checkin(connection)

    def tell(self, kind: int, message: bytes, deadline: float) -> None:
        """A one-way message. Raises as :meth:`call` where a fresh ticket is not taken."""
        connection, _ = self._checkout(deadline)
        try:
            connection.refresh(deadline)
            connection.tell(kind, message)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        except Unauthenticated as error:
            raise self._unauthenticated(error) from error
        finally:
            self._checkin(connection)

    @contextlib.contextmanager
    def exchange(
        self, kind: int, message: bytes, deadline: float, raw: Sequence[memoryview] = ()
    ) -> Iterator[tuple[Connection, Frame]]:
        """One request; yields (connection, answer) with the answer's raw bytes unread.

        The connection is the caller's until the block ends. Raw bytes left unread close it.
        """
        connection, reused = self._checkout(deadline)
        try:
            yield connection, self._attempt(connection, reused, kind, message, deadline, raw, None)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
        except Unauthenticated as error:
            raise self._unauthenticated(error) from error
        finally:
            self._checkin(connection)

    def _attempt(
        self,
        connection: Connection,
        reused: bool,
        kind: int,
        message: bytes,
        deadline: float,
        raw: Sequence[memoryview],
        meanwhile: Callable[[], None] | None,
    ) -> Frame:
        try:
            if connection.tickets is not None:
                connection.refresh(deadline)
            return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)
        except Disconnected:
            if not reused:
                raise
            self._replace(connection)
        except TicketExpired:
            self._prove_anew(connection, deadline)
        return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)

    @staticmethod
    def _prove_anew(connection: Connection, deadline: float) -> None:
        """Raises :class:`TicketExpired` when there is no other ticket than the one that has run out."""
        if connection.tickets is None:
            raise Unauthenticated(
                "who answers there says that a ticket has run out, and asked for none: is it one of the pool?"
            )
        old = connection.ticket
        if old is not None:
            connection.tickets.refused(old)
        fresh = connection.tickets.current()
        if fresh is old:
            raise TicketExpired("the ticket has run out, and there is no fresh one yet")
        connection.prove(fresh, deadline)

    # ------------------------------------------------------------------ health

    def failed(self, reason: str) -> None:
        """Open the breaker; idle connections are closed (they lead to the same peer)."""
        self._refusal = None
        self.breaker.failed(time.monotonic(), reason)
        with self._lock:
            idle, self._free = self._free, []
        for connection in idle:
            connection.close()

    def _unauthenticated(self, error: Unauthenticated) -> Unauthenticated | Unavailable:
        """One of the two sides did not believe the other: what to raise."""
        self.failed(str(error))
        if self._strangers_are_lost:
            return Unavailable(f"{self.address}: {error}")
        self._refusal = Unauthenticated(str(error))  # anew: a traceback would hold what the call carried
        return error

    def probe(self) -> bool:
        """If the breaker is open and a probe is due, try the peer on a new connection."""
        if self._closed or not self.breaker.due(time.monotonic()):
            return self.breaker.closed
        try:
            connection = self._open()
        except Exception as error:  # noqa: BLE001  any refusal keeps the breaker open, with its reason
            self.breaker.failed(time.monotonic(), str(error))
            refused = isinstance(error, Unauthenticated) and not self._strangers_are_lost
            self._refusal = Unauthenticated(str(error)) if refused else None
            return False
        self.breaker.succeeded()
        connection.close()
        return True

    # ------------------------------------------------------------------ connections

    def _checkout(self, deadline: float) -> tuple[Connection, bool]:
        """Take an idle connection, or open one; (connection, whether it was idle)."""
        if self._closed or self._pid != os.getpid():
            self._refuse_use()
        breaker = self.breaker
        if breaker.open_since is not None and not (self._self_probing and breaker.due(time.monotonic())):
            if (refusal := self._refusal) is not None:
                raise Unauthenticated(str(refusal))
            raise Unavailable(f"{self.address}: {breaker.reason} (breaker open)")
        with self._lock:
            while self._in_use >= self._connections_max:
                self._waiting += 1
                freed = self._freed.wait(deadline - time.monotonic())
                self._waiting -= 1
                if not freed:
                    raise Busy(f"{self.address}: all connections are in use; the deadline passed waiting for one")
            self._in_use += 1
            if self._free:
                return self._free.pop(), True
        try:
            connection = self._open()
        except BaseException as error:
            self._give_back(None)
            if isinstance(error, Disconnected | Silent):
                self.failed(str(error))
            if isinstance(error, Unauthenticated):
                raise self._unauthenticated(error) from error
            raise
        breaker.succeeded()
        return connection, False

    def _checkin(self, connection: Connection) -> None:
        if connection.broken or connection.stream.raw_left or self._closed:
            self._give_back(None)
            connection.close()
        else:
            self._give_back(connection)

    def _give_back(self, connection: Connection | None) -> None:
        with self._lock:
            if connection is not None:
                self._free.append(connection)
            self._in_use -= 1
            if self._waiting:
                self._freed.notify()

    def _open(self) -> Connection:
        """Try each address; a silent peer is not tried again at another of its addresses."""
        problem: Unavailable | None = None
        for address in self.addresses:
            try:
                connection = Connection.open(address, self.identity, silence_s=self.silence_s, accept=self._accept)
            except Silent:
                raise
            except Unavailable as error:
                problem = error
                continue
            try:
                self._greeted(connection.hello)
            except BaseException:
                connection.close()
                raise
            self.address, self.hello = address, connection.hello
            return connection
        assert problem is not None
        raise problem

    def _replace(self, connection: Connection) -> None:
        """Give a dead idle connection a fresh stream; its holder keeps the object."""
        connection.stream.close()
        connection.take_over(self._open())

    def _refuse_use(self) -> None:
        if self._pid != os.getpid():
            raise Closed("this channel belongs to the parent process: open a new client after fork")
        raise Closed(f"the channel to {self.address} is closed")

    def close(self) -> None:
        """Close idle connections now, those in use as they come back. Safe twice."""
        with self._lock:
            self._closed = True
            idle, self._free = self._free, []
        for connection in idle:
            connection.close()
