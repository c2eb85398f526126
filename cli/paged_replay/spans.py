"""Where a request's time goes inside an engine, until its first token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """One request, seconds since some moment: stopped by its first token."""

    received_at: float
    asked_at: float | None = None
    loading_since: float | None = None
    lookup_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0
    first_token_at: float | None = None


class Spans:
    """The spans of the requests under way, by request id; those of unknown ids are ignored."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._spans: dict[str, Span] = {}

    def received(self, request_id: str, at: float) -> None:
        self._spans[request_id] = Span(at)

    def asked(self, request_id: str) -> None:
        """The pool was asked and has not answered yet."""
        span = self._open(request_id)
        if span is not None and span.asked_at is None:
            span.asked_at = self.clock()

    def answered(self, request_id: str) -> None:
        span = self._open(request_id)
        if span is not None and span.asked_at is not None:
            span.lookup_s += self.clock() - span.asked_at
            span.asked_at = None

    def load_started(self, request_id: str) -> None:
        span = self._open(request_id)
        if span is not None:
            span.loading_since = self.clock()

    def load_ended(self, request_id: str) -> None:
        span = self._open(request_id)
        if span is not None and span.loading_since is not None:
            span.load_s += self.clock() - span.loading_since
            span.loading_since = None

    def computed(self, request_ids: Sequence[str], seconds: float) -> None:
        """A step worked for these; each waited for the whole step."""
        for request_id in request_ids:
            span = self._open(request_id)
            if span is not None:
                span.compute_s += seconds

    def first_token(self, request_id: str) -> None:
        span = self._open(request_id)
        if span is not None:
            span.first_token_at = self.clock()

    def take(self, request_id: str) -> Span:
        """The span of a request that ended; forgets it."""
        return self._spans.pop(request_id)

    def _open(self, request_id: str) -> Span | None:
        span = self._spans.get(request_id)
        return span if span is not None and span.first_token_at is None else None
