"""A metrics page: in OpenMetrics, with exemplars, for who asks for that; else in Prometheus' text format."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstrata.proto import wire
from kvstrata.transfer.identity import SOFTWARE

VERSION: Final = SOFTWARE.rpartition(" ")[2]


def exposition(registry: Collector, accept: str) -> tuple[bytes, str]:
    """The page, and its content type. ``accept``: the request's Accept header, "" for none."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def build_info(role: str) -> Metric:
    """What runs: 1, with the version and what it speaks as labels."""
    family = GaugeMetricFamily(
        "kvstrata_build_info", "What runs: always 1", labels=["role", "version", "protocol", "python"]
    )
    family.add_metric([role, VERSION, str(wire.PROTOCOL), platform.python_version()], 1)
    return family


def traces_family(prefix: str, counts: Mapping[str, int]) -> Metric:
    """``prefix``: ``kvstrata_master`` or ``kvstrata_node``. ``counts``: see :meth:`OtlpTracing.counts`."""
    family = CounterMetricFamily(f"{prefix}_trace_spans", "Spans of traces, by what became of them", labels=["outcome"])
    for outcome, count in counts.items():
        family.add_metric([outcome], count)
    return family


def add_process(registry: CollectorRegistry) -> None:
    """``process_*``: CPU seconds, memory, open files and start of this process."""
    ProcessCollector(registry=registry)
