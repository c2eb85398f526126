"""Tenants over gRPC and HTTP, against a running master and nodes at the other ends of its streams."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstrata.master.daemon import Master
from kvstrata.master.tenants.quota_api import EMPTY_SALT
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc

GIB = 1 << 30
MIB = 1 << 20
SALT = "team/a"


@pytest.fixture
def stub(master: Master) -> Iterator[control_pb2_grpc.MasterStub]:
    with grpc.insecure_channel(master.endpoints.grpc) as channel:
        yield control_pb2_grpc.MasterStub(channel)


@pytest.fixture
def http(master: Master) -> Callable[..., tuple[int, dict[str, Any]]]:
    def ask(method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{master.endpoints.http}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return ask


def policy(salt: str = SALT, **amounts: int) -> control.TenantPolicy:
    return control.TenantPolicy(salt=salt, **amounts)


def usage(salt: str, dram: int) -> control.NodeStatus:
    row = control.TenantUsage(salt=salt, dram_bytes=dram, dram_wanted=5)
    return control.NodeStatus(dram_bytes_used=dram, dram_bytes_free=GIB - dram, tenants=[row])


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(refused.value.details())


def test_a_policy_reaches_the_node_and_shows_in_the_listing(
    stub: control_pb2_grpc.MasterStub, node: Any, eventually: Any
) -> None:
    n1 = node("n1").attach()
    n1.say(status=usage(SALT, 300 * MIB))
    n1.say(status=usage("stranger", 100 * MIB))
    eventually(lambda: len(stub.ListTenants(control.TenantQuery()).tenants) == 2)
    changed = stub.SetTenant(control.TenantSet(policy=policy(dram_limit=GIB // 2, dram_floor=200 * MIB)))
    assert not changed.before.defined and changed.after.defined and not changed.warnings
    assert changed.after.policy.dram_limit == GIB // 2 and not changed.after.policy.HasField("ssd_limit")
    share = n1.hear("shares").shares.shares[0]
    assert share.salt == SALT and share.dram_limit == GIB // 2 and share.dram_floor == 200 * MIB
    assert not share.HasField("ssd_limit")
    listed = stub.ListTenants(control.TenantQuery())
    assert [(row.policy.salt, row.dram_bytes, row.defined) for row in listed.tenants] == [
        ("stranger", 100 * MIB, False),
        (SALT, 300 * MIB, True),
    ]
    assert listed.dram_bytes == GIB and not listed.fallback_denies
    [at] = listed.tenants[1].nodes
    assert at.node_id == "n1" and at.usage.dram_bytes == 300 * MIB and at.share.dram_limit == GIB // 2
    assert not at.confirmed
    assert stub.ListTenants(control.TenantQuery(limit=1)).left_out == 1


def test_the_first_answer_to_a_node_carries_its_shares(stub: control_pb2_grpc.MasterStub, node: Any) -> None:
    stub.SetTenant(control.TenantSet(policy=policy(dram_limit=GIB // 2)))
    stub.SetTenant(control.TenantSet(is_default=True, deny=True))
    n1 = node("n1")
    n1.begin()
    shares = n1.hear("attached").attached.shares
    assert shares.whole and shares.ttl_ms == 30_000 and [share.salt for share in shares.shares] == [SALT]
    assert shares.fallback.HasField("dram_limit") and shares.fallback.dram_limit == 0
    while not n1.hear("shares").shares.shares:  # the raise follows once it is durable
        pass


REFUSED = [
    (control.TenantSet(policy=policy(dram_limit=5, dram_floor=6)), "floor of 6 bytes is above the limit of 5"),
    (control.TenantSet(policy=policy(dram_limit=1 << 63)), "are allowed"),
    (control.TenantSet(policy=policy(dram_floor=3 * GIB)), f"take 0 of the cluster's {GIB} bytes, {GIB} are left"),
    (control.TenantSet(policy=policy("s" * 1000)), "characters"),
    (control.TenantSet(policy=policy(), deny=True), "deny is for the default"),
    (control.TenantSet(policy=policy(dram_floor=5), is_default=True), "no floors"),
    (control.TenantSet(policy=policy(dram_limit=5), is_default=True, deny=True), "either"),
]


def test_what_cannot_be_is_refused_with_the_numbers(stub: control_pb2_grpc.MasterStub, node: Any) -> None:
    node("n1").attach()
    for request, why in REFUSED:
        assert why in refusal(lambda request=request: stub.SetTenant(request))  # type: ignore[misc]
    assert not stub.ListTenants(control.TenantQuery()).tenants


def test_floors_of_all_tenants_must_fit(stub: control_pb2_grpc.MasterStub, node: Any) -> None:
    node("n1").attach()
    stub.SetTenant(control.TenantSet(policy=policy("x", dram_floor=700 * MIB)))
    stub.SetTenant(control.TenantSet(policy=policy("x", dram_floor=800 * MIB)))
    text = refusal(lambda: stub.SetTenant(control.TenantSet(policy=policy("y", dram_floor=300 * MIB))))
    assert f"take {800 * MIB} of" in text and f"{224 * MIB} are left" in text
    stub.SetTenant(control.TenantSet(policy=policy("y", dram_floor=224 * MIB)))


def test_warnings_and_a_dry_run_that_changes_nothing(
    stub: control_pb2_grpc.MasterStub, node: Any, eventually: Any
) -> None:
    n1 = node("n1").attach()
    n1.say(status=usage(SALT, 300 * MIB))
    eventually(lambda: len(stub.ListTenants(control.TenantQuery()).tenants) == 1)
    asked = control.TenantSet(policy=policy(dram_limit=100 * MIB, ssd_limit=GIB), dry_run=True)
    changed = stub.SetTenant(asked)
    assert changed.after.policy.dram_limit == 100 * MIB and not changed.before.defined
    assert any("no node has an SSD" in warning for warning in changed.warnings)
    assert any(f"{200 * MIB} of them leave" in warning for warning in changed.warnings)
    assert not stub.ListTenants(control.TenantQuery()).tenants[0].defined
    default = control.TenantSet(policy=policy("", dram_limit=200 * MIB), is_default=True, dry_run=True)
    assert any(f"{100 * MIB} bytes leave" in warning for warning in stub.SetTenant(default).warnings)
    assert not stub.ListTenants(control.TenantQuery()).fallback.HasField("dram_limit")
    asked.dry_run = False
    assert stub.SetTenant(asked).warnings == changed.warnings
    would = stub.RemoveTenant(control.TenantRemove(salt=SALT, dry_run=True))
    assert would.before.defined and not would.after.defined and not would.after.policy.HasField("dram_limit")
    assert stub.ListTenants(control.TenantQuery()).tenants[0].defined
    done = stub.RemoveTenant(control.TenantRemove(salt=SALT))
    assert not done.after.defined and not done.warnings
    assert "no policy" in stub.RemoveTenant(control.TenantRemove(salt=SALT)).warnings[0]


def test_removing_a_tenant_with_its_blocks(stub: control_pb2_grpc.MasterStub, node: Any, client: Any) -> None:
    n1 = node("n1").attach()
    n1.change(add=bytes(16), salt=SALT)
    n1.change(add=bytes(16), salt="other")
    would = stub.RemoveTenant(control.TenantRemove(salt=SALT, drop_blocks=True, dry_run=True))
    assert would.dropped.blocks == 1 and would.before.blocks == 1
    assert client.lookup(bytes(16), SALT).hit_blocks == 1
    call = stub.RemoveTenant.future(control.TenantRemove(salt=SALT, drop_blocks=True, erase=True))
    drop = n1.hear("drop").drop
    assert (drop.group, drop.salt, drop.any_salt, drop.erase) == ("", SALT, False, True)
    n1.say(done=control.CommandDone(command=drop.command))
    answer = call.result(timeout=10)
    assert answer.dropped.blocks == 1 and not answer.dropped.unreached and answer.after.blocks == 0
    assert client.lookup(bytes(16), SALT).hit_blocks == 0
    assert client.lookup(bytes(16), "other").hit_blocks == 1


def test_policies_outlive_the_master(wires: Any, closing: Any, tmp_path: Any) -> None:
    first = closing(wires.process(tmp_path / "s"))
    with grpc.insecure_channel(first.ready["grpc"]) as channel:
        stub = control_pb2_grpc.MasterStub(channel)
        stub.SetTenant(control.TenantSet(policy=policy(dram_limit=7, ssd_floor=3)))
        stub.SetTenant(control.TenantSet(policy=policy("", dram_limit=9), is_default=True))
    first.kill()
    second = closing(wires.process(tmp_path / "s"))
    with grpc.insecure_channel(second.ready["grpc"]) as channel:
        listed = control_pb2_grpc.MasterStub(channel).ListTenants(control.TenantQuery())
    assert [row.policy for row in listed.tenants] == [policy(dram_limit=7, ssd_floor=3)]
    assert listed.fallback == policy("", dram_limit=9)


# ---------------------------------------------------------------------- HTTP


def test_quota_over_http_as_lmcache_has_it(http: Any, node: Any, eventually: Any) -> None:
    n1 = node("n1").attach()
    path = "/quota/" + urllib.parse.quote(SALT, safe="")
    assert http("GET", path)[0] == 404 and http("DELETE", path)[0] == 404
    status, body = http("PUT", path, {"limit_gb": 0.5})
    assert status == 200 and body["status"] == "ok" and body["cache_salt"] == SALT and body["limit_gb"] == 0.5
    n1.say(status=usage(SALT, 256 * MIB))
    eventually(lambda: http("GET", path)[1]["current_usage_gb"] == 0.25)
    status, body = http("GET", path)
    assert body["exists"] and body["dram_limit"] == GIB // 2 and body["ssd_limit"] is None
    assert body["nodes"] == {"n1": {"dram_bytes": 256 * MIB, "ssd_bytes": 0}}
    status, body = http("GET", "/quota")
    assert status == 200 and body["users"][SALT]["limit_gb"] == 0.5 and body["default"]["deny"] is False
    assert http("DELETE", path + "?dry_run=true")[1]["status"] == "dry run" and http("GET", path)[1]["exists"]
    assert http("DELETE", path)[1]["status"] == "removed"
    status, body = http("GET", path)
    assert status == 200 and not body["exists"] and body["limit_gb"] is None, "it still uses something"


def test_our_fields_and_the_empty_salt(http: Any) -> None:
    body = {"dram_limit": "1.5GiB", "ssd_limit": "none", "dram_floor": "200MB", "ssd_floor": None}
    status, answer = http("PUT", f"/quota/{EMPTY_SALT}?dry_run=1", body)
    assert status == 200 and answer["status"] == "dry run" and http("GET", f"/quota/{EMPTY_SALT}")[0] == 404
    status, answer = http("PUT", f"/quota/{EMPTY_SALT}", body)
    assert status == 200 and answer["cache_salt"] == "" and answer["before"]["exists"] is False
    assert answer["dram_limit"] == 3 * GIB // 2 and answer["ssd_limit"] is None and answer["dram_floor"] == 200_000_000
    assert list(http("GET", "/quota")[1]["users"]) == [EMPTY_SALT]


NONSENSE = [
    (b"", "nothing given"),
    (b"[1]", "not list"),
    (b"{", "JSON object"),
    (b'{"limit_gb": NaN}', "limit_gb is nan"),
    (b'{"limit_gb": 1e999}', "limit_gb is inf"),
    (b'{"limit_gb": -1}', "limit_gb is -1"),
    (b'{"limit_gb": "1"}', "limit_gb is '1'"),
    (b'{"limit_gb": true}', "limit_gb is True"),
    (b'{"dram_limit": "5 apples"}', "such as 200GiB"),
    (b'{"dram_limit": "-5"}', "such as 200GiB"),
    (b'{"dram_limit": 1, "limit_gb": 1}', "give one of them"),
    (b'{"dram_limit": 1, "dram_floor": 2}', "above the limit"),
    (b'{"size": 1}', "'size' given"),
    (b'{"limit_gb": 5e9}', "are allowed"),
    (b'{"limit_gb": 1, "x": "' + b"y" * 70_000 + b'"}', "has more than"),
]


def test_a_quota_that_makes_no_sense(http: Any) -> None:
    for body, why in NONSENSE:
        status, answer = http("PUT", "/quota/t", body)
        assert status == 400 and why in answer["error"], (body[:50], answer)
    assert http("GET", "/quota")[1]["users"] == {}


def test_metrics_name_tenants_with_a_policy_and_sum_the_others(
    master: Master, stub: control_pb2_grpc.MasterStub, node: Any, eventually: Any
) -> None:
    n1 = node("n1").attach()
    stub.SetTenant(control.TenantSet(policy=policy(dram_limit=GIB // 2)))
    changed = stub.SetTenant(control.TenantSet(policy=policy("", dram_limit=5, ssd_floor=GIB)))
    assert changed.after.ssd_floor_unmet == GIB
    stub.SetTenant(control.TenantSet(policy=policy("(others)", dram_limit=GIB // 2)))
    for salt in (SALT, "x", "y", "(others)", ""):
        n1.say(status=usage(salt, MIB))
    eventually(lambda: sum(row.dram_bytes > 0 for row in stub.ListTenants(control.TenantQuery()).tenants) == 5)
    with urllib.request.urlopen(f"http://{master.endpoints.http}/metrics", timeout=10) as answer:
        families = {f.name: f.samples for f in text_string_to_metric_families(answer.read().decode())}
    used = {s.labels["salt"]: s.value for s in families["kvstrata_master_tenant_bytes"] if s.labels["tier"] == "dram"}
    assert used == {SALT: MIB, "(others)": 3 * MIB, "(empty)": MIB}
    limits = {s.labels["salt"]: s.value for s in families["kvstrata_master_tenant_limit_bytes"]}
    assert limits == {SALT: GIB // 2, "(empty)": 5}
    wanted = {s.labels["salt"]: s.value for s in families["kvstrata_master_tenant_wanted_bytes"]}
    assert wanted == {SALT: 5, "(others)": 5, "(empty)": 5}
    unmet = {s.labels["tier"]: s.value for s in families["kvstrata_master_floor_bytes_unmet"]}
    assert unmet == {"dram": 0, "ssd": GIB}
    assert families["kvstrata_master_shares_outstanding"][0].value > 0
    assert families["kvstrata_master_what_if_unheard"][0].value == 0
    assert families["kvstrata_master_what_if_turned_away"][0].value == 0
