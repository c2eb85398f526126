"""The master's framed channel over real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstrata.master.daemon import Master
from kvstrata.master.replies import STANDS_MS
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument, ProtocolError, Unavailable
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState
from kvstrata.proto.wire import Kind

Make = Callable[..., Any]


def test_hello_names_the_cluster_and_the_other_endpoints(master: Master, client: Any) -> None:
    hello = client.connection.hello
    assert (hello.role, hello.cluster_id) == ("master", master.hub.cluster_id)
    assert (hello.channel, hello.grpc, hello.http) == (
        master.endpoints.channel,
        master.endpoints.grpc,
        master.endpoints.http,
    )


def test_lookup_finds_the_longest_prefix_and_names_nodes(node: Make, client: Any, wires: Any) -> None:
    blocks = os.urandom(16 * 10)
    node("b").attach()
    holder = node("a")
    holder.blocks = blocks[: 16 * 6] + blocks[16 * 7 :]
    holder.attach()
    answer = client.lookup(blocks)
    assert (answer.hit_blocks, answer.shard_hit_blocks, answer.not_yet) == (6, 6, False)
    assert wires.codes(answer) == [1] * 6 + [0] + [1] * 3
    assert [(ref.node_id, ref.incarnation, ref.unix_path) for ref in answer.nodes] == [("a", 1, "/run/a.sock")]
    assert client.lookup(blocks, salt="another").hit_blocks == 0
    assert client.lookup(b"").hit_blocks == 0


def test_a_block_counts_only_with_all_its_shards(node: Make, client: Any) -> None:
    shards = [Namespace("tp2", 4096, 16, shard=shard, shard_count=2) for shard in range(2)]
    blocks = os.urandom(16 * 4)
    holder = node("a").attach()
    holder.change(add=blocks, ns=shards[0])
    holder.change(add=blocks[:32] + blocks[48:], ns=shards[1])
    client.open(shards[0])
    answer = client.lookup(blocks)
    assert (answer.hit_blocks, answer.shard_hit_blocks) == (2, 4)
    present = np.unpackbits(np.frombuffer(answer.present, np.uint8), count=4, bitorder="little")
    assert present.tolist() == [1, 1, 0, 1]


def test_place_says_present_new_in_flight(node: Make, client: Any, wires: Any, master: Master, closing: Make) -> None:
    assert client.place(os.urandom(16)).run_state == bytes([PlaceState.NOWHERE])
    holder = node("a")
    holder.blocks = os.urandom(16 * 2)
    holder.attach()
    fresh = os.urandom(16 * 3)
    other = closing(wires.client(master.endpoints.channel))
    first, second, again = client.place(holder.blocks + fresh), other.place(fresh), client.place(fresh)
    assert wires.codes(first) == [1] * 5
    assert first.run_state == bytes([PlaceState.PRESENT, PlaceState.NEW])
    assert np.frombuffer(first.run_length, "<u4").tolist() == [2, 3]
    assert second.run_state == bytes([PlaceState.IN_FLIGHT])
    assert again.run_state == bytes([PlaceState.NEW]), "its first answer may have been lost"


def test_where_there_is_one_node_an_answer_stands_until_there_may_be_another(
    node: Make, client: Any, closing: Make, master: Master
) -> None:
    assert client.place(os.urandom(16)).stands_ms == 0, "nobody takes anything"
    first = node("a").attach()
    answer = client.place(os.urandom(32))
    assert (answer.stands_ms, [ref.node_id for ref in answer.nodes]) == (STANDS_MS, ["a"])
    asked = client.place(b"")
    assert (asked.stands_ms, [ref.node_id for ref in asked.nodes]) == (STANDS_MS, ["a"]), "nothing but whether it does"
    node("b").attach()
    assert client.place(os.urandom(16)).stands_ms == client.place(b"").stands_ms == 0
    first.close()
    named = pb.Place(ns=client.handle, hashes=os.urandom(16), avoid=["a"], avoid_incarnation=[1])
    answer = client.ask(Kind.PLACE, named, pb.PlaceOk, Kind.PLACE_OK)
    assert (answer.stands_ms, [ref.node_id for ref in answer.nodes]) == (0, ["b"]), "one that is away may come back"


def test_what_went_to_the_one_node_unasked_is_counted_and_nobody_waits_for_it(
    node: Make, client: Any, wires: Any, master: Master, closing: Make
) -> None:
    node("a").attach()
    went = os.urandom(16 * 3)
    told = pb.Place(ns=client.open(), hashes=b"", unasked=went)
    client.ask(Kind.PLACE, told, pb.PlaceOk, Kind.PLACE_OK)
    value = master.hub.metrics.registry.get_sample_value
    assert value("kvstrata_master_blocks_placed_total", {"state": "unasked"}) == 3
    other = closing(wires.client(master.endpoints.channel))
    assert other.place(went).run_state == bytes([PlaceState.NEW]), "it was told of, and not asked for"
    with pytest.raises(InvalidArgument, match="not a multiple"):
        client.ask(Kind.PLACE, pb.Place(ns=client.handle, unasked=bytes(7)), pb.PlaceOk, Kind.PLACE_OK)


def test_miss_report_hides_for_lookup_and_place(node: Make, client: Any, eventually: Make) -> None:
    holder = node("a")
    holder.blocks = os.urandom(32)
    holder.attach()
    report = pb.MissReport(
        ns=client.open(), salt="", hashes=holder.blocks[:16], node_id="a", incarnation=1, delta_seq=1
    )
    client.connection.tell(Kind.MISS_REPORT, report.SerializeToString())
    eventually(lambda: client.lookup(holder.blocks).hit_blocks == 0)
    assert client.place(holder.blocks).run_state == bytes([PlaceState.NEW, PlaceState.PRESENT])
    holder.change(add=os.urandom(16))
    assert client.lookup(holder.blocks).hit_blocks == 2


def test_a_miss_report_that_makes_no_sense_answers_no_other_request(client: Any) -> None:
    newer = pb.MissReport(ns=client.open(), hashes=bytes(16), status=250)
    for report in (pb.MissReport(ns=99), pb.MissReport(ns=client.open(), hashes=bytes(3)), newer):
        client.connection.tell(Kind.MISS_REPORT, report.SerializeToString())
        assert client.lookup(bytes(16)).hit_blocks == 0


def test_remove_reaches_nodes_and_names_those_that_do_not_confirm(node: Make, client: Any) -> None:
    good, bad = node("good"), node("bad")
    good.blocks = bad.blocks = os.urandom(16 * 3)
    good.attach()
    bad.attach()
    request = pb.Remove(ns=client.open(), salt="", hashes=good.blocks[:32], deadline_ms=5000)
    answer = client.ask(Kind.REMOVE, request, pb.RemoveOk, Kind.REMOVE_OK)
    assert (answer.removed, list(answer.unreached)) == (2, [])
    assert good.removed == bad.removed == [good.blocks[:32]]
    assert client.lookup(good.blocks).hit_blocks == 0
    bad.obeys = False
    request = pb.Remove(ns=client.handle, salt="", hashes=good.blocks[32:], deadline_ms=100)
    answer = client.ask(Kind.REMOVE, request, pb.RemoveOk, Kind.REMOVE_OK)
    assert (answer.removed, list(answer.unreached)) == (1, ["bad"])


def test_heartbeats_are_known_and_a_dying_one_takes_the_node_out(
    node: Make, client: Any, wires: Any, master: Master, closing: Make
) -> None:
    holder = node("a")
    holder.blocks = os.urandom(16)
    holder.attach()
    sidecar = closing(wires.client(master.endpoints.channel, role="heartbeat"))

    def beat(**fields: Any) -> bool:
        request = pb.Heartbeat(node_id="a", **fields)
        return bool(sidecar.ask(Kind.HEARTBEAT, request, pb.HeartbeatOk, Kind.HEARTBEAT_OK).known)

    assert beat(incarnation=1) and not beat(incarnation=2)
    assert client.lookup(holder.blocks).hit_blocks == 1
    assert not beat(incarnation=1, dying=True)
    assert client.lookup(holder.blocks).hit_blocks == 0
    assert "its process died" in holder.ended().details()


def test_ping(client: Any) -> None:
    assert client.connection.call(Kind.PING, b"", time.monotonic() + 5).kind == Kind.PONG


@pytest.mark.parametrize(
    "kind, request_, error, text",
    [
        (Kind.LOOKUP, pb.Lookup(ns=77, hashes=bytes(16)), FingerprintMismatch, "handle 77"),
        (Kind.LOOKUP, pb.Lookup(ns=1, hashes=bytes(17)), InvalidArgument, "not a multiple"),
        (Kind.LOOKUP, pb.Lookup(ns=1, hashes=bytes(16 * 65537)), InvalidArgument, "65537 hashes"),
        (Kind.LOOKUP, pb.Lookup(ns=1, salt="x" * 129), InvalidArgument, "129 characters"),
        (Kind.PLACE, pb.Place(ns=1, hashes=bytes(8)), InvalidArgument, "not a multiple"),
        (Kind.REMOVE, pb.Remove(ns=1, hashes=bytes(8)), InvalidArgument, "not a multiple"),
        (Kind.OPEN_NAMESPACE, pb.OpenNamespace(), InvalidArgument, "group"),
    ],
)
def test_bad_requests_are_refused_and_the_connection_lives(
    client: Any, kind: int, request_: Any, error: type[Exception], text: str
) -> None:
    assert client.open() == 1
    with pytest.raises(error, match=text):
        client.connection.call(kind, request_.SerializeToString(), time.monotonic() + 5)
    assert client.lookup(bytes(16)).hit_blocks == 0


def test_one_layout_a_group(client: Any, wires: Any) -> None:
    client.open()
    other = Namespace(wires.ns.group, block_bytes=4096, block_tokens=16)
    with pytest.raises(FingerprintMismatch, match="another layout"):
        client.open(other)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        os.urandom(4096),
        wire.HEADER.pack(b"KV", 1, Kind.LOOKUP, 1, 0xFFFFFFFF, 0),
        wire.HEADER.pack(b"KV", 1, Kind.HELLO, 1, 4, 0) + b"\xff\xff\xff\xff",
        wire.HEADER.pack(b"KV", 1, Kind.LOOKUP, 1, 0, 1 << 35),
    ],
)
def test_garbage_ends_its_connection_only(master: Master, client: Any, garbage: bytes) -> None:
    host, port = master.endpoints.channel.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as hostile:
        hostile.sendall(garbage)
        while hostile.recv(4096):
            pass
    assert client.lookup(bytes(16)).hit_blocks == 0


def test_a_lookup_that_does_not_decode_is_refused(client: Any) -> None:
    with pytest.raises((ProtocolError, Unavailable)):
        client.connection.call(Kind.LOOKUP, b"\xff\xff\xff\xff", time.monotonic() + 5)


def test_a_wildcard_host_is_advertised_as_the_one_the_client_came_by(wires: Any, closing: Make) -> None:
    process = closing(wires.process(listen="0.0.0.0:0", grpc_address="0.0.0.0:0"))
    port = process.ready["channel"].rpartition(":")[2]
    hello = closing(wires.client(f"127.0.0.1:{port}")).connection.hello
    assert hello.channel == f"127.0.0.1:{port}"
    assert hello.grpc == f"127.0.0.1:{process.ready['grpc'].rpartition(':')[2]}"
