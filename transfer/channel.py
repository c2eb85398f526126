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
from kvstrata.proto.errors import Busy, Closed, Unavailable
from kvstrata.transfer.breaker import Breaker
from kvstrata.transfer.connection import SILENCE_S, Connection
from kvstrata.transfer.frames import Disconnected, Frame, Silent
from kvstrata.transfer.identity import Identity

CONNECTIONS_MAX: Final = 16


class Channel:
    """Connections to one peer: a bounded pool, a breaker, and calls from any thread.

    ``addresses`` are tried in order (a unix socket before the same node's TCP port). A call made on an
    idle connection that turns out closed is repeated once on a fresh one: the request never reached a
    living peer. ``accept`` may refuse a peer by its hello (another incarnation). With
    ``self_probing`` a caller makes the probe that closes an open breaker; without it the owner must
    call :meth:`probe` now and then, and no caller ever waits for a dead peer.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        *,
        accept: Callable[[pb.HelloOk], None] = lambda _: None,
        silence_s: float = SILENCE_S,
        connections_max: int = CONNECTIONS_MAX,
        self_probing: bool = True,
    ) -> None:
        self.addresses = tuple(addresses)
        self.identity = identity
        self.silence_s = silence_s
        self.breaker = Breaker()
        self.hello: pb.HelloOk | None = None
        self.address = self.addresses[0]
        self._accept = accept
        self._self_probing = self_probing
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
        finally:
            self._checkin(connection)

    def tell(self, kind: int, message: bytes, deadline: float) -> None:
        """A one-way message."""
        connection, _ = self._checkout(deadline)
        try:
            connection.tell(kind, message)
        except (Disconnected, Silent) as error:
            self.failed(str(error))
            raise
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
            return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)
        except Disconnected:
            if not reused:
                raise
        connection.stream.close()
        self._replace(connection)
        return connection.call(kind, message, deadline, raw=raw, meanwhile=meanwhile)

    # ------------------------------------------------------------------ health

    def failed(self, reason: str) -> None:
        """Open the breaker; idle connections are closed (they lead to the same peer)."""
        self.breaker.failed(time.monotonic(), reason)
        with self._lock:
            idle, self._free = self._free, []
        for connection in idle:
            connection.close()

    def probe(self) -> bool:
        """If the breaker is open and a probe is due, try the peer on a new connection."""
        if self._closed or not self.breaker.due(time.monotonic()):
            return self.breaker.closed
        try:
            connection = self._open()
        except Exception as error:  # noqa: BLE001  any refusal keeps the breaker open, with its reason
            self.breaker.failed(time.monotonic(), str(error))
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
            raise
        breaker.succeeded()
        return connection, False

    def _checkin(self, connection: Connection) -> None:
        keep = not (connection.broken or connection.stream.raw_left or self._closed)
        self._give_back(connection if keep else None)
        if not keep:
            connection.close()

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
                connection = Connection.open(address, self.identity, silence_s=self.silence_s)
            except Silent:
                raise
            except Unavailable as error:
                problem = error
                continue
            try:
                self._accept(connection.hello)
            except BaseException:
                connection.close()
                raise
            self.address, self.hello = address, connection.hello
            return connection
        assert problem is not None
        raise problem

    def _replace(self, connection: Connection) -> None:
        """Give a dead idle connection a fresh stream; its holder keeps the object."""
        fresh = self._open()
        connection.stream, connection.hello, connection.broken = fresh.stream, fresh.hello, False
        connection._request = fresh._request

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
