"""A metrics page: in OpenMetrics, with exemplars, for who asks for that; else in Prometheus' text format."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvstrata.proto import wire
from kvstrata.transfer.identity import VERSION
from kvstrata.transfer.timings import SECONDS, Histogram, Timings

_BOUNDS: Final = (*map(floatToGoString, SECONDS), "+Inf")
_Bucket = tuple[str, float] | tuple[str, float, Exemplar]


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


def seconds_family(
    metric: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Sequence[Timings]]],
) -> HistogramMetricFamily:
    """For a scrape. ``rows``: values of ``labels``, and timings that are added up under them by the name of the call,
    which is the label "call"."""
    family = HistogramMetricFamily(metric, text, labels=[*labels, "call"])
    for values, timings in rows:
        for name in timings[0].names:
            total = Histogram()
            for each in timings:
                each.add_to(name, total)
            family.add_metric([*values, name], _buckets(total), total.total)
    return family


def _buckets(histogram: Histogram) -> list[_Bucket]:
    """As Prometheus has them: each with all that is below."""
    upto, buckets = 0, list[_Bucket]()
    for index, (bound, count) in enumerate(zip(_BOUNDS, histogram.counts, strict=True)):
        upto += count
        newest = histogram.exemplars.get(index)
        buckets.append((bound, upto) if newest is None else (bound, upto, Exemplar(*newest)))
    return buckets


def add_process(registry: CollectorRegistry) -> None:
    """``process_*``: CPU seconds, memory, open files and start of this process."""
    ProcessCollector(registry=registry)
