"""The connector's figures in vLLM's log line and on its metrics page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstrata.engine_adapter.vllm.figures import COUNTERS, GAUGES, METRIC_PREFIX, added, summary

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVStrataStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """``data``: see figures.py."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVStrataMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """``kvstrata:connector_...``, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](name=METRIC_PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: metric_types[Gauge](name=METRIC_PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, change in transfer_stats_data.get("counters", {}).items():
            self._counters[name].labels(*labels).inc(change)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*labels).set(value)
