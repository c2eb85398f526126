"""Spans of time as people write them: ``90``, ``30s``, ``10m``, ``1.5h``."""

from __future__ import annotations

import re

from kvstrata.proto.errors import ConfigError

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_duration(text: object) -> float:
    """Seconds of ``10m``, ``30s``, ``500ms``, ``2h`` or ``90``. Raises :class:`ConfigError`."""
    found = _DURATION.fullmatch(str(text))
    unit = _UNITS.get(found[2].lower()) if found else None
    if not found or unit is None:
        raise ConfigError(f"{text!r} is not a span of time: write seconds, or a number with ms, s, m, h or d")
    return float(found[1]) * unit


def format_duration(seconds: float) -> str:
    """``3.2 s``, ``4 min 05 s``, ``2 h 10 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
