"""Server-sent events with a bound on both ends: a client that left is noticed, one that does not read is dropped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata.engine_adapter.serve.errors import ApiError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: A client that takes nothing for so long is dropped, and its request aborted.
STALL_S: Final = 30.0
DONE: Final = b"data: [DONE]\n\n"
CLIENT_GONE: Final = 499  # for logs alone: nobody reads the answer

T = TypeVar("T")


def event(data: bytes) -> bytes:
    """One event. ``data`` is one line: JSON without line breaks."""
    return b"data: " + data + b"\n\n"


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result; cancelled when the client goes away first. Call after the body was read.

    Raises :class:`ApiError` in that case, for an answer that nobody reads.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(CLIENT_GONE, "the client closed the connection", code="client_closed")
    finally:
        await _cancelled(task)
        await _cancelled(gone)


async def start_stream(request: Request, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> Response:
    """A stream whose first event is there already: what fails before it is an HTTP status, not an event."""
    try:
        first = await unless_disconnected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, headers)


class EventStream(Response):
    """Sends ``first`` and ``events`` as they come, then ``[DONE]``; an :class:`ApiError` in between becomes an event.

    ``events`` is run to its end or closed, so what it holds is released, also when the client is gone or does not
    read for ``stall_s``.
    """

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes], headers: Mapping[str, str], stall_s: float = STALL_S
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            log.warning("client does not read", stalled_s=self._stall_s)
        finally:
            await _cancelled(sending)
            await _cancelled(gone)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await self._bounded(send({"type": "http.response.start", "status": 200, "headers": self.raw_headers}))
        try:
            await self._event(send, self._first)
            async for data in self._events:
                await self._event(send, data)
        except ApiError as error:
            await self._event(send, error.body())
        await self._bounded(send({"type": "http.response.body", "body": DONE, "more_body": False}))

    async def _event(self, send: Send, data: bytes) -> None:
        await self._bounded(send({"type": "http.response.body", "body": event(data), "more_body": True}))

    async def _bounded(self, sent: Awaitable[None]) -> None:
        # Not wait_for: before Python 3.12 it loses a cancellation that comes as the send completes.
        async with asyncio.timeout(self._stall_s):
            await sent


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """End it and wait for that; what it would have raised is nobody's any more."""
    if task.done():
        return
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
