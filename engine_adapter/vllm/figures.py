"""What the scheduler side counts, as vLLM takes it: changes since the last step, and levels, which do not add up.

::

    {"counters": {name: change}, "gauges": {name: value}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Figures = dict[str, dict[str, float]]

#: Prefix of the names on vLLM's metrics page.
METRIC_PREFIX: Final = "kvstrata:connector_"

COUNTERS: Final[Mapping[str, str]] = {
    "query_tokens": "Tokens asked of the pool: those that are not in the engine's own cache.",
    "hit_tokens": "Tokens of the queries that the pool had.",
    "chosen_tokens": "Tokens of the hits that were to be loaded.",
    "load_tokens": "Tokens loaded.",
    "load_bytes": "Bytes loaded, on the rank that took longest.",
    "load_seconds": "Seconds from a load's beginning to its end, added up.",
    "loads": "Loads.",
    "loads_partial": "Loads that brought some of their blocks.",
    "loads_failed": "Loads that brought nothing.",
    "loads_overdue": "Loads and stores that did not end in time.",
    "stores": "Stores.",
    "store_blocks": "Blocks that the pool has since a store.",
    "store_blocks_failed": "Blocks that a store did not bring into the pool.",
    "store_blocks_skipped": "Computed blocks that were not offered.",
    "store_bytes": "Bytes stored, on the rank that took longest.",
    "store_seconds": "Seconds from a store's beginning to its end, added up.",
    "lookups": "Lookups.",
    "lookups_late": "Lookups without an answer in time: counted as misses.",
    "lookups_absent": "Lookups that could not be made.",
    "pool_lost": "Times the pool became absent.",
    "resets": "Times the engine's weights were new.",
}

GAUGES: Final[Mapping[str, str]] = {
    "pool_ready": "1 while the pool answers.",
    "weights_superseded": "1 while the pool refuses this engine's blocks: they are of weights of the past.",
    "jobs_pending": "Loads and stores under way.",
    "load_blocks_held": "Blocks held for loads under way.",
    "store_blocks_held": "Blocks held for stores under way.",
    "load_latency_s": "Measured seconds of a load before its first byte.",
    "load_bytes_s": "Measured bytes a second of loads.",
    "prefill_tokens_s": "Measured tokens a second of prefill.",
}


class ChangedFigures:
    """Turns sums since the start into what changed since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, stats: Mapping[str, float]) -> Figures | None:
        """None when nothing changed."""
        now = {name: stats[name] for name in (*COUNTERS, *GAUGES) if name in stats}
        changed = {name: value for name, value in now.items() if value != self._last.get(name, 0.0)}
        figures = {
            "counters": {
                name: value - self._last.get(name, 0.0) for name, value in changed.items() if name in COUNTERS
            },
            "gauges": {name: value for name, value in changed.items() if name in GAUGES},
        }
        self._last = now
        return figures if changed else None


def added(older: Figures, newer: Figures) -> Figures:
    """Both as one: changes add up, the newer level counts."""
    counters = dict(older.get("counters", {}))
    for name, change in newer.get("counters", {}).items():
        counters[name] = counters.get(name, 0.0) + change
    return {"counters": counters, "gauges": {**older.get("gauges", {}), **newer.get("gauges", {})}}


def summary(figures: Figures) -> dict[str, int | float]:
    """For vLLM's log line: what was loaded and stored, and how fast."""
    counters, gauges = figures.get("counters", {}), figures.get("gauges", {})
    named = (
        "query_tokens",
        "hit_tokens",
        "load_tokens",
        "loads",
        "loads_failed",
        "store_blocks",
        "store_blocks_failed",
    )
    line: dict[str, int | float] = {name: int(counters.get(name, 0)) for name in named}
    for kind in ("load", "store"):
        if seconds := counters.get(f"{kind}_seconds", 0.0):
            line[f"{kind}_MB_s"] = round(counters.get(f"{kind}_bytes", 0.0) / seconds / 1e6, 1)
    if "pool_ready" in gauges:
        line["pool_ready"] = int(gauges["pool_ready"])
    return line
