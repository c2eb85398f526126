"""A master in this process or in its own, and the other ends of its wires: fake nodes, channel clients."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto import control_pb2_grpc, wire
from kvstrata.proto.keys import Namespace
from kvstrata.proto.wire import Kind
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity

NS = Namespace("model", block_bytes=1 << 20, block_tokens=16)
ANSWER_S = 10.0


class FakeNode:
    """The node's end of a sync stream, over real gRPC. ``blocks`` is what it tells in a snapshot."""

    def __init__(self, grpc_address: str, node_id: str, incarnation: int = 1) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.blocks = b""
        self.seq = 0
        self.removed: list[bytes] = []
        self.obeys = True
        self._channel = grpc.insecure_channel(grpc_address)
        self._sent: queue.SimpleQueue[control.NodeMessage | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[control.MasterMessage | grpc.RpcError] = queue.SimpleQueue()

    def attach(self) -> FakeNode:
        self.begin()
        assert self.hear("attached").attached.session
        self.snapshot()
        return self

    def begin(self) -> None:
        """Open the stream and send the attach; hear nothing yet."""
        stream = control_pb2_grpc.MasterStub(self._channel).Sync(iter(self._sent.get, None))
        attach = control.Attach(
            node_id=self.node_id,
            incarnation=self.incarnation,
            channel="127.0.0.1:9",
            unix_path=f"/run/{self.node_id}.sock",
            boot_id="boot",
            dram_bytes=1 << 30,
            protocol=wire.PROTOCOL,
        )
        self.say(attach=attach)
        threading.Thread(target=self._listen, args=(stream,), daemon=True).start()

    def _listen(self, stream: Any) -> None:
        try:
            for message in stream:
                if message.WhichOneof("body") == "remove" and self.obeys:
                    self.removed.append(message.remove.hashes)
                    self.say(done=control.CommandDone(command=message.remove.command))
                self._heard.put(message)
        except grpc.RpcError as error:
            self._heard.put(error)

    def say(self, **body: Any) -> None:
        self._sent.put(control.NodeMessage(**body))

    def hear(self, body: str) -> control.MasterMessage:
        """Wait for a message with this body, passing over others."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            heard = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(heard, grpc.RpcError):
                raise heard
            if heard.WhichOneof("body") == body:
                return heard

    def ended(self) -> grpc.RpcError:
        """Wait for the master to end the stream; returns its error."""
        while True:
            heard = self._heard.get(timeout=ANSWER_S)
            if isinstance(heard, grpc.RpcError):
                return heard

    def snapshot(self) -> None:
        holding = control.Holding(spec=NS.to_spec(), salt="", tier=0, hashes=self.blocks)
        self.say(snapshot=control.Snapshot(cut_seq=self.seq, holdings=[holding], first=True, last=True))
        assert self.hear("ack").ack.seq == self.seq

    def change(self, *, add: bytes = b"", remove: bytes = b"", salt: str = "", ns: Namespace = NS) -> None:
        """One delta; returns when it is acknowledged."""
        self.seq += 1
        changes = [
            control.Change(added=added, spec=ns.to_spec(), salt=salt, tier=0, hashes=packed)
            for added, packed in ((True, add), (False, remove))
            if packed
        ]
        self.say(delta=control.Delta(seq=self.seq, changes=changes))
        assert self.hear("ack").ack.seq == self.seq

    def close(self) -> None:
        self._sent.put(None)
        self._channel.close()


class ChannelClient:
    """One connection to the master's channel, with decoded answers."""

    def __init__(self, address: str, role: str = "client") -> None:
        self.connection = Connection.open(address, Identity.new(role), silence_s=ANSWER_S, connect_s=ANSWER_S)
        self.handle = 0

    def ask(self, kind: int, request: Any, reply: Any, reply_kind: int) -> Any:
        frame = self.connection.call(kind, request.SerializeToString(), time.monotonic() + ANSWER_S)
        return expect(reply, frame, reply_kind)

    def open(self, ns: Namespace = NS) -> int:
        answer = self.ask(
            Kind.OPEN_NAMESPACE, pb.OpenNamespace(spec=ns.to_spec()), pb.NamespaceHandle, Kind.NAMESPACE_HANDLE
        )
        self.handle = answer.handle
        return self.handle

    def lookup(self, hashes: bytes, salt: str = "") -> pb.LookupOk:
        request = pb.Lookup(ns=self.handle or self.open(), salt=salt, hashes=hashes)
        return self.ask(Kind.LOOKUP, request, pb.LookupOk, Kind.LOOKUP_OK)

    def place(self, hashes: bytes, salt: str = "") -> pb.PlaceOk:
        request = pb.Place(ns=self.handle or self.open(), salt=salt, hashes=hashes)
        return self.ask(Kind.PLACE, request, pb.PlaceOk, Kind.PLACE_OK)

    def close(self) -> None:
        self.connection.close()


def codes_of(answer: pb.LookupOk | pb.PlaceOk) -> list[int]:
    """Location codes a block, undone from their runs."""
    lengths = np.frombuffer(answer.run_length, dtype="<u4")
    return np.repeat(np.frombuffer(answer.run_code, dtype="<u2"), lengths).tolist()


class MasterProcess:
    """A master in a process of its own, ready when constructed."""

    _SCRIPT = (
        "import json, sys\n"
        "from kvstrata.master.daemon import MasterConfig, run\n"
        "listen, grpc, http, state = sys.argv[1:]\n"
        "config = MasterConfig(listen, grpc, http, state or None)\n"
        "sys.exit(run(config, lambda ready: print(json.dumps(ready), flush=True)))\n"
    )

    def __init__(self, state: Path | str = "", listen: str = "127.0.0.1:0", grpc_address: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-c", self._SCRIPT, listen, grpc_address, "127.0.0.1:0", str(state)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(ANSWER_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(ANSWER_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def master() -> Iterator[Master]:
    with Master(MasterConfig("127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", None, seed=1)) as running:
        yield running


@pytest.fixture
def node(master: Master, closing: Callable[[Any], Any]) -> Callable[..., FakeNode]:
    """Makes fake nodes of ``master`` that are closed at the end."""
    return lambda node_id, incarnation=1: closing(FakeNode(master.endpoints.grpc, node_id, incarnation))


@pytest.fixture
def client(master: Master, closing: Callable[[Any], Any]) -> ChannelClient:
    connected: ChannelClient = closing(ChannelClient(master.endpoints.channel))
    return connected


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Registers something to be closed at the end, last first."""
    things: list[Any] = []

    def register(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield register
    for thing in reversed(things):
        thing.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits, bounded, until a condition holds."""

    def wait(condition: Callable[[], bool], within_s: float = ANSWER_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def wires() -> Any:
    """The classes and helpers above, for tests that start their own processes."""

    class Wires:
        node = FakeNode
        client = ChannelClient
        process = MasterProcess
        codes = staticmethod(codes_of)
        ns = NS

    return Wires
