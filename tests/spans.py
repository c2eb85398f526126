"""Spans of this process, kept in memory for a test to look at. Needs the ``otel`` extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstrata.transfer.otel import OtelTracer
from kvstrata.transfer.tracing import TRACING


@contextmanager
def recorded() -> Iterator[InMemorySpanExporter]:
    """Tracing is on, and what has ended is in the exporter."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OtelTracer(provider)
    TRACING.start(tracer)
    try:
        yield exporter
    finally:
        TRACING.stop(tracer)
