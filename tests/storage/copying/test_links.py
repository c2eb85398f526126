"""Orders of copies and drains as they come over a link, answers as they go back, and how a node says goodbye."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import BlockStatus, Departure
from kvstrata.storage.masters import outbox
from kvstrata.storage.masters.outbox import Outbox
from kvstrata.transfer.base import Endpoint, Push
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.regions import Region
from kvstrata.transfer.tcp import TcpTransport
from tests.storage.conftest import Node, key, keys, payload
from tests.storage.copying.nodes import BLOCK_BYTES, NAMESPACE, CopyNode
from tests.storage.test_attach import FakeMaster
from tests.waiting import until

DAEMON = """
import json, sys
from pathlib import Path
from kvstrata.storage.daemon import StorageConfig, run
config = StorageConfig((sys.argv[2],), "127.0.0.1:0", "127.0.0.1:0", Path(sys.argv[1]), 16 << 20,
                       drain_on_stop_s=float(sys.argv[3]))
raise SystemExit(run(config, lambda line: print(json.dumps(line), flush=True)))
"""


class Leader(FakeMaster):
    """Keeps what it hears of copies and drains, in the order in which it hears it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, Any]] = []

    def _take(self, message: control.NodeMessage, say: Any) -> None:
        body = message.WhichOneof("body")
        if body in ("copied", "offer", "leaving", "detach", "delta"):
            self.heard.append((body, getattr(message, body)))
        super()._take(message, say)

    def of(self, body: str) -> list[Any]:
        return [message for name, message in self.heard if name == body]


@pytest.fixture
def leader() -> Iterator[Leader]:
    one = Leader()
    yield one
    one.stop()


def linked(path: Path, leader: Leader) -> CopyNode:
    node = CopyNode(path, masters=(leader.address,))
    until(lambda: leader.snapshots == 1)
    return node


def test_orders_come_and_answers_go_by_the_link(tmp_path: Path, leader: Leader) -> None:
    source, target = CopyNode(tmp_path / "source"), linked(tmp_path / "target", leader)
    try:
        source.store(range(6))
        command = source.ref
        command.command, command.reason, command.deadline_ms = 5, 1, 10_000
        command.spec.CopyFrom(NAMESPACE.to_spec())
        command.hashes = keys(range(8))
        leader.to_say.put(control.MasterMessage(copy=command, leader_epoch=3, leader_id="m"))
        until(lambda: bool(leader.of("copied")))
        done = leader.of("copied")[0]
        assert list(done.status) == [BlockStatus.STORED] * 6 + [BlockStatus.MISSING] * 2
        assert (done.command, done.bytes) == (5, 6 * BLOCK_BYTES)
        before = [name for name, _ in leader.heard[: leader.heard.index(("copied", done))]]
        assert "delta" in before, "the directory knows what has come before it is told"
        assert leader.blocks == {("", key(n)) for n in range(6)}
        surplus = control.Surplus(spec=NAMESPACE.to_spec(), hashes=keys(range(2)))
        leader.to_say.put(control.MasterMessage(surplus=surplus, leader_epoch=3, leader_id="m"))
        until(lambda: leader.blocks == {("", key(n)) for n in range(2, 6)})
        gone = [change for delta in leader.of("delta") for change in delta.changes if not change.added]
        assert {change.reason for change in gone} == {Departure.SURPLUS}
        drain = control.DrainCommand(command=6)
        leader.to_say.put(control.MasterMessage(drain=drain, leader_epoch=3, leader_id="m"))
        until(lambda: any(offer.last for offer in leader.of("offer")))
        assert leader.status.bytes_copied in (0, 6 * BLOCK_BYTES)
        until(lambda: leader.status.bytes_copied == 6 * BLOCK_BYTES)
    finally:
        source.close()
        target.close()
    assert leader.detached


@pytest.fixture
def spawn(tmp_path: Path, leader: Leader) -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """A node process with four blocks, attached to the leader."""
    processes: list[subprocess.Popen[str]] = []

    def start(drain_on_stop_s: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DAEMON, str(tmp_path / "node"), leader.address, str(drain_on_stop_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20)[0], "no ready line"
        ready = json.loads(process.stdout.readline())
        transport = TcpTransport(Identity.new())
        peer = transport.connect(Endpoint(ready["node_id"], ready["incarnation"], ready["channel"]))
        region = Region(np.frombuffer(bytearray(b"".join(payload(key(n), 0, 5000) for n in range(4))), np.uint8), None)
        namespace = type(NAMESPACE)("model", 5000, 16)
        ask = Push(namespace, "", keys(range(4)), region.rows(namespace), time.monotonic() + 60)
        until(lambda: (peer.upkeep(), peer.push(ask).status.max() <= BlockStatus.ALREADY_PRESENT)[1])
        peer.close()
        transport.close()
        until(lambda: len(leader.blocks) == 4)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_node_told_to_stop_is_drained_first(spawn: Callable[[float], subprocess.Popen[str]], leader: Leader) -> None:
    process = spawn(60.0)
    process.send_signal(signal.SIGTERM)
    until(lambda: bool(leader.of("leaving")))
    assert 50_000 < leader.of("leaving")[0].budget_ms <= 60_000
    leader.say(drain=control.DrainCommand(command=9, budget_ms=60_000))
    until(lambda: any(offer.last for offer in leader.of("offer")))
    assert sum(len(part.hashes) for offer in leader.of("offer") for part in offer.holdings) == 4 * 16
    assert process.poll() is None and not leader.detached, "it waits for the leader's word"
    leader.say(drained=control.Drained(command=9))
    assert process.wait(15) == 0
    assert leader.detached


def test_a_second_signal_ends_the_wait(spawn: Callable[[float], subprocess.Popen[str]], leader: Leader) -> None:
    process = spawn(600.0)
    process.send_signal(signal.SIGTERM)
    until(lambda: bool(leader.of("leaving")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert leader.detached, "a goodbye is said all the same"


def test_a_budget_that_is_over_ends_the_wait(spawn: Callable[[float], subprocess.Popen[str]], leader: Leader) -> None:
    process = spawn(1.0)
    process.send_signal(signal.SIGTERM)
    until(lambda: bool(leader.of("leaving")))
    leader.say(drain=control.DrainCommand(command=9, budget_ms=1000))
    assert process.wait(15) == 0
    assert leader.detached


def test_without_a_time_for_it_nobody_is_asked(spawn: Callable[[float], subprocess.Popen[str]], leader: Leader) -> None:
    process = spawn(0.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert leader.detached and not leader.of("leaving")


def test_a_goodbye_does_not_wait_for_the_rest_of_a_snapshot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PART_HASHES", 2)
    for salt in "abcdef":
        node.store(range(3), salt=salt)
    box = Outbox(node.state, threading.Lock(), control.Attach(), lambda told: control.NodeStatus())
    box.attached.set()
    bodies: list[str] = []
    for message in box.messages():
        bodies.append(str(message.WhichOneof("body")))
        if bodies.count("snapshot") == 2:
            box.detach("the node is stopping")
    assert bodies[-1] == "detach" and bodies.count("snapshot") < 5 and "delta" not in bodies
