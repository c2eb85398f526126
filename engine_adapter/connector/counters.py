"""What the scheduler side counts since its start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvstrata.engine_adapter.connector.jobs import JobEnd
from kvstrata.engine_adapter.connector.policy import Decision


class Counters:
    """Counts by name, in tokens, blocks, bytes, seconds or jobs as the name says; every name is there from the start.

    ``query_tokens``: tokens that the pool was asked about and the engine did not have, once a request's life.
    ``hit_tokens``: of those, what the pool had, whole and aligned. ``chosen_tokens``: of those, what was to be loaded.
    """

    NAMES = (
        "queries",
        "query_tokens",
        "hit_tokens",
        "chosen_tokens",
        *(f"decisions_{decision.name.lower()}" for decision in Decision),
        "loads",
        "loads_ended",
        "loads_partial",
        "loads_failed",
        "loads_unwanted",
        "loads_layered",
        "loads_layered_failed",
        "load_waited_seconds",
        "loads_cancelled",
        "load_tokens_asked",
        "load_tokens",
        "load_bytes",
        "load_seconds",
        "stores",
        "stores_ended",
        "stores_layered",
        "store_blocks_offered",
        "store_blocks",
        "store_blocks_failed",
        "store_blocks_skipped",
        "store_bytes",
        "store_seconds",
        "pool_lost",
        "resets",
    )

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        assert name in self.NAMES, name
        self._counts[name] += amount

    def load_ended(self, end: JobEnd, asked_tokens: int, loaded_tokens: int, *, wanted: bool) -> None:
        self.add("loads_ended")
        self.add("load_tokens", loaded_tokens)
        self.add("load_bytes", end.bytes_moved)
        self.add("load_seconds", end.seconds)
        if loaded_tokens < asked_tokens:
            self.add("loads_partial" if loaded_tokens else "loads_failed")
        if not wanted:
            self.add("loads_unwanted")
        self._reasons("load", end.reasons)

    def store_ended(self, end: JobEnd) -> None:
        stored = end.done.count(1)
        self.add("stores_ended")
        self.add("stores_layered", end.layered)
        self.add("store_blocks", stored)
        self.add("store_blocks_failed", len(end.done) - stored)
        self.add("store_bytes", end.bytes_moved)
        self.add("store_seconds", end.seconds)
        self._reasons("store", end.reasons)

    def _reasons(self, kind: str, reasons: Mapping[str, int]) -> None:
        for reason, blocks in reasons.items():
            self._counts[f"{kind}_blocks_{reason}"] += blocks

    def snapshot(self) -> dict[str, float]:
        """Every name, and blocks by reason summed over ranks (``load_blocks_<reason>``, ``store_blocks_<reason>``)."""
        return dict.fromkeys(self.NAMES, 0.0) | self._counts
