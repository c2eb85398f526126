"""How long calls take: histograms by name that are cheap to add to, for whoever scrapes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

#: Seconds. From one block over shared memory to a call that waits for its deadline.
SECONDS: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)
#: OpenMetrics allows 128 characters of labels in an exemplar.
EXEMPLAR_CHARACTERS_MAX: Final = 100


_Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class _Histogram:
    __slots__ = ("counts", "exemplars", "total")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.total = 0.0
        self.exemplars: dict[int, tuple[dict[str, str], float]] = {}


class Timings:
    """Seconds of calls by the name of the call, and in each bucket the newest call that has a name. Thread-safe."""

    def __init__(self, names: Iterable[str], bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._all = {name: _Histogram(len(self._bounds)) for name in names}

    def add(self, name: str, seconds: float, trace_id: str = "", request: str = "") -> None:
        """A call took so long. ``trace_id`` or else ``request`` lets a person find one like it."""
        histogram = self._all[name]
        bucket = bisect_left(self._bounds, seconds)
        with self._lock:
            histogram.counts[bucket] += 1
            histogram.total += seconds
            if trace_id:
                histogram.exemplars[bucket] = {"trace_id": trace_id}, seconds
            elif request:
                histogram.exemplars[bucket] = {"request": request[:EXEMPLAR_CHARACTERS_MAX]}, seconds

    def count(self, name: str) -> int:
        """Calls of that name since the start."""
        with self._lock:
            return sum(self._all[name].counts)

    def family(
        self, metric: str, text: str, label: str, also: Mapping[str, str] | None = None
    ) -> HistogramMetricFamily:
        """For a scrape: ``label`` is the name of the call, ``also`` are labels of all."""
        also = also or {}
        family = HistogramMetricFamily(metric, text, labels=[label, *also])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        with self._lock:
            for name, histogram in self._all.items():
                upto, buckets = 0, list[_Bucket]()
                for index, count in enumerate(histogram.counts):
                    upto += count
                    bound = bounds[index]
                    newest = histogram.exemplars.get(index)
                    buckets.append((bound, upto) if newest is None else (bound, upto, Exemplar(*newest)))
                family.add_metric([name, *also.values()], buckets, histogram.total)
        return family
