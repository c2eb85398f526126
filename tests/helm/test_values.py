"""Values: what the schema refuses, and that each value is described, has a default and does something."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from tests.helm.rendering import CHART, Values, helm, rendered, value_sets
from tests.helm.values_table import default_of, leaves

SETS = value_sets()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SECRETS = ("tokensSecret", "ticketKeysSecret", "nodeTokenSecret")
#: A value other than any that is set anywhere, where its type alone does not say one.
OTHERS: dict[str, Any] = {
    "image.digest": "sha256:" + "1" * 64,
    "image.pullSecrets": [{"name": "other"}],
    "master.blocks": 5_000_000,
    "redis.url": "rediss://other:6379/0",
    "redis.egressPorts": [6390],
    "storage.ssd.devices": [{"hostPath": "/mnt/other", "size": "3Gi"}],
    "storage.data.hostPath": "/var/lib/other",
    "storage.rdma.devices": ["mlx5_7:1"],
    "storage.rdma.resourceName": "other/hca",
    "networkPolicy.clients": [{"podSelector": {}}],
    "master.engineEvents": ["other=tcp://10.0.0.7:5557"],
    "networkPolicy.routers": [{"podSelector": {}}],
    "networkPolicy.hosts": ["10.77.0.0/16"],
    "networkPolicy.metrics": [{"podSelector": {}}],
    "monitoring.serviceMonitor.interval": "7s",
    "monitoring.rules.runbook": "https://other.example.org/runbook",
}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"master": {"replicas": 2}}, "replicas"),
        ({"master": {"replicas": 3}}, "url"),
        ({"master": {"replica": 1}}, "replica"),
        ({"master": {"ports": {"channel": 0}}}, "channel"),
        ({"master": {"engineEvents": ["tcp://10.0.0.1:5557"]}}, "engineEvents"),
        ({"master": {"kvEvents": {"port": 0}}}, "port"),
        ({"master": {"cpu": {"limit": "two"}}}, "limit"),
        ({"storage": {"dram": "8GiB"}}, "dram"),
        ({"storage": {"dram": "0Gi"}}, "dram"),
        ({"storage": {"dram": 8589934592}}, "dram"),
        ({"storage": {"kind": "Deployment"}}, "kind"),
        ({"storage": {"drainSeconds": -1}}, "drainSeconds"),
        ({"storage": {"ssd": {"devices": [{"size": "1Gi"}]}}}, "hostPath"),
        ({"storage": {"kind": "StatefulSet", "ssd": {"devices": [{"size": "1Gi", "hostPath": "/mnt/a"}]}}}, "devices"),
        ({"storage": {"ssd": {"devices": [{"size": "1Gi", "hostPath": "mnt/a"}]}}}, "hostPath"),
        ({"storage": {"ssd": {"devices": [{"size": "1Gi", "hostPath": "/mnt/a=b"}]}}}, "hostPath"),
        ({"storage": {"data": {"hostPath": "/" + "a" * 100}}}, "hostPath"),
        ({"storage": {"rdma": {"mode": "cma"}}}, "mode"),
        ({"redis": {"url": "redis://:secret@redis:6379/0"}}, "url"),
        ({"redis": {"url": "redis://kv:secret@redis:6379/0"}}, "url"),
        ({"redis": {"url": "redis+sentinel://redis/main?sentinel_password=secret"}}, "url"),
        ({"redis": {"url": "redis://redis", "sentinelPasswordSecret": {"name": "sentinel"}}}, "url"),
        ({"redis": {"passwordSecret": {"key": ""}}}, "key"),
        ({"redis": {"url": "http://redis"}}, "url"),
        ({"redis": {"url": "redis://redis", "tls": {"secretName": "files"}}}, "url"),
        ({"redis": {"url": "rediss://redis", "tls": {"certManager": {"enabled": True}}}}, "issuerName"),
        ({"storage": {"hostNetwork": True}}, "hosts"),
        ({"networkPolicy": {"hosts": ["10.0.0.1"]}}, "hosts"),
        ({"runAs": {"user": 0}}, "user"),
        ({"tls": {"enabled": True}}, "tls"),
        ({"security": {"tokensSecret": {"name": "auth"}}}, "security"),
        ({"security": {name: {"name": "auth"} for name in SECRETS}}, "tls"),
        ({"security": {"ticketKeysSecret": {"name": "auth"}}}, "tokensSecret"),
        ({"security": {"readTokenSecret": {"name": "auth"}}}, "tokensSecret"),
        ({"tls": {"certManager": {"enabled": True}}}, "issuerName"),
        ({"tls": {"secretName": "a", "certManager": {"enabled": True, "issuerName": "b"}}}, "secretName"),
        ({"tls": {"clientCerts": True}}, "tls"),
        ({"monitoring": {"rules": {"runbook": "docs/runbook.md"}}}, "runbook"),
        ({"storage": {"ssd": {"devices": [{"size": "1Gi", "hostPath": "/mnt/a"}] * 2}}}, "directory of its own"),
        (
            {"storage": {"ssd": {"devices": [{"size": "1Gi", "hostPath": each} for each in ("/mnt/a", "/mnt/a/")]}}},
            "hostPath|directory of its own",
        ),
        (
            {"storage": {"ssd": {"devices": [{"size": "1Gi", "hostPath": "/var/lib/kvstrata"}]}}},
            "none is storage.data.hostPath",
        ),
        ({"image": {"digest": "sha256:1"}}, "digest"),
    ],
)
def test_bad_values_are_refused_by_name(values: Values, said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        rendered(values)


def test_schema_and_defaults_name_the_same_values() -> None:
    assert set(_paths(DEFAULTS, SCHEMA)) == {path for path, _ in leaves(SCHEMA)}


def _paths(values: Any, schema: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, each in values.items():
        below = schema["properties"][name]
        found += _paths(each, below, f"{prefix}{name}.") if "properties" in below else [prefix + name]
    return found


def others(path: str, schema: dict[str, Any], now: Any) -> list[Any]:
    """Values of the schema that are not the one it has now."""
    if path in OTHERS:
        return [OTHERS[path]]
    if "enum" in schema:
        return [each for each in schema["enum"] if each != now]
    if path.endswith(".extraEnv"):
        return [[{"name": "OTHER", "value": "1"}]]
    if path.endswith(".tolerations"):
        return [[{"key": "other", "operator": "Exists"}]]
    if schema["type"] == "boolean":
        return [not now]
    if schema["type"] in ("integer", "number"):
        return [now + 1]
    if schema["type"] == "object":
        return [{"other": "1"}]
    return ["77Gi" if "Gi" in schema.get("pattern", "") else "7"]


def changed(values: Values, path: str, value: Any) -> Values:
    result = copy.deepcopy(values)
    *above, last = path.split(".")
    at = result
    for part in above:
        at = at.setdefault(part, {})
    at[last] = value
    return result


@pytest.mark.parametrize(("path", "schema"), list(leaves(SCHEMA)), ids=[path for path, _ in leaves(SCHEMA)])
def test_every_value_does_something(path: str, schema: dict[str, Any]) -> None:
    """In one of the value sets at least, another value gives another render."""
    refused = []
    for values in SETS.values():
        try:
            now = default_of(values, path)
        except KeyError:
            now = default_of(DEFAULTS, path)
        for value in others(path, schema, now):
            try:
                if rendered(changed(values, path, value)) != rendered(values):
                    return
            except helm.HelmError as error:
                refused.append(str(error))
    raise AssertionError(f"{path} changes nothing; refused: {refused}")
