"""Tracing in one process: nothing while it is off, and bounds while it is on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.traces import OFF, TraceOptions, open_traces
from kvstrata.transfer.tracing import NOTHING, TRACING

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the otel extra is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstrata.transfer.otlp import SpanQueue
from tests.spans import recorded


class Collecting(SpanExporter):
    """Takes spans, unless told to hold."""

    def __init__(self) -> None:
        self.taken = 0
        self.works = True
        self.gate = threading.Event()
        self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(20)
        self.taken += len(spans) if self.works else 0
        return SpanExportResult.SUCCESS if self.works else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.gate.set()


@pytest.fixture
def finished() -> Iterator[InMemorySpanExporter]:
    with recorded() as exporter:
        yield exporter


def test_off_there_is_one_span_that_is_nothing() -> None:
    assert TRACING.span("a") is NOTHING and TRACING.here() == "" and TRACING.trace_id() == ""

    def call() -> int:
        return 1

    assert TRACING.carried(call) is call
    assert TRACING.under("00-" + "1" * 32 + "-" + "2" * 16 + "-01") is NOTHING
    with TRACING.span("a") as span:
        span.set("x", 1)
    assert not span.recording


def test_a_call_in_another_thread_stays_under_its_span(finished: InMemorySpanExporter) -> None:
    def work() -> None:
        with TRACING.span("child"):
            pass

    with TRACING.span("parent"):
        thread = threading.Thread(target=TRACING.carried(work))
        thread.start()
        thread.join(10)
    child, parent = finished.get_finished_spans()
    assert child.parent is not None and child.parent.span_id == parent.context.span_id


@pytest.mark.parametrize(
    "garbage", ["x", "00-zz-zz-01", "00" * 500, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ü" * 60]
)
def test_garbage_from_a_peer_is_no_parent(finished: InMemorySpanExporter, garbage: str) -> None:
    with TRACING.span("a", garbage):
        pass
    with TRACING.under(garbage), TRACING.span("b"):
        pass
    assert [span.parent for span in finished.get_finished_spans()] == [None, None]


def test_what_is_called_under_another_process_s_span_is_its_child(finished: InMemorySpanExporter) -> None:
    trace, caller = "1" * 32, "2" * 16
    with TRACING.under(f"00-{trace}-{caller}-01"):
        assert TRACING.here() == f"00-{trace}-{caller}-01"
        with TRACING.span("parent"), TRACING.span("child"):
            pass
    with TRACING.under(""), TRACING.span("of its own"):
        pass
    child, parent, own = finished.get_finished_spans()
    assert parent.parent is not None and format(parent.parent.span_id, "016x") == caller
    assert child.parent is not None and child.parent.span_id == parent.context.span_id
    assert format(child.context.trace_id, "032x") == trace and own.parent is None


def test_under_a_span_that_is_not_sampled_there_is_none(finished: InMemorySpanExporter) -> None:
    not_sampled = f"00-{'1' * 32}-{'2' * 16}-00"
    with TRACING.under(not_sampled), TRACING.span("a") as span:
        assert not span.recording and TRACING.here() == not_sampled  # and so for whoever is called
    assert not finished.get_finished_spans()


def test_an_error_is_named_by_its_class_alone(finished: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError), TRACING.span("a"):
        raise ValueError("tenant-name")
    (span,) = finished.get_finished_spans()
    assert span.status.description == "ValueError" and not span.events


def test_a_queue_that_is_full_drops_and_no_call_waits() -> None:
    exporter = Collecting()
    exporter.gate.clear()
    queue = SpanQueue(exporter, queue_max=10)
    provider = TracerProvider()
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("t")
    queue.loop.start()
    began = time.monotonic()
    for _ in range(200):
        tracer.start_span("a").end()
    assert time.monotonic() - began < 5
    assert queue.counts["dropped"] >= 200 - 2 * 10 - 1 and len(queue._queue) <= 10
    exporter.gate.set()
    provider.shutdown()
    assert queue.counts["exported"] + queue.counts["dropped"] + queue.counts["failed"] == 200


def test_what_a_collector_does_not_take_is_counted_and_told() -> None:
    exporter = Collecting()
    exporter.works = False
    queue = SpanQueue(exporter)
    provider = TracerProvider()
    provider.add_span_processor(queue)
    provider.get_tracer("t").start_span("a").end()
    queue.turn()
    assert queue.counts["failed"] == 1 and queue.problem
    exporter.works = True
    provider.get_tracer("t").start_span("a").end()
    queue.turn()
    assert queue.counts["exported"] == 1 and not queue.problem


class Rivalled(deque[ReadableSpan]):
    """Another turn takes a span just before each that is taken."""

    def popleft(self) -> ReadableSpan:
        super().popleft()
        return super().popleft()


def test_a_turn_sends_what_it_has_when_another_takes_the_last_span() -> None:
    exporter = Collecting()
    queue = SpanQueue(exporter)
    queue._queue = Rivalled()
    provider = TracerProvider()
    provider.add_span_processor(queue)
    for _ in range(3):
        provider.get_tracer("t").start_span("a").end()
    queue.turn()
    assert queue.counts["exported"] == 1 and not queue._queue


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://", "grpc://a:1"])
def test_an_address_that_is_none_is_refused_with_what_to_write(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://collector:4318"):
        TraceOptions(endpoint).validated()
    with pytest.raises(ConfigError, match="0 to 1"):
        TraceOptions("", 2.0).validated()


def test_the_environment_asks_and_the_flag_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert open_traces(TraceOptions(), "s", "i") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert open_traces(TraceOptions(OFF), "s", "i") is None
    traces = open_traces(TraceOptions(), "s", "i")
    assert traces is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_traces(TraceOptions(), "s", "i") is None


def test_under_a_span_that_is_not_sampled_nothing_is_made(finished: InMemorySpanExporter) -> None:
    unsampled = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
    with TRACING.span("a", unsampled) as span:
        assert not span.recording and TRACING.span("b") is NOTHING
        assert TRACING.here().startswith("00-" + "1" * 32) and TRACING.here().endswith("-00")
    assert not finished.get_finished_spans()
