"""What is measured around a channel's handlers: seconds by operation, and a span where the caller traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import Frame
from kvstrata.transfer.server import Handler, Reply
from kvstrata.transfer.sessions import ServerConnection
from kvstrata.transfer.timings import Timings
from kvstrata.transfer.tracing import TRACING, Span, SpanKind


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of request. ``span``: the span's name. ``trace_of``: the caller's span, out of the request.

    ``describe`` tells a span that is recorded of the request and of the answer's message.
    """

    name: str
    span: str
    request: type[Message]
    trace_of: Callable[[Any], str]
    describe: Callable[[Span, Any, bytes], None]


def observed(
    handlers: Mapping[int, Handler], operations: Mapping[int, Operation], timings: Timings
) -> dict[int, Handler]:
    """The handlers, those of ``operations`` (by frame kind) measured. Raw bytes of an answer go out after that."""
    return {
        kind: _measured(handler, operations[kind], timings) if kind in operations else handler
        for kind, handler in handlers.items()
    }


def _measured(handler: Handler, operation: Operation, timings: Timings) -> Handler:
    name, clock, add = operation.name, time.perf_counter, timings.add

    def handle(connection: ServerConnection, frame: Frame) -> Reply | None:
        if TRACING.on:
            return _traced(handler, operation, timings, connection, frame)
        began = clock()
        try:
            return handler(connection, frame)
        finally:
            add(name, clock() - began)

    return handle


def _traced(
    handler: Handler, operation: Operation, timings: Timings, connection: ServerConnection, frame: Frame
) -> Reply | None:
    began = time.perf_counter()
    try:
        request = operation.request.FromString(frame.message)
    except DecodeError:
        return handler(connection, frame)  # which refuses it
    span = TRACING.span(operation.span, operation.trace_of(request), kind=SpanKind.SERVER)
    try:
        with span:
            reply = handler(connection, frame)
            if span.recording and reply is not None and reply.kind != Kind.FAILURE:
                operation.describe(span, request, reply.message)
            return reply
    finally:
        timings.add(operation.name, time.perf_counter() - began, span.trace_id)
