"""What every long-running command does: its ready line, its log format."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Mapping

from kvstrata.proto import logs


class LogFormat(enum.StrEnum):
    """``--log-format``: also the format of the ready line on stdout."""

    text = "text"
    json = "json"


class LogLevel(enum.StrEnum):
    """``--log-level``."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    logs.configure(log_format.value, level.value)


def ready_printer(log_format: LogFormat) -> Callable[[dict[str, object]], None]:
    """A callback that prints the one ready line."""

    def say(facts: dict[str, object]) -> None:
        sys.stdout.write((json.dumps(facts) if log_format is LogFormat.json else ready_text(facts)) + "\n")
        sys.stdout.flush()

    return say


def ready_text(facts: Mapping[str, object]) -> str:
    """``kvstrata master ready: channel 127.0.0.1:7400 grpc ... http ...``."""
    words = [f"{name} {value}" for name, value in facts.items() if name not in ("event", "role") and value != ""]
    return f"kvstrata {facts.get('role')} ready: {' '.join(words)}"
