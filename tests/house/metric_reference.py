"""The metric reference of docs/observability.md, out of the collectors themselves.

``python -m tests.house.metric_reference`` writes it anew; a test compares.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from kvstrata.client.metrics import CLIENTS
from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.engine_adapter.serve.metrics import ServeMetrics
from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.storage import http as node_http
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.exposition import add_process, traces_family
from kvstrata.transfer.security.metrics import security_metrics
from kvstrata.transfer.traces import OFF, TraceOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"
ANY = "127.0.0.1:0"


class _Security:
    """As when everything is on."""

    def __init__(self) -> None:
        self.tls = self.gate = self

    def expires(self) -> float:
        return 0.0

    def refused(self) -> dict[str, int]:
        return {}

    def warnings(self) -> list[str]:
        return []


class _Rails:
    def health(self) -> dict[str, Any]:
        return {"peers": 0, "unsettled": 0, "unsettled_bytes": 0, "age_seconds": 0.0, "pulls": {"bytes": 0}}


def master_metrics() -> list[Metric]:
    config = MasterConfig(ANY, ANY, ANY, None, traces=TraceOptions(OFF))
    with Master(config) as master:
        found = list(master.hub.metrics.registry.collect())
    return _with_options("kvstrata_master", found)


def node_metrics() -> list[Metric]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = Path(folder)
        (base / "ssd").mkdir()
        config = StorageConfig(
            masters=("127.0.0.1:1",),
            listen=ANY,
            http=ANY,
            data=base / "data",
            dram_bytes=16 << 20,
            ssd=((base / "ssd", 16 << 20),),
            traces=TraceOptions(OFF),
        )
        node = StorageNode(config)
        stack.callback(node.stop)
        node.start()
        found = list(node_http.NodeCollector(node.report).collect())
        rails = node_http._rails(cast("Any", _Rails()))
    return _with_options("kvstrata_node", [*found, *rails])


def _with_options(prefix: str, found: list[Metric]) -> list[Metric]:
    more = [*security_metrics(prefix, cast("Any", _Security())), traces_family(prefix, {})]
    names = {metric.name for metric in found}
    return [*found, *(metric for metric in more if metric.name not in names)]


def engine_metrics() -> list[Metric]:
    registry = ServeMetrics("model", EngineStats)._registry
    clients = {metric.name for metric in CLIENTS.describe()}
    found = [metric for metric in registry.collect() if metric.name not in clients]
    return [metric for metric in found if not metric.name.startswith("process_")]


def process_metrics() -> list[Metric]:
    registry = CollectorRegistry()
    add_process(registry)
    return list(registry.collect())


def labels_of(metric: Metric) -> list[str]:
    """Of a family, also of one without samples; not what a histogram adds."""
    named = list(getattr(metric, "_labelnames", ()) or (metric.samples[0].labels if metric.samples else ()))
    return [name for name in named if name != "le"]


def rows(metrics: Iterable[Metric]) -> Iterator[str]:
    seen: set[str] = set()
    for metric in sorted(metrics, key=lambda each: each.name):
        if metric.name in seen:
            continue
        seen.add(metric.name)
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in labels_of(metric))
        text = metric.documentation.rstrip(".")
        yield f"| `{name}` | {metric.type} | {labels} | {text[:1].upper()}{text[1:]} |"


def reference() -> str:
    """The tables, with headings."""
    parts = (
        ("Master", master_metrics()),
        ("Node", node_metrics()),
        ("Client", list(CLIENTS.describe())),
        ("Bundled engine", engine_metrics()),
        ("Every process", process_metrics()),
    )
    lines: list[str] = []
    for title, metrics in parts:
        found = [m for m in metrics if title == "Every process" or not m.name.startswith("process_")]
        lines += [f"### {title}", "", "| Name | Type | Labels | Meaning |", "|---|---|---|---|", *rows(found), ""]
    return "\n".join(lines).rstrip() + "\n"


def written(page: str, tables: str) -> str:
    """The page with these tables in it."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), reference()))
