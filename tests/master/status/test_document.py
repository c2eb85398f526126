"""The document of a real master over HTTP: what nodes, clients and operators did is in it, and it costs little."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from kvstrata.master import messages as m
from kvstrata.master.content.calls import Content
from kvstrata.master.daemon import Master
from kvstrata.master.status.document import FRESH_S, StatusDocument
from kvstrata.master.status.pages import PUBLIC
from kvstrata.master.tenants.answers import Tenants
from kvstrata.master.tenants.tenancy import Member
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.transfer.security.access import CALLER
from kvstrata.transfer.security.rights import Rights, Role
from tests.e2e import status_documents as documents

Make = Callable[..., Any]


@pytest.fixture
def stub(master: Master, closing: Make) -> Any:
    return control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))


def _keys(value: Any, path: str = "") -> set[str]:
    """Every key of a document, with lists and maps by content as one."""
    if isinstance(value, dict):
        if path.endswith((".misses", ".versions", ".security", ".miss_reasons")):
            return {path}
        return {path}.union(*(_keys(item, f"{path}.{key}") for key, item in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _keys(value[0], path + "[]")
    return {path}


def test_the_documents_that_tests_draw_are_as_a_masters(
    master: Master, stub: Any, node: Make, client: Any, eventually: Make
) -> None:
    holder = node("a").attach()
    holder.say(status=control.NodeStatus(devices=[control.DeviceStatus(path="/ssd", state="serving")]))
    client.lookup(os.urandom(16))
    stub.SetTenant(control.TenantSet(policy=control.TenantPolicy(salt="t", dram_limit=1 << 20)))
    eventually(lambda: bool(master.status.made_now()["nodes"][0]["devices"]))
    real = {**json.loads(master.status.encoded())}
    made = documents.healthy()
    made["nodes"][0]["drain"] = None
    made["attention"] = real["attention"] = []
    assert _keys(real) == _keys(made)


def test_what_a_node_and_a_client_did(master: Master, node: Make, client: Any, eventually: Make) -> None:
    holder = node("a")
    holder.blocks = os.urandom(48)
    holder.attach()
    holder.say(status=control.NodeStatus(dram_bytes_used=300 << 20, bytes_out=1000, bytes_in=500))
    holder.change()
    master.sampler.turn()
    client.lookup(holder.blocks + os.urandom(16))
    holder.say(status=control.NodeStatus(dram_bytes_used=400 << 20, bytes_out=9000, bytes_in=700))
    holder.change()
    master.sampler.turn()
    master.sampler.check()
    document = master.status.made_now()
    (row,) = document["nodes"]
    assert (row["node_id"], row["state"], row["blocks"], row["gone"]) == ("a", "active", 3, False)
    assert row["dram"] == {"used": 400 << 20, "size": 1 << 30} and row["bytes_out_per_second"] > 0
    minute = document["lookups"]["minute"]
    assert (minute["lookups"], minute["asked"], minute["hits"]["dram"]) == (1, 4, 3)
    assert minute["misses"] == {"never_stored": 1} and minute["hit_rate"] == 0.75
    assert minute["asked"] == sum(minute["hits"].values()) + sum(minute["misses"].values())
    assert document["transfers"]["bytes_out_per_second"] > 0
    assert document["totals"]["dram"] == {"used": 400 << 20, "size": 1 << 30}
    assert document["totals"]["clients"] == 1 and document["verdict"] == "healthy"
    kinds = [event["kind"] for event in document["events"]]
    assert kinds == ["node.joining", "node.active"]
    holder.say(detach=control.Detach(reason="stopping"))
    eventually(lambda: master.status.made_now()["nodes"][0]["gone"])
    document = master.status.made_now()
    assert document["verdict"] == "healthy" and document["totals"]["nodes"] == 0
    assert document["events"][-1]["kind"] == "node.offline" and document["events"][-1]["severity"] == "notice"


def test_tenants_against_their_quotas(master: Master, stub: Any, node: Make) -> None:
    holder = node("a").attach()
    for salt, limit in (("full", 100), ("wide", 1000)):
        stub.SetTenant(control.TenantSet(policy=control.TenantPolicy(salt=salt, dram_limit=limit)))
    used = [
        control.TenantUsage(salt="full", dram_bytes=99, dram_wanted=7),
        control.TenantUsage(salt="wide", dram_bytes=500),
        control.TenantUsage(salt="user-4711", dram_bytes=600),
    ]
    holder.say(status=control.NodeStatus(tenants=used))
    holder.change()
    document = master.status.made_now()
    rows = {row["name"]: row for row in document["tenants"]}
    assert [row["name"] for row in document["tenants"]][:2] == ["full", next(n for n in rows if n.startswith("#"))]
    assert rows["full"]["state"] == "full" and rows["full"]["refused_bytes_last_minute"] == 7
    assert rows["full"]["dram"] == {"used": 99, "limit": 100, "floor": 0}
    assert rows["wide"]["state"] == "ok" and rows["wide"]["refused_bytes"] == 0
    assert "user-4711" not in json.dumps(document)
    assert any(row["kind"] == "tenant" and "full" in row["text"] for row in document["attention"])


def test_what_operators_order_is_told_and_by_whom(master: Master, stub: Any, node: Make, wires: Any) -> None:
    node("a").attach().change(add=os.urandom(16), salt="secret-user")
    token = CALLER.set(Rights("alice", Role.OPERATE))
    try:
        asked = control.TenantSet(policy=control.TenantPolicy(salt="t", dram_limit=3 << 30))
        Tenants(master.hub, Content(master.hub)).set(asked)
    finally:
        CALLER.reset(token)
    stub.SetTenant(control.TenantSet(policy=control.TenantPolicy(salt="t"), dry_run=True))
    stub.BumpEpoch(control.GroupName(group=wires.ns.group, deadline_ms=1))
    stub.DropBlocks(control.Scope(salt="secret-user", deadline_ms=1))
    stub.SetReplicas(control.Replicas(group="", count=2))
    stub.RemoveTenant(control.TenantRemove(salt="t"))
    stub.RemoveTenant(control.TenantRemove(salt="secret-user"))  # it has none
    told = [event["text"] for event in master.status.made_now()["events"] if not event["kind"].startswith("node")]
    assert told[0] == "tenant t: memory 3 GiB (was without limit), by alice"
    assert told[1].startswith(f"weight epoch 1 of {wires.ns.group} began") and told[2].startswith("dropped ")
    assert told[3:5] == ["all that has no number of its own: 2 replicas", "tenant t has no policy of its own any more"]
    assert told[5].startswith("tenant #") and len(told) == 6
    assert "secret-user" not in json.dumps(told)


def test_events_since(master: Master, node: Make) -> None:
    url = f"http://{master.endpoints.http}/events.json"
    first = httpx.get(url).json()
    assert (first["seq"], first["events"]) == (0, [])
    node("a").attach()
    second = httpx.get(url, params={"since": 0}).json()
    assert second["seq"] == len(second["events"]) == 2
    assert httpx.get(url, params={"since": 1}).json()["events"] == second["events"][1:]
    assert httpx.get(url, params={"since": 2}).json()["events"] == []
    assert len(httpx.get(url, params={"since": 99}).json()["events"]) == 2  # of another start of the master
    for bad in ("x", "-1", "1.5", "9" * 30, "٣"):
        refused = httpx.get(url, params={"since": bad})
        assert refused.status_code == 400 and "whole number" in refused.json()["error"]


def test_however_many_ask_it_is_made_once_a_second(master: Master) -> None:
    before = master.status.made
    url, answers, started = f"http://{master.endpoints.http}/status.json", [], time.monotonic()

    def ask() -> None:
        with httpx.Client() as http:
            answers.extend(http.get(url).status_code for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    took = time.monotonic() - started
    assert answers == [200] * 60
    assert master.status.made - before <= 1 + took / FRESH_S


def test_a_large_pool_costs_little(master: Master, closing: Make) -> None:
    """100 nodes with 200 tenants each: bounded rows, and far below the second that it is made in."""

    def fill(state: Any, now: float) -> None:
        for at in range(100):
            state.nodes.restore(m.SaveNode(f"n{at}", 1 << 30, 0, False, False))
            usage = {f"s{each}": m.TenantUsage(f"s{each}", each, 0) for each in range(200)}
            state.quotas.nodes[f"n{at}"] = Member(session=1, usage=usage)

    master.hub.read(fill)
    document = StatusDocument(master.hub, master.views, master.sampler)
    started = time.thread_time()
    made = document.made_now()
    cost_s = time.thread_time() - started
    assert len(made["nodes"]) == 100 and len(made["tenants"]) == 199
    assert made["verdict"] == "trouble" and len(made["attention"]) < 10
    assert cost_s < 0.5, cost_s


def test_pages_carry_headers_that_keep_strangers_out(master: Master) -> None:
    for path in PUBLIC:
        answer = httpx.get(f"http://{master.endpoints.http}{path}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    status = httpx.get(f"http://{master.endpoints.http}/status.json")
    assert status.headers["cache-control"] == "no-store" and status.headers["content-type"] == "application/json"
    assert httpx.post(f"http://{master.endpoints.http}/status.json").status_code == 405


def test_a_problem_is_an_event_when_it_begins_and_when_it_is_over(master: Master) -> None:
    problems = ["the disk is full: 3 rows wait"]
    master.views.troubles.append(lambda: problems)
    master.sampler.turn()
    problems[0] = "the disk is full: 9 rows wait"
    master.sampler.turn()
    assert master.status.made_now()["verdict"] == "trouble"
    problems.clear()
    master.sampler.turn()
    told = [(event.kind, event.text) for event in master.hub.events.since(0)]
    assert told == [
        ("problem", "the disk is full: 3 rows wait"),
        ("problem.over", "over: the disk is full: 9 rows wait"),
    ]


def test_health_of_the_master_knows_the_loops(master: Master, closing: Make) -> None:
    stub = control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))
    assert {"status", "masters"} <= set(stub.Health(pb.Empty()).loop_age_seconds)
