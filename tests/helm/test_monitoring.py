"""Alerts and dashboard: PromQL that parses, over metrics, labels and label values that daemons really have."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.metrics import security_metrics
from kvstrata.transfer.security.opened import Security
from kvstrata.transfer.security.tokens import digest, new_token
from tests.certificates import Authority
from tests.helm.pods import close, start
from tests.helm.rendering import CHART, NAMESPACE, ROOT, Object, objects, one

promql = pytest.importorskip("promql_parser", reason="promql-parser has no wheel for this platform")

#: Labels that Prometheus adds to what it scrapes, and the metric that it makes itself.
TARGET_LABELS = {"namespace", "job", "pod", "instance"}
OF_PROMETHEUS = {"up"}
ON = {"monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "rules", "dashboard")}}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Of a running master and a node with an SSD: label sets by the name of the sample; [] where there is none yet."""
    base = tmp_path_factory.mktemp("scraped")
    ssd = {"devices": [{"hostPath": "/mnt/a", "size": "64Mi"}]}
    found = objects({"storage": {"dram": "64Mi", "drainSeconds": 0, "ssd": ssd}})
    fields = {"metadata.name": "kvstrata-master-0", "spec.nodeName": "host-1", "status.podIP": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        (base / "m").mkdir()
        (base / "n").mkdir()
        master = start(one(found, "StatefulSet", "-master"), base / "m", fields)
        stack.callback(close, master)
        node = start(one(found, "DaemonSet", "-storage"), base / "n", fields, master.ready["channel"])
        stack.callback(close, node)
        yield _samples(master.get("/metrics")[1] + node.get("/metrics")[1] + _secured(base))


def _secured(base: Path) -> str:
    """What daemons with tokens and TLS add to their metrics."""
    pair = Authority(base).pair("server")
    (base / "tokens").write_text(yaml.safe_dump([{"name": "a", "sha256": digest(new_token()), "role": "read"}]))
    files = SecurityFiles(tokens=base / "tokens", tls_cert=pair.cert, tls_key=pair.key)
    security = Security.opened(files, "127.0.0.1:0", ("127.0.0.1:0",))
    registry = CollectorRegistry()
    registry.register(
        _Of([*security_metrics("kvstrata_master", security), *security_metrics("kvstrata_node", security)])
    )
    return generate_latest(registry).decode()


class _Of(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _samples(text: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector in a parsed expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (below := getattr(node, name, None)) is not None:
            yield from selectors(below)
    for below in getattr(node, "args", None) or ():
        yield from selectors(below)


def check(expression: str, samples: dict[str, list[dict[str, str]]]) -> None:
    """Raises AssertionError for what no daemon has."""
    found = list(selectors(promql.parse(expression)))
    assert found, expression
    for selector in found:
        if selector.name in OF_PROMETHEUS:
            continue
        assert selector.name in samples, f"{expression}: no {selector.name}"
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            values = [labels[matcher.name] for labels in samples[selector.name] if matcher.name in labels]
            for wanted in matcher.value.split("|"):
                assert wanted in values, f"{expression}: {selector.name} has no {matcher.name}={wanted}"


def alerts() -> list[Object]:
    (group,) = one(objects(ON), "PrometheusRule", "kvstrata")["spec"]["groups"]
    return list(group["rules"])


def test_alerts_are_about_metrics_that_exist(samples: dict[str, list[dict[str, str]]]) -> None:
    for alert in alerts():
        check(alert["expr"], samples)
        for selector in selectors(promql.parse(alert["expr"])):
            scope = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            assert scope["namespace"] == NAMESPACE and scope["job"] in ("kvstrata-masters", "kvstrata-nodes")


def dashboard() -> dict[str, Any]:
    text = one(objects(ON), "ConfigMap", "-dashboard")["data"]["kvstrata.json"]
    parsed: dict[str, Any] = json.loads(text)
    assert parsed == json.loads((CHART / "files" / "dashboard.json").read_text())
    return parsed


def test_the_dashboard_is_about_metrics_that_exist(samples: dict[str, list[dict[str, str]]]) -> None:
    board = dashboard()
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in board["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            assert set(re.findall(r"\$(\w+)", expression)) <= variables
            check(expression, samples)


def test_what_does_not_exist_is_seen(samples: dict[str, list[dict[str, str]]]) -> None:
    for wrong in ("sum(rate(kvstrata_node_hits_total[5m]))", 'kvstrata_master_nodes{state="gone"} > 0'):
        with pytest.raises(AssertionError):
            check(wrong, samples)


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_has_its_place_in_the_runbook() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert headings == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["runbook"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning", "info") and alert["annotations"]["summary"]


def test_monitors_find_the_services_and_alerts_their_jobs() -> None:
    found = objects(ON)
    monitors = [each for each in found if each["kind"] == "ServiceMonitor"]
    services = [each for each in found if each["kind"] == "Service"]
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [each for each in services if wanted.items() <= each["metadata"]["labels"].items()]
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= {p["name"] for p in service["spec"]["ports"]}
    jobs = {each["metadata"]["name"] for each in services}
    assert set(re.findall(r'job="([^"]+)"', yaml.safe_dump(alerts(), width=10_000))) == jobs and len(monitors) == 2


def test_files_of_the_chart_are_the_ones_in_it() -> None:
    assert {path.name for path in Path(CHART / "files").iterdir()} == {"alerts.yaml", "dashboard.json"}
