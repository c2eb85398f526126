"""A daemon's own tracing: spans sent by OTLP over HTTP. Imported only where the ``otel`` extra is installed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from kvstrata.proto.logs import get_logger
from kvstrata.transfer.identity import VERSION
from kvstrata.transfer.loops import Loop, Loops
from kvstrata.transfer.otel import OtelTracer
from kvstrata.transfer.tracing import TRACING

log = get_logger(__name__)

#: Spans that wait to be sent; more are dropped, and counted.
QUEUE_MAX: Final = 4096
BATCH_MAX: Final = 512
#: A span waits so long for others to be sent with.
PERIOD_S: Final = 1.0
#: A collector has so long for one batch, tries again included.
EXPORT_S: Final = 3.0
#: Batches of one turn of the loop; with their time it is the loop's bound.
BATCHES_MAX: Final = 4
BOUND_S: Final = BATCHES_MAX * (EXPORT_S + 2.0) + PERIOD_S
STOP_S: Final = 2.0


class SpanQueue(SpanProcessor):
    """Ended spans on their way to a collector: bounded, and no call ever waits for it.

    ``counts``: exported, dropped (the queue was full), failed (the collector did not take them).
    """

    def __init__(self, exporter: SpanExporter, *, queue_max: int = QUEUE_MAX) -> None:
        self.counts: Counter[str] = Counter(exported=0, dropped=0, failed=0)
        self.problem = ""
        self._exporter = exporter
        self._queue_max = queue_max
        self._queue: deque[ReadableSpan] = deque()
        self.loop = Loop("traces", PERIOD_S, self.turn, bound_s=BOUND_S)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        waiting = len(self._queue)
        if waiting >= self._queue_max:
            self.counts["dropped"] += 1
            return
        self._queue.append(span)
        if waiting + 1 == BATCH_MAX:
            self.loop.wake()

    def turn(self) -> None:
        """Send what waits, a bounded number of batches. One that is not taken is gone: newer spans are worth more."""
        for _ in range(BATCHES_MAX):
            batch = self._taken()
            if not batch or not self._send(batch):
                return

    def _taken(self) -> list[ReadableSpan]:
        """The oldest that wait. The last turn, at the end, may take from the queue beside one that is under way."""
        batch: list[ReadableSpan] = []
        with suppress(IndexError):
            while len(batch) < BATCH_MAX:
                batch.append(self._queue.popleft())
        return batch

    def _send(self, batch: list[ReadableSpan]) -> bool:
        taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        self.counts["exported" if taken else "failed"] += len(batch)
        self.problem = "" if taken else "the collector does not take spans: see the log"
        return taken

    def shutdown(self) -> None:
        """Send what is left, within ``STOP_S``; what is not sent then is dropped."""
        self.loop.stop(0.0)
        last = threading.Thread(target=self.turn, name="kvstrata-traces-last", daemon=True)
        last.start()
        last.join(STOP_S)
        self._exporter.shutdown()


class OtlpTracing:
    """A daemon's own provider. ``endpoint``: base URL of a collector, or "" for what OTEL_EXPORTER_OTLP_* say.

    ``ratio``: of calls whose caller does not trace, the share that is traced; None: as OTEL_TRACES_SAMPLER says.
    """

    def __init__(self, endpoint: str, ratio: float | None, attributes: Mapping[str, str]) -> None:
        _logs_of_exporter()
        exporter = OTLPSpanExporter(_traces_url(endpoint) if endpoint else None, timeout=EXPORT_S)
        self.queue = SpanQueue(exporter)
        sampler: Sampler | None = None if ratio is None else ParentBased(TraceIdRatioBased(ratio))
        resource = Resource.create({"service.version": VERSION, **attributes})
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._provider.add_span_processor(self.queue)
        self._tracer = OtelTracer(self._provider)

    def start(self, loops: Loops) -> None:
        """Trace from now on; ``loops`` sends the spans and shows how that is."""
        loops.add(self.queue.loop)
        TRACING.start(self._tracer)

    def stop(self) -> None:
        """Bounded; safe twice."""
        TRACING.stop(self._tracer)
        self._provider.shutdown()

    def counts(self) -> dict[str, int]:
        """Spans since the start, by what became of them."""
        return dict(self.queue.counts)

    def problem(self) -> str:
        """Why spans do not arrive, or an empty string. The daemon serves all the same, and is well."""
        return self.queue.problem


def _traces_url(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path not in ("", "/") else f"{endpoint.rstrip('/')}/v1/traces"


class _Forward(logging.Handler):
    """What the exporter complains of, as an event of ours: structured, and rate-limited."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("traces not sent", reason=record.getMessage()[:500])


def _logs_of_exporter() -> None:
    logger = logging.getLogger("opentelemetry.exporter")
    if not any(isinstance(handler, _Forward) for handler in logger.handlers):
        logger.addHandler(_Forward())
        logger.propagate = False
