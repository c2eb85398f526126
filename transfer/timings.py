"""How long calls take: histograms by name that are cheap to add to, for whoever scrapes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

#: Upper bounds in seconds. From one block over shared memory to a call that waits for its deadline.
SECONDS: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
#: OpenMetrics allows 128 characters of labels in an exemplar.
EXEMPLAR_CHARACTERS_MAX: Final = 100


class Histogram:
    """``counts`` by bucket, not summed up; the last is of what is over all bounds. ``exemplars``: of each bucket the
    labels and seconds of the newest call that has a name."""

    __slots__ = ("counts", "exemplars", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[dict[str, str], float]] = {}

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.exemplars |= other.exemplars


def exemplar_of(trace_id: str, request: str) -> dict[str, str] | None:
    """Labels of an exemplar: by its trace, or else by the engine's name of the request; None without either."""
    if trace_id:
        return {"trace_id": trace_id}
    return {"request": request[:EXEMPLAR_CHARACTERS_MAX]} if request else None


class Timings:
    """Seconds of calls by the name of the call, and in each bucket the newest call that has a name. Thread-safe."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._lock = threading.Lock()
        self._all = {name: Histogram() for name in self.names}

    def add(self, name: str, seconds: float, trace_id: str = "", request: str = "") -> None:
        """A call took so long. By ``trace_id``, or else ``request``, a person finds one like it."""
        histogram = self._all[name]
        bucket = bisect_left(SECONDS, seconds)
        with self._lock:
            histogram.counts[bucket] += 1
            histogram.total += seconds
            if (trace_id or request) and (labels := exemplar_of(trace_id, request)) is not None:
                histogram.exemplars[bucket] = labels, seconds

    def absorb(self, other: Timings) -> None:
        """Add what ``other`` has counted, of the same names."""
        for name in other.names:
            total = Histogram()
            other.add_to(name, total)
            with self._lock:
                self._all[name].add(total)

    def add_to(self, name: str, total: Histogram) -> None:
        """Add what is counted of ``name``."""
        with self._lock:
            total.add(self._all[name])
