"""The chart: Helm's lint, golden renders, Kubernetes' schemas, what pods may do."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_engine(version: str, secured: bool) -> None:
    text = (EXAMPLES / "vllm.yaml").read_text()
    for each in yaml.safe_load_all(text.replace("#+ ", "") if secured else text):
        is_valid(each, version)


def test_routers_may_read_events_and_masters_reach_the_engines_whose_events_they_read() -> None:
    router = {"podSelector": {"matchLabels": {"app": "router"}}}
    events: Values = {"kvEvents": {"enabled": True, "port": 6001, "replayPort": 6002}}
    values: Values = {"networkPolicy": {"routers": [router]}}
    for master, listen, read in (
        ({}, False, False),
        (events, True, False),
        ({"engineEvents": ["a=tcp://b:1"]}, False, True),
    ):
        found = objects({**values, "master": master})
        policy = one(found, "NetworkPolicy", "-master")["spec"]
        rules = [rule for rule in policy["ingress"] if router in rule["from"]]
        assert rules == ([{"from": [router], "ports": [{"port": 6001}, {"port": 6002}]}] if listen else [])
        engines = {"podSelector": {"matchLabels": {"kvstrata.io/client": "true"}}}
        assert any(engines in rule.get("to", ()) for rule in policy["egress"]) is read
        offered = {port["port"] for port in one(found, "Service", "-masters")["spec"]["ports"]}
        assert (offered >= {6001, 6002}) is listen


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


def test_large_ids_stay_numbers() -> None:
    user, group = 1_000_650_000, 1_000_660_000
    for workload in workloads(objects({"runAs": {"user": user, "group": group}})):
        security = pod(workload)["securityContext"]
        assert [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [user, group, group]


def test_another_version_of_the_chart_replaces_no_pod() -> None:
    for workload in workloads(objects({})):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert not labels.keys() & {"helm.sh/chart", "app.kubernetes.io/version"}


@pytest.mark.parametrize("name", SETS)
def test_what_must_be_on_different_hosts_is(name: str) -> None:
    """A spread alone puts two on a host when there are more pods than hosts."""
    merged = chart().merge_values(SETS[name])
    for workload in workloads(objects(SETS[name])):
        part = "master" if workload["metadata"]["name"].endswith("-master") else "storage"
        required = workload["kind"] == "StatefulSet" and merged[part]["spread"] == "required"
        assert ("podAntiAffinity" in pod(workload).get("affinity", {})) == required
        if required:
            (term,) = pod(workload)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert term["labelSelector"] == workload["spec"]["selector"]


def test_directories_of_a_host_are_given_and_nothing_else_on_its_disks(tmp_path: Path) -> None:
    devices = [{"hostPath": "/mnt/a", "size": "1Gi"}, {"hostPath": "/mnt/b", "size": "1Gi"}]
    (first,) = pod(one(objects({"storage": {"ssd": {"devices": devices}}}), "DaemonSet", "-storage"))["initContainers"]
    for name in ("data", "a/kv", "b/others"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/kv/superblock").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/chown").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    (tmp_path / "bin/chown").chmod(0o755)
    shell, flags, script, *paths = first["command"]
    assert paths == ["/var/lib/kvstrata", "/mnt/a", "/mnt/b"]
    here = [str(tmp_path / name) for name in ("data", "a", "b")]
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    subprocess.run([shell, flags, script, *here], env=environment, timeout=30, check=True)
    assert (tmp_path / "b/kv").stat().st_mode & 0o777 == 0o700
    data, a, b = here
    assert (tmp_path / "called").read_text().splitlines() == [
        f"-R 65532:65532 {data}",
        f"65532:65532 {a}",
        f"-R 65532:65532 {a}/kv",
        f"65532:65532 {b}",
        f"-R 65532:65532 {b}/kv",
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "kvstrata node list"),
        ({}, "Three masters need a Redis"),
        ({"storage": {"dram": "64Gi", "drainSeconds": 60}}, "takes 256 s, and storage.drainSeconds is 60"),
        ({"master": {"persistence": {"enabled": False}}}, "WARNING: the master keeps"),
        ({}, "WARNING: nothing here asks who calls"),
        (SETS["production"], "They need a token of role client"),
    ],
)
def test_the_notes_say_what_to_do(values: Values, said: str) -> None:
    assert said in rendered(values)["kvstrata/templates/NOTES.txt"]


@pytest.mark.parametrize("name", SETS)
def test_policies_open_ports_that_are_there_and_http_to_clients_for_tickets_alone(name: str) -> None:
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
                asks = chart().merge_values(SETS[name])["security"]["tokensSecret"]["name"]
                tickets = asks and component == "master"
                assert opened == set(names.values()) - (set() if tickets else {"http"})
