"""gRPC between nodes and masters, and between operators and masters, under messages that decode and mean nothing."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory

from kvstrata.client.admin import AdminClient
from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc, wire
from kvstrata.proto.errors import KVError
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.masters.outbox import Outbox
from kvstrata.storage.node import StorageNode
from tests.e2e.real_pool import keys
from tests.fuzz.messages import Maker
from tests.waiting import until

ANY = "127.0.0.1:0"
LIKELY: dict[str, list[Any]] = {
    "group": ["model"], "block_bytes": [4096], "block_tokens": [16], "hash_bytes": [16], "shard": [0],
    "shard_count": [1], "hashes": [keys(1, "f"), keys(3, "f"), b""], "salt": ["", "t"], "tier": [0, 1],
    "spec": [], "holdings": [],
    "seq": list(range(30)), "cut_seq": list(range(30)), "command": list(range(10)), "node_id": ["node-a", ""],
    "deadline_ms": [1, 20], "wait_ms": [1, 20], "timeout_ms": [1, 20], "leader_epoch": [0, 1], "epoch": [0, 1],
}  # fmt: skip
CALLS = [
    name for name, method in control.DESCRIPTOR.services_by_name["Master"].methods_by_name.items() if name != "Sync"
]
CI = pytest.param(600, id="ci")
LONG = pytest.param(20_000, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)])


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    one = Master(MasterConfig(ANY, ANY, ANY, str(tmp_path / "state.db")))
    yield one
    one.stop()


def checked(master: Master) -> None:
    with master.hub._lock:
        master.hub._state.check()
    failed = [loop.name for loop in master.loops._loops if loop.failures]
    assert not failed, failed
    with AdminClient(str(master.ready()["channel"])) as admin:
        assert admin.health() is not None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
def test_what_nodes_say(master: Master, seed: int, count: int) -> None:
    """A stream ends with a reason or goes on; the next one is served, and the state holds together."""
    chance = random.Random(seed)
    make = Maker(chance, LIKELY)
    bodies = [field.name for field in control.NodeMessage.DESCRIPTOR.fields if field.name != "attach"]
    channel = grpc.insecure_channel(str(master.ready()["grpc"]))
    stub = control_pb2_grpc.MasterStub(channel)
    said = 0
    while said < count:
        # The first of a stream is an attach that makes sense, most times.
        messages = [_attach(chance) if chance.random() < 0.9 else make.message(control.NodeMessage)]
        for _ in range(chance.randrange(1, 12)):
            message = control.NodeMessage()
            body = chance.choice(bodies)
            getattr(message, body).SetInParent()
            make.fill(getattr(message, body))
            messages.append(message)
            if chance.random() < 0.2:
                messages.append(message)  # twice
        said += len(messages)
        ended = threading.Event()
        stream = stub.Sync(_then(messages, ended))
        code = _read(stream, ended)
        assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), "an error that nobody expected"
    channel.close()
    checked(master)


def _attach(chance: random.Random) -> control.NodeMessage:
    return control.NodeMessage(
        attach=control.Attach(
            node_id=chance.choice(("node-a", "node-b")), incarnation=chance.choice((1, 2, 1 << 33)),
            channel="127.0.0.1:9", boot_id="boot", dram_bytes=1 << 30, protocol=wire.PROTOCOL,
        )
    )  # fmt: skip


def _then(messages: list[control.NodeMessage], ended: threading.Event) -> Iterator[control.NodeMessage]:
    """All of them, then nothing until the master has hung up or enough has been heard."""
    yield from messages
    ended.wait(0.05)


def _read(stream: Any, ended: threading.Event) -> grpc.StatusCode | None:
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return]
    finally:
        ended.set()
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
def test_what_operators_ask(master: Master, seed: int, count: int) -> None:
    chance = random.Random(seed)
    make = Maker(chance, LIKELY)
    channel = grpc.insecure_channel(str(master.ready()["grpc"]))
    stub = control_pb2_grpc.MasterStub(channel)
    methods = control.DESCRIPTOR.services_by_name["Master"].methods_by_name
    for _ in range(count):
        name = chance.choice(CALLS)
        request = make.message(message_factory.GetMessageClass(methods[name].input_type))
        try:
            getattr(stub, name)(request, timeout=10)
        except grpc.RpcError as error:
            told = f"{name}({request}): {error.code()} {error.details()}"
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), told
            assert error.details(), told
    channel.close()
    checked(master)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [CI, LONG])
def test_what_masters_say(tmp_path: Path, seed: int, count: int) -> None:
    """A node that is told nonsense by its master does none of it, says what is wrong, and goes on."""
    chance = random.Random(seed)
    make = Maker(chance, LIKELY)
    bodies = [field.name for field in control.MasterMessage.DESCRIPTOR.fields if field.containing_oneof is not None]
    node = StorageNode(StorageConfig(("127.0.0.1:1",), ANY, ANY, tmp_path / "node", 8 << 20, slab_bytes=1 << 20))
    try:
        node.start()
        link = node.links[0]
        outbox = Outbox(node.state, node.lock, control.Attach(), lambda told: control.NodeStatus())
        for _ in range(count):
            message = control.MasterMessage(leader_epoch=chance.choice((0, 1, 1, 2)), leader_id="m")
            body = chance.choice(bodies)
            getattr(message, body).SetInParent()
            make.fill(getattr(message, body))
            with contextlib.suppress(KVError):  # then the link is made anew
                link._heard(message, outbox)
        with node.lock:
            node.state.check()
        until(lambda: all(not loop.failures for loop in node.loops._loops))
    finally:
        node.stop()
