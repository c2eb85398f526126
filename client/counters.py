"""What one client counts: blocks by what became of them, bytes by how they moved, seconds of calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvstrata.proto.status import Tier
from kvstrata.transfer.timings import Timings

#: Calls of which seconds are kept.
TIMED = ("lookup", "load", "store")
_TIERS = tuple((tier.name.lower(), bytes((tier,))) for tier in Tier)
_TIER_OF_ONE = {code: name for name, code in _TIERS}


class Counters:
    """Counts by call kind and by reason. Thread-safe; the totals of a kind always add up."""

    def __init__(self) -> None:
        self.timings = Timings(TIMED)
        self._lock = threading.Lock()
        self._kinds: dict[str, Counter[str]] = {}
        self._hits: dict[str, Counter[str]] = {}
        self._moved: Counter[tuple[str, str]] = Counter()
        self.by_index = 0  #: blocks that nodes on this host were not asked for

    def add(self, kind: str, reasons: Mapping[str, int], nbytes: int = 0, tiers: bytes | None = None) -> None:
        """One call. ``tiers``: of blocks that a lookup showed or a load brought, where they were: u8[n], other values
        are none."""
        with self._lock:
            counter = self._kinds.get(kind)
            if counter is None:
                counter = self._kinds[kind] = Counter()
            counter["calls"] += 1
            counter["bytes"] += nbytes
            for name, count in reasons.items():
                counter["asked"] += count
                counter[name] += count
            if tiers is not None:
                self._found(kind, tiers)

    def _found(self, kind: str, tiers: bytes) -> None:
        counter = self._hits.get(kind)
        if counter is None:
            counter = self._hits[kind] = Counter({name: 0 for name, _ in _TIERS})
        if len(tiers) == 1:
            if (tier := _TIER_OF_ONE.get(tiers)) is not None:
                counter[tier] += 1
            return
        for name, code in _TIERS:
            counter[name] += tiers.count(code)

    def absorb(self, other: Counters) -> None:
        """Add what ``other`` has counted, for good."""
        kinds, hits, moved = other.snapshot(), other.hits(), other.bytes_moved()
        self.timings.absorb(other.timings)
        with self._lock:
            for mine, theirs in ((self._kinds, kinds), (self._hits, hits)):
                for kind, counts in theirs.items():
                    mine.setdefault(kind, Counter()).update(counts)
            self._moved.update(moved)
            self.by_index += other.by_index

    def moved(self, kind: str, transport: str, nbytes: int, by_index: int = 0) -> None:
        """Payload bytes that one node gave or took; ``by_index``: of its blocks, those for which it was not asked."""
        with self._lock:
            self._moved[kind, transport] += nbytes
            self.by_index += by_index

    def snapshot(self) -> dict[str, dict[str, int]]:
        """kind -> {"calls", "bytes", "asked", and blocks by reason}."""
        with self._lock:
            return {kind: dict(counter) for kind, counter in self._kinds.items()}

    def hits(self) -> dict[str, dict[str, int]]:
        """kind -> blocks by tier."""
        with self._lock:
            return {kind: dict(counter) for kind, counter in self._hits.items()}

    def bytes_moved(self) -> dict[tuple[str, str], int]:
        """(kind, transport) -> payload bytes."""
        with self._lock:
            return dict(self._moved)
