"""The chart: Helm's lint, golden renders, Kubernetes' schemas, what pods may do."""

from __future__ import annotations

import copy

import pytest
import yaml

from tests.helm.rendering import (
    CHART,
    EXAMPLES,
    GOLDEN,
    NAMESPACE,
    OPERATORS,
    Object,
    Values,
    chart,
    golden_text,
    helm,
    main_container,
    objects,
    one,
    pod,
    rendered,
    value_sets,
    workloads,
)

kubernetes_validate = pytest.importorskip("kubernetes_validate")

SETS = value_sets()
#: The oldest Kubernetes that the chart names, and the newest that the schemas are there of.
KUBERNETES = ("1.25", "1.34")


@pytest.mark.parametrize("name", SETS)
def test_helm_lint_finds_nothing(name: str) -> None:
    report = helm.lint(CHART, SETS[name], strict=True)
    assert report["errors"] == []
    assert [found for found in report["messages"] if found["severity"] > 1] == []


@pytest.mark.parametrize("name", SETS)
def test_renders_are_the_golden_ones(name: str) -> None:
    kept = (GOLDEN / f"{name}.yaml").read_text()
    assert golden_text(SETS[name]) == kept, "meant so? python -m tests.helm.update"


def test_every_golden_render_has_its_values() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(SETS)


def is_valid(found: Object, version: str) -> None:
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise AssertionError(f"{found['kind']}: {'.'.join(map(str, error.path))}: {error.message}") from error


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_every_object(name: str, version: str) -> None:
    found = objects(SETS[name])
    assert {each["kind"] for each in found} >= {
        "StatefulSet",
        "Service",
        "ServiceAccount",
        "ConfigMap",
        "NetworkPolicy",
    }
    for each in found:
        if each["kind"] not in OPERATORS:
            is_valid(each, version)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_engine(version: str) -> None:
    for each in yaml.safe_load_all((EXAMPLES / "vllm.yaml").read_text()):
        is_valid(each, version)


def test_an_object_that_kubernetes_would_refuse_is_seen() -> None:
    broken = copy.deepcopy(one(objects({}), "StatefulSet", "-master"))
    broken["spec"]["replica"] = 1
    with pytest.raises(AssertionError, match="replica"):
        is_valid(broken, KUBERNETES[-1])


@pytest.mark.parametrize("name", SETS)
def test_pods_may_do_little(name: str) -> None:
    values = SETS[name]
    storage = values.get("storage", {})
    privileged = storage.get("rdma", {}).get("enabled") or storage.get("readProcessMemory")
    for workload in workloads(objects(values)):
        spec, container = pod(workload), main_container(workload)
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        added = container["securityContext"]["capabilities"].get("add", [])
        if workload["metadata"]["name"].endswith("-master") or not privileged:
            assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
            assert added == [] and "hostPID" not in spec
        else:  # a capability is of use to user 0 alone
            assert spec["securityContext"]["runAsUser"] == 0 and set(added) <= {"IPC_LOCK", "SYS_PTRACE"} and added


@pytest.mark.parametrize("name", SETS)
def test_no_role_and_no_secret_is_made(name: str) -> None:
    kinds = {each["kind"] for each in objects(SETS[name])}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"}


@pytest.mark.parametrize("name", SETS)
def test_selectors_find_pods_and_volumes_are_there(name: str) -> None:
    found = objects(SETS[name])
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads(found)]
    selectors = [
        each["spec"].get("podSelector", each["spec"].get("selector", {}))
        for each in found
        if each["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget")
    ]
    for selector in selectors:
        wanted = selector.get("matchLabels", selector)
        assert sum(wanted.items() <= each.items() for each in labels) == 1, wanted
    for workload in workloads(found):
        spec = pod(workload)
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {each["name"] for each in spec["volumes"]} | claims
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert {mount["name"] for mount in main_container(workload)["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", SETS)
def test_a_pod_that_ends_has_the_time_to_drain(name: str) -> None:
    storage = next(each for each in workloads(objects(SETS[name])) if each["metadata"]["name"].endswith("-storage"))
    (drain,) = [arg for arg in main_container(storage)["args"] if arg.startswith("--drain-on-stop=")]
    assert pod(storage)["terminationGracePeriodSeconds"] >= float(drain.partition("=")[2]) + 20


def test_a_budget_is_only_where_kubernetes_counts() -> None:
    budgets = {
        name: [e["metadata"]["name"] for e in objects(SETS[name]) if e["kind"] == "PodDisruptionBudget"]
        for name in SETS
    }
    assert budgets["defaults"] == [] and budgets["production"] == ["kvstrata-master"]
    assert budgets["statefulset"] == ["kvstrata-storage"]


def test_names_fit_however_long_the_release_is() -> None:
    texts = helm.Chart.load(CHART).render(SETS["production"], name="r" * 53, namespace=NAMESPACE)
    for text in texts.values():
        for found in yaml.safe_load_all(text) if "apiVersion" in text else ():
            if found is not None:  # labels of pods hold a workload's name and a hash
                bound = 63 - len("-6f9d5c7b8d") if "template" in found.get("spec", {}) else 63
                assert len(found["metadata"]["name"]) <= bound


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "kvstrata node list"),
        ({}, "Three masters need a Redis"),
        ({"storage": {"dram": "64Gi", "drainSeconds": 60}}, "takes 256 s, and storage.drainSeconds is 60"),
        ({"master": {"persistence": {"enabled": False}}}, "WARNING: the master keeps"),
        ({"networkPolicy": {"enabled": False}}, "WARNING: nothing here asks who calls"),
    ],
)
def test_the_notes_say_what_to_do(values: Values, said: str) -> None:
    assert said in rendered(values)["kvstrata/templates/NOTES.txt"]


@pytest.mark.parametrize("name", SETS)
def test_policies_open_ports_that_are_there_and_http_to_no_client(name: str) -> None:
    found = objects(SETS[name])
    ports = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: main_container(each)["ports"]
        for each in workloads(found)
    }
    clients = chart().merge_values(SETS[name])["networkPolicy"]["clients"]
    for policy in [each for each in found if each["kind"] == "NetworkPolicy"]:
        component = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        names = {port["containerPort"]: port["name"] for port in ports[component]}
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        for rule in policy["spec"]["ingress"]:
            opened = {names[port["port"]] for port in rule["ports"]}
            assert rule["from"], "an empty list lets everybody in"
            if rule["from"] == clients:
                assert opened == set(names.values()) - {"http"}
