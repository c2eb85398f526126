"""Spans of calls, within a process and across: a message's ``trace`` field carries its caller's span.

Off, as it is until somebody asks for it, a call costs one attribute test: nothing is imported and nothing made. On,
spans go to OpenTelemetry (:mod:`kvstrata.transfer.otel`). Names of spans begin with ``kvstrata.``. A tenant's salt is
in them as a hash, and hashes of blocks not at all.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Final, Protocol, TypeVar

from kvstrata.proto.logs import name_traces

R = TypeVar("R")

Value = str | int | float | bool
#: Longest ``trace`` field that is read: a W3C traceparent has 55 characters.
TRACE_CHARACTERS_MAX: Final = 64


class SpanKind(Enum):
    """As in OpenTelemetry: CLIENT asks another process, SERVER answers one."""

    INTERNAL = 0
    SERVER = 1
    CLIENT = 2


class Span(Protocol):
    """An open span, to be used in a ``with``. ``recording`` False: nobody will see it, so nothing need be told."""

    recording: bool
    trace_id: str  #: 32 hex digits; "" while not recording

    def set(self, name: str, value: Value) -> None:
        """An attribute, ``kvstrata.NAME``."""

    def __enter__(self) -> Span: ...
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class _Nothing:
    recording = False
    trace_id = ""

    def set(self, name: str, value: Value) -> None:
        """Nobody sees it."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        return None


NOTHING: Final[Span] = _Nothing()


class Tracer(Protocol):
    """What makes spans when tracing is on."""

    def span(self, name: str, parent: str, kind: SpanKind) -> Span: ...

    def under(self, trace: str) -> AbstractContextManager[object]: ...

    def here(self) -> str:
        """The current span as a traceparent; "" when there is none."""

    def trace_id(self) -> str:
        """The current span's trace; "" when nobody records it."""


class Tracing:
    """A process's tracing. ``on`` is what a hot path tests."""

    __slots__ = ("_tracer", "on")

    def __init__(self) -> None:
        self.on = False
        self._tracer: Tracer | None = None

    def span(self, name: str, parent: str = "", *, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """A span under ``parent``, a traceparent of another process, or else under the current one."""
        tracer = self._tracer
        return NOTHING if tracer is None else tracer.span(name, parent[:TRACE_CHARACTERS_MAX], kind)

    def under(self, trace: str) -> AbstractContextManager[object]:
        """What is called inside comes under ``trace``, a traceparent of this process or another; "" changes nothing."""
        tracer = self._tracer
        return NOTHING if tracer is None or not trace else tracer.under(trace[:TRACE_CHARACTERS_MAX])

    def here(self) -> str:
        """For a message's ``trace`` field: the current span, or ""."""
        tracer = self._tracer
        return "" if tracer is None else tracer.here()

    def trace_id(self) -> str:
        """The current span's trace, 32 hex digits; "" when nobody records it."""
        tracer = self._tracer
        return "" if tracer is None else tracer.trace_id()

    def carried(self, call: Callable[[], R]) -> Callable[[], R]:
        """``call``, for another thread: what it does comes under the span that is current here."""
        return partial(contextvars.copy_context().run, call) if self.on else call

    def start(self, tracer: Tracer) -> None:
        """Have ``tracer`` make spans from now on."""
        self._tracer = tracer
        self.on = True
        name_traces(self.trace_id)

    def stop(self, tracer: Tracer) -> None:
        """No more spans, if ``tracer`` still makes them. Those that are open end as they would have."""
        if self._tracer is tracer:
            self.on = False
            self._tracer = None


#: This process's.
TRACING: Final = Tracing()


def set_counts(span: Span, prefix: str, counts: Mapping[str, int]) -> None:
    """``kvstrata.PREFIX.NAME`` for each count that is not 0."""
    for name, count in counts.items():
        if count:
            span.set(f"{prefix}.{name}", count)
