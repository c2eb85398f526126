"""Seconds of calls: every call is in one bucket, sums are exact, and exemplars show in OpenMetrics alone."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from prometheus_client.registry import Collector

from kvstrata.transfer.exposition import add_process, exposition, seconds_family
from kvstrata.transfer.timings import SECONDS, Histogram, Timings


class Page(Collector):
    def __init__(self, *timings: Timings) -> None:
        self.timings = timings

    def collect(self) -> list[Metric]:
        return [seconds_family("call_seconds", "Seconds", ["who"], [(("x",), self.timings)])]

    def text(self, accept: str = "") -> str:
        registry = CollectorRegistry()
        registry.register(self)
        return exposition(registry, accept)[0].decode()


@given(st.lists(st.floats(0, 10)), st.lists(st.floats(0, 10)))
def test_every_call_is_counted_once_and_timings_add_up(one: list[float], two: list[float]) -> None:
    timings = Timings(["load"]), Timings(["load"])
    for each, seconds in zip(timings, (one, two), strict=True):
        for value in seconds:
            each.add("load", value)
    (family,) = plain(Page(*timings).text())
    values = {(sample.name, sample.labels.get("le", "")): sample.value for sample in family.samples}
    everything = one + two
    assert values["call_seconds_count", ""] == len(everything) == values["call_seconds_bucket", "+Inf"]
    assert abs(values["call_seconds_sum", ""] - sum(everything)) < 1e-6
    upto = {float(le): value for (name, le), value in values.items() if name == "call_seconds_bucket"}
    for bound in SECONDS:
        assert upto[bound] == sum(value <= bound for value in everything)


def test_exemplars_name_a_trace_or_else_a_request() -> None:
    timings = Timings(["load"])
    timings.add("load", 0.00007, trace_id="ab" * 16, request="ignored")
    timings.add("load", 0.3, request="r" * 300)
    timings.add("load", 3.0)
    page = Page(timings)
    text = page.text("application/openmetrics-text; version=1.0.0")
    (family,) = openmetrics(text)
    found = {s.labels["le"]: s.exemplar.labels for s in family.samples if s.exemplar}
    assert found == {"0.0001": {"trace_id": "ab" * 16}, "0.5": {"request": "r" * 100}}
    assert "trace_id" not in page.text()


def test_threads_lose_no_call() -> None:
    timings = Timings(["load"])
    threads = [threading.Thread(target=lambda: [timings.add("load", 0.001) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    total = Histogram()
    timings.add_to("load", total)
    assert sum(total.counts) == 4000


def test_a_page_has_the_process_that_serves_it() -> None:
    registry = CollectorRegistry()
    add_process(registry)
    page, content_type = exposition(registry, "")
    assert b"process_cpu_seconds_total" in page and content_type.startswith("text/plain")
