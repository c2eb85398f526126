"""Samples of counters that only grow, for what they grew by in the last minute or hour. No clock: time comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

STEP_S: Final = 2.0
SPAN_S: Final = 3600.0

#: A counter that is past it stays there.
_MOST: Final = (1 << 63) - 1

_Places = TypeVar("_Places", int, npt.NDArray[np.intp])


class CounterRing:
    """The last ``SPAN_S`` of samples of ``names``, one every ``STEP_S`` or so: 8 bytes a counter and sample."""

    def __init__(self, names: Sequence[str], samples: int = int(SPAN_S / STEP_S) + 1) -> None:
        self.names = tuple(names)
        self._times: npt.NDArray[np.float64] = np.zeros(samples)
        self._rows: npt.NDArray[np.int64] = np.zeros((samples, len(self.names)), dtype=np.int64)
        self._index = {name: column for column, name in enumerate(self.names)}
        self._next = 0
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def sample(self, values: Mapping[str, int], now: float) -> None:
        """Take a sample; counters that are not named keep what they were. ``now`` must not go back."""
        slot, before = self._next, self._rows[self._next - 1]
        self._times[slot] = now
        self._rows[slot] = before if self._held else 0
        for name, value in values.items():
            self._rows[slot, self._index[name]] = min(value, _MOST)
        self._next = (slot + 1) % len(self._times)
        self._held = min(self._held + 1, len(self._times))

    def grown(self, seconds: float) -> tuple[float, dict[str, int]]:
        """What each counter grew by in the last ``seconds`` before the newest sample, and the seconds that this
        is really over: fewer while there are no older samples, 0.0 with less than two."""
        times = self._ordered_times()
        if len(times) < 2:
            return 0.0, dict.fromkeys(self.names, 0)
        first = int(np.searchsorted(times, times[-1] - seconds - STEP_S / 4))
        first = min(first, len(times) - 2)
        growth = self._rows[self._slots(len(times) - 1)] - self._rows[self._slots(first)]
        return float(times[-1] - times[first]), dict(zip(self.names, growth.tolist(), strict=True))

    def series(self, name: str, bucket_s: float, buckets: int) -> list[int | None]:
        """What one counter grew by in each of the last ``buckets``, oldest first; None where there are no samples."""
        times = self._ordered_times()
        if len(times) < 2:
            return [None] * buckets
        edges = times[-1] - bucket_s * np.arange(buckets, -1, -1)
        places = np.searchsorted(times, edges + STEP_S / 4, side="right") - 1
        counts = self._rows[self._slots(np.maximum(places, 0)), self._index[name]]
        known: list[int | None] = [None] * buckets
        for bucket in range(buckets):
            if places[bucket + 1] > max(places[bucket], 0):
                known[bucket] = int(counts[bucket + 1] - counts[bucket])
        return known

    def _ordered_times(self) -> npt.NDArray[np.float64]:
        """Of the samples held, oldest first."""
        if self._held < len(self._times):
            return self._times[: self._held]
        return np.concatenate((self._times[self._next :], self._times[: self._next]))

    def _slots(self, places: _Places) -> _Places:
        """Where samples lie, by their places from the oldest on."""
        oldest = self._next if self._held == len(self._times) else 0
        return (places + oldest) % len(self._times)

    def check(self) -> None:
        """Assert that time and counters never go back."""
        times, rows = self._ordered_times(), self._rows[self._slots(np.arange(self._held))]
        assert 0 <= self._held <= len(self._times)
        assert bool((np.diff(times) >= 0).all()), "time went back"
        assert bool((np.diff(rows, axis=0) >= 0).all()), "a counter went back"
