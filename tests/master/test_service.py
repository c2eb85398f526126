"""gRPC and HTTP over real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest

from kvstrata.master.daemon import Master
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState
from kvstrata.proto.wire import Kind
from kvstrata.transfer.frames import FrameStream
from kvstrata.transfer.identity import Identity, parse_address

Make = Callable[..., Any]


@pytest.fixture
def stub(master: Master, closing: Make) -> Any:
    return control_pb2_grpc.MasterStub(closing(grpc.insecure_channel(master.endpoints.grpc)))


def test_named_calls(stub: Any, node: Make, wires: Any) -> None:
    holder = node("a")
    holder.blocks = os.urandom(48)
    holder.attach()
    spec = wires.ns.to_spec()
    assert stub.LookupBlocks(control.NamedLookup(spec=spec, hashes=holder.blocks)).hit_blocks == 3
    placed = stub.PlaceBlocks(control.NamedPlace(spec=spec, hashes=holder.blocks + bytes(16)))
    assert placed.run_state == bytes([PlaceState.PRESENT, PlaceState.NEW])
    removed = stub.RemoveBlocks(control.NamedRemove(spec=spec, hashes=holder.blocks[:16], deadline_ms=5000))
    assert (removed.removed, list(removed.unreached)) == (1, [])
    assert stub.LookupBlocks(control.NamedLookup(spec=spec, hashes=holder.blocks)).hit_blocks == 0


def test_what_is_refused_for_its_version_is_counted_by_name(stub: Any, master: Master) -> None:
    past = control.Attach(node_id="a", incarnation=1, channel="h:1", protocol=0, software="kvstrata 0.0.1")
    with pytest.raises(grpc.RpcError, match="upgrade the node"):
        next(stub.Sync(iter([control.NodeMessage(attach=past)])))
    future = Identity.new().hello()
    future.protocol, future.protocol_min, future.software = 9, 9, "kvstrata 9"
    stream = FrameStream(socket.create_connection(parse_address(master.endpoints.channel)[1]), 5.0)
    stream.send(Kind.HELLO, 1, future.SerializeToString())
    frame = stream.receive(time.monotonic() + 5)
    assert (frame.kind, pb.Failure.FromString(frame.message).code) == (Kind.FAILURE, "VersionMismatch")
    stream.close()
    counted = {"kvstrata 0.0.1": 1, "kvstrata 9": 1}
    assert dict(stub.Health(pb.Empty()).refused_versions) == counted
    http = f"http://{master.endpoints.http}"
    assert httpx.get(f"{http}/healthz").json()["refused_versions"] == counted
    assert 'kvstrata_master_refused_versions_total{software="kvstrata 9"} 1.0' in httpx.get(f"{http}/metrics").text


def test_listings(stub: Any, node: Make, client: Any, wires: Any, master: Master, closing: Make) -> None:
    holder = node("a")
    holder.blocks = os.urandom(32)
    holder.attach()
    holder.change(add=os.urandom(16), salt="tenant")
    traffic = {"bytes_out": 7, "bytes_in": 8, "bytes_copied": 9, "leader_epoch": 1, "leader_id": "m"}
    said = control.NodeStatus(dram_bytes_used=5, dram_bytes_free=6, loop_age_seconds={"x": 0.5}, **traffic)
    holder.say(status=said)
    closing(wires.client(master.endpoints.channel, role="heartbeat"))
    client.lookup(os.urandom(16))
    holder.change()  # the status before it has been taken in
    (row,) = stub.ListNodes(pb.Empty()).nodes
    assert (row.node_id, row.state, row.blocks, row.synced, row.applied_seq) == ("a", "active", 3, True, 2)
    assert row.status == said
    (namespace,) = stub.ListNamespaces(pb.Empty()).namespaces
    assert (namespace.spec, namespace.blocks, namespace.salts) == (wires.ns.to_spec(), 3, 2)
    (connected,) = stub.ListClients(pb.Empty()).clients
    assert connected.pid == os.getpid() and connected.lookups == 2
    report = stub.Health(pb.Empty())
    assert report.healthy and report.ready and not report.problems
    assert (report.blocks, report.nodes_active, report.nodes_total, report.clients) == (3, 1, 1, 1)
    assert "tick" in report.loop_age_seconds


@pytest.mark.parametrize(("leads", "ready"), [((True, ""), True), ((False, "b:7400"), True), ((False, ""), False)])
def test_a_master_is_ready_where_somebody_leads(
    master: Master, monkeypatch: pytest.MonkeyPatch, leads: tuple[bool, str], ready: bool
) -> None:
    monkeypatch.setattr(master.hub, "leads", lambda: leads)
    answer = httpx.get(f"http://{master.endpoints.http}/readyz")
    assert (answer.status_code == 200, answer.json()["ready"]) == (ready, ready)


@pytest.mark.parametrize(
    "request_, code",
    [
        (control.NamedLookup(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            control.NamedLookup(spec=Namespace("model", 1 << 20, 16).to_spec(), hashes=b"x"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (control.NamedLookup(spec=Namespace("model", 7, 16).to_spec()), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_bad_requests_get_a_code_and_a_text(stub: Any, client: Any, request_: Any, code: grpc.StatusCode) -> None:
    client.open()
    with pytest.raises(grpc.RpcError) as refused:
        stub.LookupBlocks(request_)
    assert refused.value.code() is code and refused.value.details()


def test_a_stream_must_begin_with_an_attach_that_makes_sense(stub: Any) -> None:
    for first in (
        control.NodeMessage(detach=control.Detach()),
        control.NodeMessage(attach=control.Attach(node_id="a")),
        control.NodeMessage(attach=control.Attach(node_id="a", incarnation=1, channel="h:1", protocol=0)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Sync(iter([first])))
        assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert not stub.ListNodes(pb.Empty()).nodes


def test_nonsense_on_a_stream_ends_it_and_forgets_nothing_else(stub: Any, node: Make, client: Any) -> None:
    good, bad = node("good"), node("bad")
    good.blocks = os.urandom(16)
    good.attach()
    bad.attach()
    bad.say(
        delta=control.Delta(seq=1, changes=[control.Change(added=True, spec=Namespace("g", 1, 1).to_spec(), tier=9)])
    )
    error = bad.ended()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "tier 9" in error.details()
    assert client.lookup(good.blocks).hit_blocks == 1


def test_a_second_stream_of_a_node_ends_the_first(node: Make) -> None:
    first = node("a").attach()
    second = node("a").attach()
    assert "attached again" in first.ended().details()
    second.change(add=os.urandom(16))


def test_a_gap_is_answered_with_a_resync(node: Make, client: Any) -> None:
    holder = node("a").attach()
    blocks = os.urandom(16)
    holder.say(delta=control.Delta(seq=5))
    assert "delta 5 came after delta 0" in holder.hear("resync").resync.reason
    holder.seq, holder.blocks = 5, blocks
    holder.snapshot()
    assert client.lookup(blocks).hit_blocks == 1


def test_long_snapshots_arrive_whole(node: Make, client: Any, stub: Any) -> None:
    holder = node("a")
    holder.blocks = os.urandom(16 * 70_000)
    holder.attach()
    assert client.lookup(holder.blocks[: 16 * 65536]).hit_blocks == 65536
    assert stub.Health(pb.Empty()).blocks == 70_000


def test_blocks_asked_are_hits_and_misses_by_reason(master: Master, node: Make, client: Any) -> None:
    shards = [Namespace("tp2", 4096, 16, shard=shard, shard_count=2) for shard in range(2)]
    blocks = os.urandom(16 * 5)
    holder = node("a").attach()
    holder.change(add=blocks[: 16 * 4], ns=shards[0])
    holder.change(add=blocks[: 16 * 3], ns=shards[1])
    client.open(shards[0])
    client.lookup(blocks)
    value = master.hub.metrics.registry.get_sample_value
    assert value("kvstrata_master_blocks_asked_total") == 5
    assert value("kvstrata_master_block_hits_total", {"tier": "dram"}) == 3
    assert value("kvstrata_master_block_misses_total", {"reason": "shard_missing"}) == 1
    assert value("kvstrata_master_block_misses_total", {"reason": "never_stored"}) == 1


def test_http(master: Master, node: Make, client: Any) -> None:
    holder = node("a")
    holder.blocks = os.urandom(16 * 3)
    holder.attach()
    client.lookup(holder.blocks + os.urandom(16 * 2))
    client.place(os.urandom(16))
    base = f"http://{master.endpoints.http}"
    metrics = httpx.get(f"{base}/metrics").text
    for line in (
        "kvstrata_master_lookups_total 1.0",
        "kvstrata_master_blocks_asked_total 5.0",
        'kvstrata_master_block_hits_total{tier="dram"} 3.0',
        'kvstrata_master_block_misses_total{reason="never_stored"} 2.0',
        'kvstrata_master_blocks_placed_total{state="new"} 1.0',
        'kvstrata_master_orphans_total{what="told"} 0.0',
        "kvstrata_master_ghosts 0.0",
        'kvstrata_master_nodes{state="active"} 1.0',
        "kvstrata_master_blocks 3.0",
    ):
        assert line in metrics.splitlines(), line
    health = httpx.get(f"{base}/healthz")
    assert health.status_code == 200 and health.json()["healthy"] is True and health.json()["blocks"] == 3
    assert httpx.get(f"{base}/readyz").status_code == 200
    assert httpx.get(f"{base}/nothing").status_code == 404


@pytest.mark.parametrize("port_of", ["grpc", "http"])
def test_garbage_on_the_other_ports_harms_no_one(master: Master, client: Any, stub: Any, port_of: str) -> None:
    host, port = getattr(master.endpoints, port_of).split(":")
    for garbage in (os.urandom(4096), b"KV" + bytes(100), b"GET /" + b"x" * (1 << 17)):
        with socket.create_connection((host, int(port)), timeout=5) as hostile:
            try:
                hostile.sendall(garbage)
                hostile.shutdown(socket.SHUT_WR)
                while hostile.recv(4096):
                    pass
            except OSError:
                pass  # reset: as good an answer as any
    assert stub.Health(pb.Empty()).healthy
    assert httpx.get(f"http://{master.endpoints.http}/healthz").status_code == 200
    assert client.lookup(bytes(16)).hit_blocks == 0


def test_an_oversized_message_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.LookupBlocks(control.NamedLookup(hashes=bytes(20 << 20)))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stub.Health(pb.Empty()).healthy
