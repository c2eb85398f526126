"""HTTP/1.1 connections that end in time: uvicorn's protocol, with a bound on each part that a peer may draw out.

uvicorn bounds an idle connection between two requests and nothing else, so that whoever sends a byte now and then
could hold connections for ever, and at the bound on those everybody else would get 503. A newcomer that finds all
places taken gets that of the oldest connection that is of no use to anybody now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstrata.proto.logs import get_logger
from kvstrata.transfer.security.tls import common_names

log = get_logger(__name__)
#: uvicorn warns of each request that is nonsense, in a format of its own: errors alone are let through.
_uvicorn: Final = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn.setLevel(logging.ERROR)

#: A request's head is whole within this of its first byte, or of the connection.
HEAD_S: Final = 10.0
#: And its body within this of the head.
BODY_S: Final = 60.0
#: An answer of which nothing is taken for so long is given up.
STALL_S: Final = 30.0
HANDSHAKE_S: Final = 3.0
#: TLS handshakes at a time: one more ends the oldest.
HANDSHAKES_MAX: Final = 512
SHUTDOWN_S: Final = 2.0
#: That connections were cut for newer ones is logged once in so long.
TELL_S: Final = 60.0


class BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop whose TLS servers bound the handshake, and the end, of a connection, and how many shake hands."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl") is not None:
            kwargs |= {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": SHUTDOWN_S}
        return await super().create_server(*args, **kwargs)

    def _make_ssl_transport(self, rawsock: Any, protocol: Any, *args: Any, **kwargs: Any) -> asyncio.Transport:
        """asyncio's own way of beginning a handshake: the one place where its transport can be had before its end."""
        transport: asyncio.Transport = super()._make_ssl_transport(rawsock, protocol, *args, **kwargs)  # type: ignore[misc]
        if isinstance(protocol, BoundedProtocol):
            protocol.newcomers.shakes(protocol, transport)
        return transport


class _Newcomers:
    """Connections of one server that are of no use yet, or no more: each row's oldest comes first."""

    def __init__(self, heads_max: int) -> None:
        self.heads_max = heads_max
        #: Those that have not sent a whole head.
        self.heads: dict[BoundedProtocol, None] = {}
        #: Those between two requests, and those that are closed but for what the other side has yet to take.
        self.idle: dict[BoundedProtocol, None] = {}
        self._shaking: dict[BoundedProtocol, asyncio.Transport] = {}
        self._cut = 0
        self._told = -TELL_S

    def shakes(self, connection: BoundedProtocol, transport: asyncio.Transport) -> None:
        """A TLS handshake begins."""
        if len(self._shaking) >= HANDSHAKES_MAX:  # those that failed say so to nobody
            self._shaking = {each: its for each, its in self._shaking.items() if not its.is_closing()}
        while len(self._shaking) >= HANDSHAKES_MAX:
            oldest = self._shaking.pop(next(iter(self._shaking)))
            connection.loop.call_soon(oldest.abort)  # not before its own beginning, which may be due in this same round
        self._shaking[connection] = transport

    def begun(self, connection: BoundedProtocol) -> None:
        """Its handshake is made, if there is one at all."""
        self._shaking.pop(connection, None)

    def make_room(self, taken: int, places: int | None, now: float) -> None:
        """Cut the oldest that nobody needs while the places do not suffice."""
        while places is not None and taken >= places and (of := self.idle or self.heads):
            next(iter(of)).cut()
            taken -= 1
            self._cut += 1
            if now - self._told >= TELL_S:
                log.warning("http connections cut to make room for newer ones", cut=self._cut, places=places)
                self._told, self._cut = now, 0


class BoundedProtocol(H11Protocol):
    """One connection. Of those between two requests, and those that have not sent a whole head, the oldest is cut when
    a newer one needs its place.

    A verified certificate's common names are in the scope's ``state`` as ``certificate``.
    """

    newcomers: _Newcomers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _uvicorn
        self._awaited = ""
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.newcomers.begun(self)
        super().connection_made(transport)
        self.newcomers.make_room(len(self.connections), self.limit_concurrency, time.monotonic())
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
            self._await("end")
        elif sends is h11.SEND_BODY:
            self._await("body")
        elif sends is h11.IDLE:
            self._await("head" if self.timeout_keep_alive_task is None else "next")
        else:
            self._await("")

    def _await(self, part: str) -> None:
        if part == self._awaited and part != "next":
            return
        self._awaited = part
        heads, idle = self.newcomers.heads, self.newcomers.idle
        heads.pop(self, None)
        idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        bounds = {"head": HEAD_S, "body": BODY_S, "end": STALL_S}  # "next" is uvicorn's to bound
        if part in bounds:
            self._timer = self.loop.call_later(bounds[part], self.cut)
        if part == "head":
            if len(heads) >= self.newcomers.heads_max:
                next(iter(heads)).cut()
            heads[self] = None
        elif part in ("next", "end"):
            idle[self] = None

    def _stalls(self, stalled: bool) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if stalled:
            self._stall = self.loop.call_later(STALL_S, self.cut)

    def cut(self) -> None:
        """End it now; its place is free at once."""
        self._await("")
        self.connections.discard(self)
        self.transport.abort()


def bounded_protocol(heads_max: int) -> type[BoundedProtocol]:
    """A protocol class for one server, of which at most ``heads_max`` connections wait for a request's head."""

    class Bounded(BoundedProtocol):
        newcomers = _Newcomers(heads_max)

    return Bounded
