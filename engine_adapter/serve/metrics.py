"""``/metrics``: vLLM's names, so that its dashboards and routers work; what only a pool has is ``kvstrata:``.

Counts of tokens and caches are the engine's, read when they are scraped; times and ends of requests are the
server's, since only it sees a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from kvstrata.client.metrics import CLIENTS
from kvstrata.engine_adapter.paged.stats import COMPUTED, EXTERNAL, LOCAL, EngineStats
from kvstrata.engine_adapter.serve.choice import FINISH_REASONS, Choice
from kvstrata.transfer.exposition import add_process, exposition

LABELS: Final = ("model_name", "engine")
#: Seconds. A CPU model's first token and a GPU's both fall well inside.
SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKENS: Final = tuple(mantissa * 10**power for power in range(6) for mantissa in (1, 2, 5))
#: The engine's words for where a prompt token's KV came from, and vLLM's.
_SOURCES: Final = {COMPUTED: "local_compute", LOCAL: LOCAL, EXTERNAL: EXTERNAL}
#: (name, help, field of EngineStats)
_GAUGES: Final = (
    ("vllm:num_requests_running", "Requests in the batch.", "running"),
    ("vllm:num_requests_waiting", "Requests queued.", "waiting"),
    ("vllm:kv_cache_usage_perc", "Blocks of the engine's own cache in use, 0 to 1.", "kv_usage"),
    ("kvstrata:num_requests_loading", "Requests that wait for KV from the pool.", "loading"),
)
_COUNTERS: Final = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the engine's own cache.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Tokens found there.", "prefix_cache_hits"),
    ("vllm:external_prefix_cache_queries", "Tokens looked up in the pool.", "external_prefix_cache_queries"),
    ("vllm:external_prefix_cache_hits", "Tokens loaded from the pool.", "external_prefix_cache_hits"),
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests, cached ones too.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    ("vllm:num_preemptions", "Times a request lost its blocks to another.", "preemptions"),
    ("kvstrata:rejected_requests", "Requests that could never fit.", "rejected"),
)


class EngineCollector(Collector):
    """Reads the engine's statistics when it is scraped: nothing is counted twice."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._labels = (model_name, "0")
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, getattr(stats, field))
        sources = stats.prompt_tokens_by_source
        yield self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens not computed.", sources[LOCAL] + sources[EXTERNAL]
        )
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", labels=(*LABELS, "source")
        )
        for source, name in _SOURCES.items():
            by_source.add_metric((*self._labels, name), sources[source])
        yield by_source
        for name, value in sorted(stats.connector.items()):
            # Sums and readings alike, so of no declared type.
            family = UnknownMetricFamily(f"kvstrata:connector_{name}", "Of the pool's connector.", labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter


class ServeMetrics:
    """The server's own observations, in a registry of its own with the engine's."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(model_name, stats))
        self._registry.register(CLIENTS)
        add_process(self._registry)
        labels = {"model_name": model_name, "engine": "0"}
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generated = self._histogram("vllm:request_generation_tokens", "Tokens a request generated.", TOKENS)
        self._ended = Counter(
            "vllm:request_success", "Requests that ended.", (*LABELS, "finished_reason"), registry=self._registry
        )
        self._labels = labels
        for histogram in (self._first_token, self._latency, self._prompt, self._generated):
            histogram.labels(**labels)
        for reason in FINISH_REASONS:
            self._ended.labels(**labels, finished_reason=reason)

    def first_token(self, seconds: float) -> None:
        self._first_token.labels(**self._labels).observe(seconds)

    def finished(self, choice: Choice, seconds: float) -> None:
        """A request ended, for whatever reason."""
        self._ended.labels(**self._labels, finished_reason=choice.finish_reason).inc()
        if choice.finish_reason == "error":
            return
        self._latency.labels(**self._labels).observe(seconds)
        self._prompt.labels(**self._labels).observe(choice.num_prompt_tokens)
        self._generated.labels(**self._labels).observe(choice.num_output_tokens)

    def dropped(self) -> None:
        """A request's client went away before its end."""
        self._ended.labels(**self._labels, finished_reason="abort").inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """What Prometheus scrapes, and its content type, for a request's Accept header."""
        return exposition(self._registry, accept)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
