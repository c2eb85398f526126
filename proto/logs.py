"""How every process logs: structured lines on stderr, rate-limited by event.

A library inside somebody's engine configures nothing: until :func:`configure` runs, events go to the
standard ``logging`` tree under ``kvstrata`` and the engine decides. A daemon calls :func:`configure` once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal

import structlog

LogFormat = Literal["text", "json"]
LEVELS: Final = ("debug", "info", "warning", "error")
#: An event may come this often at once, then once each ``EVERY_S``; what is held back is counted.
BURST: Final = 10
EVERY_S: Final = 1.0
EVENTS_MAX: Final = 1024


class RateLimiter:
    """A structlog processor: one token bucket for each (logger, event)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], list[float]] = {}

    def __call__(self, _: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass the event, with ``suppressed`` when some before it were dropped, or drop it."""
        key = (str(event.get("logger", "")), str(event.get("event", "")))
        now = self._clock()
        with self._lock:
            if len(self._buckets) > EVENTS_MAX:
                self._buckets.clear()
            bucket = self._buckets.setdefault(key, [float(BURST), now, 0.0])
            bucket[0] = min(float(BURST), bucket[0] + (now - bucket[1]) / EVERY_S)
            bucket[1] = now
            if bucket[0] < 1.0:
                bucket[2] += 1
                raise structlog.DropEvent
            bucket[0] -= 1.0
            held, bucket[2] = int(bucket[2]), 0.0
        if held:
            event["suppressed"] = held
        return event


class _Output:
    """Where events go: the standard ``logging`` tree, or rendered lines on stderr."""

    def __init__(self) -> None:
        self.trace_id: Callable[[], str] | None = None
        self._limit = RateLimiter()
        self._stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        self._library = structlog.processors.KeyValueRenderer(key_order=["event"])
        self._render: Callable[..., Any] | None = None
        self._level = logging.WARNING

    def configure(self, log_format: LogFormat, level: str) -> None:
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self._render = (
            structlog.processors.JSONRenderer()
            if log_format == "json"
            else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        )

    def __call__(self, _: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The one processor of every logger; nothing comes after it."""
        number = logging.getLevelNamesMapping()[method.upper()]
        host = logging.getLogger(str(event["logger"]))
        if not (number >= self._level if self._render else host.isEnabledFor(number)):
            raise structlog.DropEvent
        event = self._limit(_, method, event)
        if self.trace_id is not None and (trace_id := self.trace_id()):
            event["trace_id"] = trace_id
        event = structlog.processors.format_exc_info(_, method, event)
        if self._render is None:
            del event["logger"]
            host.log(number, "%s", self._library(_, method, event))
        else:
            event = self._stamp(_, method, structlog.processors.add_log_level(_, method, event))
            # A log line must not be what ends a thread: with stderr gone there is nobody left to tell.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{self._render(_, method, event)}\n")
                sys.stderr.flush()
        raise structlog.DropEvent


_output = _Output()


def get_logger(name: str) -> Any:
    """A structured logger: ``log.warning("what happened", key=value)``."""
    logger = structlog.wrap_logger(
        None, processors=[_output], wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG)
    )
    return logger.bind(logger=name)


def name_traces(trace_id: Callable[[], str]) -> None:
    """Have each event say the trace in which it happened: what ``trace_id()`` gives, "" for none."""
    _output.trace_id = trace_id


def configure(log_format: LogFormat = "text", level: str = "info") -> None:
    """Send this process's events to stderr from now on. ``level`` is one of ``LEVELS``."""
    _output.configure(log_format, level)
