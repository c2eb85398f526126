"""Waiting in tests: for what comes by itself, as long as a busy machine may need for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Where nothing is said of how long it may take. It bounds a test that fails, and no test that passes.
PATIENCE_S: Final = 30.0
POLL_S: Final = 0.005


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Poll; fails when the condition has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        time.sleep(POLL_S)
