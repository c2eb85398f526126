"""Whether a daemon traces, and where to: ``--traces``, or the standard environment of OpenTelemetry."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.tracing import TRACING

if TYPE_CHECKING:
    from kvstrata.transfer.otlp import OtlpTracing

log = get_logger(__name__)

OFF: Final = "off"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """``endpoint``: the base URL of an OTLP collector over HTTP; "off"; "": what OTEL_EXPORTER_OTLP_ENDPOINT says.

    ``ratio``: of calls whose caller does not trace, the share that is traced, 0 to 1.
    """

    endpoint: str = ""
    ratio: float = 0.0

    def validated(self) -> TraceOptions:
        if not 0.0 <= self.ratio <= 1.0:
            raise ConfigError(f"--traces-ratio is {self.ratio}: a share, 0 to 1")
        parts = urlsplit(self.endpoint)
        if self.endpoint not in ("", OFF) and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError("--traces: write a collector's OTLP address over HTTP, as http://collector:4318, or off")
        return self


#: Nothing asked for: as the environment says.
BY_ENVIRONMENT: Final = TraceOptions()


def open_traces(options: TraceOptions, service: str, instance: str) -> OtlpTracing | None:
    """Tracing of this process, to be started; None when nobody wants any.

    Raises :class:`ConfigError` when it is asked for by a flag and cannot be.
    """
    environment = os.environ
    if options.endpoint == OFF or (not options.endpoint and not _asked(environment)):
        return None
    try:
        from kvstrata.transfer.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        if options.endpoint:
            raise ConfigError("--traces needs packages: pip install 'kvstrata[otel]'") from error
        log.warning("no traces: pip install 'kvstrata[otel]', or --traces off")
        return None
    names = {"service.name": environment.get("OTEL_SERVICE_NAME", service), "service.instance.id": instance}
    ratio = None if "OTEL_TRACES_SAMPLER" in environment else options.ratio
    return OtlpTracing(options.endpoint, ratio, names)


def join_host() -> None:
    """In an engine that traces: our spans come under its own. Without OpenTelemetry there, nothing happens."""
    if TRACING.on or "opentelemetry.trace" not in sys.modules:
        return
    try:
        from kvstrata.transfer.otel import join
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        return
    if join():
        log.info("traces join the engine's")


def _asked(environment: Mapping[str, str]) -> bool:
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return not off and any(environment.get(name) for name in _ENDPOINTS)


def trace_facts(traces: OtlpTracing | None) -> dict[str, object]:
    """For health: whether this process traces, spans by what became of them, and why they do not arrive."""
    if traces is None:
        return {"on": False}
    return {"on": True, **traces.counts(), "problem": traces.problem()}
