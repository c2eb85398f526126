"""A storage node as a process: ready line, signals, clean stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.config import StorageConfig, raise_open_files
from kvstrata.storage.garbage import spare_the_old
from kvstrata.storage.node import StorageNode

__all__ = ["StorageConfig", "run"]

log = get_logger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def run(config: StorageConfig, on_ready: Callable[[dict[str, Any]], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Call from the main thread.

    ``on_ready`` gets the ready line's fields once the node serves, with or without a master in reach.
    Raises :class:`ConfigError` when it cannot start. With a time for it, the node is drained before it stops; a
    second signal ends that. It does not hurry the stop itself, which is bounded.
    """
    raise_open_files()
    asked = threading.Event()
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        asked.set()

    before = [signal.signal(number, on_signal) for number in _SIGNALS]
    try:
        node = StorageNode(config)
        try:
            ready = node.start()
            spare_the_old()
            on_ready(ready)
            asked.wait()
            log.info("node stops", signal=signal.Signals(received[0]).name)
            if config.drain_on_stop_s and config.masters:
                node.drain(config.drain_on_stop_s, lambda: len(received) > 1)
        finally:
            node.stop()
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    return 0
