"""Figures for vLLM's log and metrics: changes add up to the sums they came from."""

from __future__ import annotations

from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.scheduler_side import PoolSchedulerSide
from kvstrata.engine_adapter.vllm.figures import COUNTERS, GAUGES, ChangedFigures, added, summary
from tests.engine_adapter.connector.scheduler_fakes import CountingHolder, FakeLookups, full_layout


def test_changes_add_up_and_levels_are_the_newest() -> None:
    changed = ChangedFigures()
    first = changed.take({"loads": 2.0, "pool_ready": 1.0, "load_tokens": 0.0})
    assert first == {"counters": {"loads": 2.0}, "gauges": {"pool_ready": 1.0}}
    assert changed.take({"loads": 2.0, "pool_ready": 1.0, "load_tokens": 0.0}) is None
    second = changed.take({"loads": 5.0, "pool_ready": 0.0, "load_tokens": 64.0})
    assert second == {"counters": {"loads": 3.0, "load_tokens": 64.0}, "gauges": {"pool_ready": 0.0}}
    both = added(first, second)
    assert both == {"counters": {"loads": 5.0, "load_tokens": 64.0}, "gauges": {"pool_ready": 0.0}}


def test_the_log_line_tells_rates() -> None:
    line = summary({"counters": {"loads": 2.0, "load_bytes": 3e6, "load_seconds": 0.5}, "gauges": {}})
    assert (line["loads"], line["load_MB_s"]) == (2, 6.0) and "store_MB_s" not in line


def test_the_scheduler_side_counts_every_name_but_those_of_its_lookup_client() -> None:
    side = PoolSchedulerSide(full_layout(), PoolConfig(masters="m:1"), FakeLookups(), CountingHolder())
    missing = set(COUNTERS) | set(GAUGES)
    missing -= set(side.stats())
    assert missing == {"lookups_late", "lookups_absent"}
