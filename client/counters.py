"""What became of the blocks this client asked for. One denominator: asked = loaded + misses by reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Counters:
    """Counts by call kind and by reason. Thread-safe; the totals of a kind always add up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[str, Counter[str]] = {}

    def add(self, kind: str, reasons: Mapping[str, int], nbytes: int = 0) -> None:
        with self._lock:
            counter = self._kinds.get(kind)
            if counter is None:
                counter = self._kinds[kind] = Counter()
            counter["calls"] += 1
            counter["bytes"] += nbytes
            for name, count in reasons.items():
                counter["asked"] += count
                counter[name] += count

    def snapshot(self) -> dict[str, dict[str, int]]:
        """kind -> {"calls", "bytes", "asked", and blocks by reason}."""
        with self._lock:
            return {kind: dict(counter) for kind, counter in self._kinds.items()}
