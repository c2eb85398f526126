"""Structured, rate-limited logs (see configure)."""

from __future__ import annotations

from typing import Any

import structlog


def get_logger(name: str) -> Any:
    return structlog.get_logger(name)
