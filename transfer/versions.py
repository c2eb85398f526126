"""Which other versions said hello and were refused: counted, so that an operator sees who is to be upgraded."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

#: Kinds of software told apart, and characters of a name: peers choose these.
NAMES_MAX: Final = 32
CHARACTERS_MAX: Final = 64
OTHERS: Final = "others"


class RefusedVersions:
    """Hellos refused for their protocol version, by software. Thread-safe, bounded."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, software: str) -> None:
        """Count a peer that calls itself ``software``."""
        name = "".join(c for c in software[:CHARACTERS_MAX] if c.isprintable()) or "unnamed"
        with self._lock:
            self._counts[name if name in self._counts or len(self._counts) < NAMES_MAX else OTHERS] += 1

    def counts(self) -> dict[str, int]:
        """By software; what came after ``NAMES_MAX`` names is counted as ``OTHERS``."""
        with self._lock:
            return dict(self._counts)
