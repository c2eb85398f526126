"""The chart as Helm renders it: objects of value sets, by the real engine."""

from __future__ import annotations

import copy
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "kvstrata"
EXAMPLES = ROOT / "helm" / "examples"
GOLDEN = Path(__file__).parent / "golden"
RELEASE, NAMESPACE = "kvstrata", "kv"
#: Kinds that belong to operators, which kubernetes-validate has no schema of.
OPERATORS = {"ServiceMonitor", "PrometheusRule", "Certificate"}

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Values = dict[str, Any]
Object = dict[str, Any]


def value_sets() -> dict[str, Values]:
    """Named values: none, each example, and one that turns on what those leave out."""
    paths = [path for path in sorted(EXAMPLES.glob("*.yaml")) if path.stem != "vllm"]  # that one is objects
    examples: dict[str, Values] = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    everything: Values = {
        "fullnameOverride": "pool",
        "ipFamily": "IPv6",
        "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "registry"}]},
        "serviceAccount": {"annotations": {"a": "b"}},
        "master": {
            "replicas": 3,
            "hotCopies": True,
            "kvEvents": {"enabled": True, "salts": True},
            "engineEvents": ["a=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:5558", "b=tcp://[fd00::2]:5557"],
            "cpu": {"limit": "4"},
            "podAnnotations": {"a": "b"},
            "podLabels": {"team": "kv"},
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"disk": "ssd"},
            "priorityClassName": "high",
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
        },
        "redis": {
            "url": "rediss+sentinel://kv@a:26379,b:26379/mymaster/0",
            "passwordSecret": {"name": "redis"},
            "sentinelPasswordSecret": {"name": "sentinel", "key": "pw"},
            "tls": {"secretName": "redis-tls"},
        },
        "security": {
            name: {"name": "auth"}
            for name in ("tokensSecret", "ticketKeysSecret", "nodeTokenSecret", "readTokenSecret")
        },
        "tls": {"secretName": "tls", "clientCerts": True},
        "storage": {
            "readProcessMemory": True,
            "podLabels": {"team": "kv"},
            "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "ssd": {"devices": [{"hostPath": "/mnt/a", "size": "10Gi"}], "dailyWrites": "1Ti"},
        },
        "networkPolicy": {"clients": [], "metrics": []},
    }
    encrypted: Values = {"tls": {"certManager": {"enabled": True, "issuerName": "ca"}}}  # and nobody is asked
    return {"defaults": {}, **examples, "encrypted": encrypted, "everything": everything}


@cache
def chart() -> Any:
    return helm.Chart.load(CHART)


def rendered(values: Values) -> dict[str, str]:
    """Text by template; raises ``helm.HelmError`` for values that the schema or a template refuses."""
    merged = chart().merge_values(values)
    chart().validate_schema(merged)
    texts: dict[str, str] = chart().render(values, name=RELEASE, namespace=NAMESPACE)
    return texts


def objects(values: Values) -> list[Object]:
    """Every object, by kind and name."""
    return copy.deepcopy(_objects(json.dumps(values)))


@lru_cache(maxsize=32)
def _objects(values: str) -> list[Object]:
    texts = [text for name, text in rendered(json.loads(values)).items() if not name.endswith(".txt")]
    found = [each for text in texts for each in yaml.load_all(text, _LOADER) if each is not None]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))


def one(found: list[Object], kind: str, name: str) -> Object:
    """The only object of that kind whose name ends so."""
    (only,) = [each for each in found if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    return only


def workloads(found: list[Object]) -> list[Object]:
    return [each for each in found if each["kind"] in ("StatefulSet", "DaemonSet")]


def pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def main_container(workload: Object) -> Object:
    (container,) = pod(workload)["containers"]
    return dict(container)


def golden_text(values: Values) -> str:
    """What is kept of a render: every object, but for the dashboard, which is a file already."""
    kept = [each for each in objects(values) if not each["metadata"]["name"].endswith("-dashboard")]
    return yaml.safe_dump_all(kept, sort_keys=False, width=120)
