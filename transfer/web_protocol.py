"""HTTP/1.1 connections that end in time: uvicorn's protocol, with a bound on each part that a peer may draw out.

uvicorn bounds an idle connection between two requests and nothing else, so that whoever sends a byte now and then
could hold connections for ever, and at the bound on those everybody else would get 503.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstrata.transfer.security.tls import common_names

#: A request's head is whole within this of its first byte, or of the connection.
HEAD_S: Final = 10.0
#: And its body within this of the head.
BODY_S: Final = 60.0
#: An answer of which nothing is taken for so long is given up.
STALL_S: Final = 30.0
HANDSHAKE_S: Final = 5.0
#: TLS handshakes begun within ``HANDSHAKE_S``; a connection past it is closed.
HANDSHAKES_MAX: Final = 512
SHUTDOWN_S: Final = 2.0


class BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop whose TLS servers bound the handshake, and the end, of a connection."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl") is not None:
            kwargs |= {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": SHUTDOWN_S}
        return await super().create_server(*args, **kwargs)


class _Newcomers:
    """Connections of one server that have not sent a request yet."""

    def __init__(self, heads_max: int) -> None:
        self.heads_max = heads_max
        self.heads: dict[BoundedProtocol, None] = {}
        self._handshakes: deque[float] = deque()

    def accept(self, now: float) -> None:
        """Raises :class:`ConnectionRefusedError` when too many begin at once."""
        while self._handshakes and self._handshakes[0] < now - HANDSHAKE_S:
            self._handshakes.popleft()
        if len(self._handshakes) >= HANDSHAKES_MAX:
            raise ConnectionRefusedError("too many connections begin at once")
        self._handshakes.append(now)

    def begun(self) -> None:
        """One of those that began is a connection."""
        if self._handshakes:
            self._handshakes.popleft()


class BoundedProtocol(H11Protocol):
    """One connection. Of those that have not sent a whole head, the oldest is cut when a newer one needs its place.

    A verified certificate's common names are in the scope's ``state`` as ``certificate``.
    """

    newcomers: _Newcomers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.newcomers.accept(time.monotonic())
        super().__init__(*args, **kwargs)
        self._awaited = ""
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.newcomers.begun()
        super().connection_made(transport)
        names = common_names(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, "certificate": names}
        self._await_next()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await("")
        self._stalls(False)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalls(True)

    def resume_writing(self) -> None:
        self._stalls(False)
        super().resume_writing()

    def _await_next(self) -> None:
        """What the other side is to send now: a head, a body, or nothing that is not bounded already."""
        sends = self.conn.their_state
        if self.transport.is_closing():
            self._await("")
        elif sends is h11.SEND_BODY:
            self._await("body")
        elif sends is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await("head")
        else:
            self._await("")

    def _await(self, part: str) -> None:
        if part == self._awaited:
            return
        self._awaited = part
        heads = self.newcomers.heads
        heads.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if part:
            self._timer = self.loop.call_later(HEAD_S if part == "head" else BODY_S, self._cut)
        if part == "head":
            if len(heads) >= self.newcomers.heads_max:
                next(iter(heads))._cut()
            heads[self] = None

    def _stalls(self, stalled: bool) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if stalled:
            self._stall = self.loop.call_later(STALL_S, self._cut)

    def _cut(self) -> None:
        self._await("")
        self.transport.abort()


def bounded_protocol(heads_max: int) -> type[BoundedProtocol]:
    """A protocol class for one server, of which at most ``heads_max`` connections wait for a request's head."""

    class Bounded(BoundedProtocol):
        newcomers = _Newcomers(heads_max)

    return Bounded
