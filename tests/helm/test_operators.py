"""Objects of the Prometheus operator and of cert-manager have the fields they should; the engine's example fits."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm.rendering import EXAMPLES, OPERATORS, ROOT, Object, objects, one, value_sets

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SELECTOR = {
    "type": "object",
    "required": ["matchLabels"],
    "additionalProperties": False,
    "properties": {"matchLabels": TEXTS},
}


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object of these fields alone."""
    properties = {**required, **optional}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


KEY = closed({"name": TEXT, "key": TEXT})

SPECS = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        {
            "selector": SELECTOR,
            "endpoints": listed(
                closed(
                    {"port": TEXT, "path": TEXT, "interval": TEXT},
                    scheme={"const": "https"},
                    tlsConfig=closed(
                        {"serverName": TEXT, "ca": closed({"secret": KEY})}, cert=closed({"secret": KEY}), keySecret=KEY
                    ),
                    authorization=closed({"credentials": KEY}),
                )
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        {
            "groups": listed(
                closed(
                    {
                        "name": TEXT,
                        "rules": listed(
                            closed(
                                {"alert": TEXT, "expr": TEXT, "labels": TEXTS, "annotations": TEXTS},
                                **{"for": {"type": "string", "pattern": "^[0-9]+[smh]$"}},
                            )
                        ),
                    }
                )
            )
        }
    ),
    ("cert-manager.io/v1", "Certificate"): closed(
        {
            "secretName": TEXT,
            "commonName": {"type": "string", "maxLength": 64},
            "dnsNames": listed(TEXT),
            "usages": listed({"enum": ["digital signature", "key encipherment", "client auth", "server auth"]}),
            "privateKey": closed({"rotationPolicy": {"enum": ["Always", "Never"]}}),
            "issuerRef": closed({"name": TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}}),
        }
    ),
}


def of_operators(name: str) -> list[Object]:
    return [each for each in objects(value_sets()[name]) if each["kind"] in OPERATORS]


@pytest.mark.parametrize("name", value_sets())
def test_operators_objects_have_the_fields_they_should(name: str) -> None:
    for each in of_operators(name):
        jsonschema.validate(each["spec"], SPECS[each["apiVersion"], each["kind"]])


def test_production_has_one_of_each_kind() -> None:
    assert {each["kind"] for each in of_operators("production")} == OPERATORS == {kind for _, kind in SPECS}


def test_the_certificate_is_what_masters_mount() -> None:
    found = objects(value_sets()["production"])
    secret = one(found, "Certificate", "-redis-client")["spec"]["secretName"]
    volumes = one(found, "StatefulSet", "-master")["spec"]["template"]["spec"]["volumes"]
    assert secret in [each["secret"]["secretName"] for each in volumes if "secret" in each]


def test_the_engine_of_the_example_on_a_pool_with_tokens_fits_the_docs() -> None:
    deployment, _ = yaml.safe_load_all((EXAMPLES / "vllm.yaml").read_text().replace("#+ ", ""))
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    page = (ROOT / "docs" / "deploy-helm.md").read_text()
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert all(f"`{name}={value}`" in page for name, value in variables.items()) and len(variables) == 2
    (volume,) = [each for each in spec["volumes"] if "secret" in each]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == volume["name"]]
    made = re.search(rf"create secret generic {volume['secret']['secretName']} (.+)", page)
    keys = re.findall(r"--from-file=([\w.]+)=", made[1] if made else "")
    assert {f"{mount['mountPath']}/{key}" for key in keys} == set(variables.values())
    assert volume["secret"]["defaultMode"] == 0o440 and mount["readOnly"]


def test_the_engine_of_the_example_fits_the_chart_and_the_docs() -> None:
    deployment, _ = yaml.safe_load_all((EXAMPLES / "vllm.yaml").read_text())
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (told,) = [each.partition("=")[2] for each in container["args"] if each.startswith("--kv-transfer-config=")]
    documented = re.search(r"--kv-transfer-config '(.+?)'", (ROOT / "docs" / "vllm.md").read_text())
    assert documented and json.loads(told) == json.loads(documented[1])
    found = objects({})
    (variable,) = container["env"]
    named = variable["valueFrom"]["configMapKeyRef"]
    assert named["key"] in one(found, "ConfigMap", named["name"])["data"]
    data = one(found, "DaemonSet", "-storage")["spec"]["template"]["spec"]["volumes"]
    (path,) = [each["hostPath"]["path"] for each in data if each["name"] == "data"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "kvstrata"]
    assert mount["mountPath"] == path and mount["readOnly"]
    policy = one(found, "NetworkPolicy", "-storage")["spec"]["ingress"]
    wanted = [peer["podSelector"]["matchLabels"] for rule in policy for peer in rule["from"]]
    assert any(labels.items() <= template["metadata"]["labels"].items() for labels in wanted)
