"""Tracing by OpenTelemetry's API: spans of a provider, the host process's (:func:`join`) or a daemon's own.

Imported only where OpenTelemetry is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvstrata.transfer.identity import VERSION
from kvstrata.transfer.tracing import NOTHING, TRACING, Span, SpanKind, Value

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_KINDS: Final = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}


class OtelSpan:
    """An open span: current for its thread inside the ``with``."""

    __slots__ = ("_span", "_token", "recording", "trace_id")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self.recording = span.is_recording()
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id) if self.recording else ""

    def set(self, name: str, value: Value) -> None:
        self._span.set_attribute(f"kvstrata.{name}", value)

    def __enter__(self) -> Span:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        otel_context.detach(self._token)
        if error is not None and self.recording:  # its text may name a tenant
            self._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()


class OtelTracer:
    """Spans of one provider."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("kvstrata", VERSION)

    def span(self, name: str, parent: str, kind: SpanKind) -> Span:
        if not parent:
            above = trace.get_current_span().get_span_context()
            if above.is_valid and not above.trace_flags.sampled:
                return NOTHING  # as a sampler that heeds the parent would say, and cheaper
        context = _PROPAGATOR.extract({"traceparent": parent}) if parent else None
        return OtelSpan(self._tracer.start_span(name, context, _KINDS[kind]))

    @contextmanager
    def under(self, trace: str) -> Iterator[None]:
        """No span of its own: those inside are children of the one that is named, if it is sampled."""
        token = otel_context.attach(_PROPAGATOR.extract({"traceparent": trace}))
        try:
            yield
        finally:
            otel_context.detach(token)

    def here(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        return carrier.get("traceparent", "")

    def trace_id(self) -> str:
        span = trace.get_current_span()
        return trace.format_trace_id(span.get_span_context().trace_id) if span.is_recording() else ""


def join() -> bool:
    """Make spans of the provider that this process's host has set, if it has set one and nothing traces yet."""
    provider = trace.get_tracer_provider()
    if TRACING.on or isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return False
    TRACING.start(OtelTracer(provider))
    return True
