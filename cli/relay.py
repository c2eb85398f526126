"""One daemon's log file, followed: each line goes to stderr with the name of who says it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

READ_BYTES_MAX: Final = 1 << 20
_PLACED: Final = frozenset({"timestamp", "level", "event", "logger"})


class Relay:
    """Lines are copied when they are whole. What the file held before belongs to an earlier run and is kept aside."""

    def __init__(self, name: str, path: Path, as_json: bool) -> None:
        self._name = name
        self._path = path
        self._as_json = as_json
        self._offset = 0
        if path.exists():
            path.replace(path.with_suffix(".log.1"))

    def poll(self, last: bool = False) -> None:
        """Copy what has come since; with ``last`` also a line that nobody will finish."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._offset)
            data = lines.read(READ_BYTES_MAX)
        if not last and len(data) < READ_BYTES_MAX:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.decode(errors="replace").splitlines():
            sys.stderr.write(f"{attributed(self._name, line, self._as_json)}\n")


def attributed(name: str, line: str, as_json: bool) -> str:
    """A line of a daemon's JSON log for a person to read, or still JSON with ``process``; other lines with a prefix."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return json.dumps({"process": name, "event": line}) if as_json else f"[{name}] {line}"
    return json.dumps({"process": name, **event}) if as_json else f"[{name}] {_text(event)}"


def _text(event: dict[str, Any]) -> str:
    details = " ".join(f"{key}={value}" for key, value in event.items() if key not in _PLACED)
    placed = f"{event.get('timestamp', '')} {event.get('level', 'info'):<7} {event.get('event', '')}"
    return f"{placed}  {details}".rstrip()
