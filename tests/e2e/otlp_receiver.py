"""A collector for tests: takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.waiting import until


@dataclass(frozen=True)
class Seen:
    """One span as it arrived. Ids are hex; ``parent`` is "" for a root."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    kind: int
    facts: dict[str, Any]


class Receiver:
    """``POST /v1/traces`` on a free port; ``answer`` is the status it gives."""

    def __init__(self, answer: int = 200) -> None:
        self.spans: list[Seen] = []
        self.requests = 0
        self.answer = answer
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.requests += 1
                if receiver.answer == 200 and self.path == "/v1/traces":
                    receiver.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(receiver.answer)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def named(self, name: str) -> list[Seen]:
        return [span for span in list(self.spans) if span.name == name]

    def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        until(condition, seconds)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _spans(request: ExportTraceServiceRequest) -> list[Seen]:
    found = []
    for resource in request.resource_spans:
        service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
        for scope in resource.scope_spans:
            for span in scope.spans:
                facts = {a.key: _value(a.value) for a in span.attributes}
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                found.append(Seen(service, span.name, *ids, span.kind, facts))
    return found


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")
