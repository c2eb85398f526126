"""The link to the masters: failover, restarts, silence, nonsense, and a pool that is not there yet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import FingerprintMismatch, ForbiddenSalt, InvalidArgument
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.server import ChannelServer
from tests.client.fake_pool import FakeMaster, FakeNode, packed
from tests.waiting import until

SIZE = 64
#: Generous: a silent peer costs 250 ms, this machine is shared.
BOUND_S = 1.5


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def space(client: Client) -> PoolNamespace:
    return client.namespace("model/m", block_bytes=SIZE, block_tokens=16)


@pytest.fixture
def second(nodes: dict[str, FakeNode]) -> Iterator[FakeMaster]:
    master = FakeMaster(nodes)
    yield master
    master.stop()


def test_a_pool_that_is_down_does_not_stop_an_engine(
    connect: Callable[..., Client], nodes: dict[str, FakeNode]
) -> None:
    address = closed_port()
    started = time.monotonic()
    client = connect(address)
    ns = space(client)
    blocks = client.register(np.zeros((2, SIZE), np.uint8)).rows(ns)
    found = client.lookup(ns, "", packed(2))
    assert (found.hit_blocks, found.answered, found.reasons) == (0, False, {"node_lost": 2})
    assert client.load(ns, "", packed(2), blocks).reasons == {"node_lost": 2}
    assert client.store(ns, "", packed(2), blocks).reasons == {"node_lost": 2}
    assert not client.remove(ns, "", packed(2)).complete and not client.exists(ns, "", packed(2)).any()
    assert client.prefetch(ns, "", packed(2)).wait().answered is False  # type: ignore[union-attr]
    assert time.monotonic() - started < BOUND_S
    assert any(address in problem for problem in client.health()["problems"])  # type: ignore[attr-defined]
    master = FakeMaster(nodes, address)
    try:
        until(lambda: client.store(ns, "", packed(2), blocks).stored.all())
        assert client.health()["healthy"]
    finally:
        master.stop()


def test_the_next_master_takes_over(
    connect: Callable[..., Client], master: FakeMaster, second: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client = connect(f"{master.address},{second.address}")
    ns = space(client)
    client.lookup(ns, "", packed(2))
    assert (master.lookups, second.lookups) == (1, 0)
    master.stop()
    assert client.lookup(ns, "", packed(2)).answered
    assert second.lookups == 1
    serving = [m["serving"] for m in client.health()["masters"]]  # type: ignore[attr-defined]
    assert serving == [False, True]


def test_a_restarted_master_gets_no_handle_of_the_old_one(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client = connect(master.address)
    ns = space(client)
    nodes["a"].put(ns, "", packed(1), [b"x" * SIZE])
    master.stop()
    again = FakeMaster(nodes, master.address)
    again.learn()
    try:
        # A stranger has the first handle now: an old one would name the wrong namespace.
        other = connect(again.address)
        other.namespace("stranger", block_bytes=SIZE, block_tokens=16)
        until(lambda: client.lookup(ns, "", packed(1)).answered)
        assert client.lookup(ns, "", packed(1)).hit_blocks == 1
    finally:
        again.stop()


def test_a_forgotten_handle_is_opened_anew(connect: Callable[..., Client], master: FakeMaster) -> None:
    client = connect(master.address)
    ns = space(client)
    master._handles.clear()
    assert client.lookup(ns, "", packed(1)).answered
    master.refuses = FingerprintMismatch("another layout")
    with pytest.raises(FingerprintMismatch):
        client.lookup(ns, "", packed(1))


def test_the_epoch_is_the_one_of_the_opening(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    client = connect(master.address)
    ns = space(client)
    master.epoch = 4
    master._handles.clear()
    blocks = client.register(np.zeros((1, SIZE), np.uint8)).rows(ns)
    client.store(ns, "", packed(1), blocks)
    assert nodes["a"].pushes[-1].epoch == 3
    again = connect(master.address)
    again.store(space(again), "", packed(1, 1), again.register(np.zeros((1, SIZE), np.uint8)).rows(ns))
    assert nodes["a"].pushes[-1].epoch == 4


def test_nonsense_from_a_master_is_no_answer(
    connect: Callable[..., Client], master: FakeMaster, second: FakeMaster
) -> None:
    master.garbage = True
    client = connect(master.address)
    assert not client.lookup(space(client), "", packed(3)).answered
    client = connect(f"{master.address},{second.address}")
    assert client.lookup(space(client), "", packed(3)).answered


def test_a_refusal_is_not_failed_over(connect: Callable[..., Client], master: FakeMaster, second: FakeMaster) -> None:
    client = connect(f"{master.address},{second.address}")
    ns = space(client)
    master.refuses = ForbiddenSalt("not yours")
    with pytest.raises(ForbiddenSalt):
        client.lookup(ns, "them", packed(1))
    assert second.lookups == 0


def test_without_a_master_the_local_node_serves(
    connect: Callable[..., Client], master: FakeMaster, nodes: dict[str, FakeNode]
) -> None:
    del nodes["b"]
    client = connect(master.address)
    ns = space(client)
    data = np.full((2, SIZE), 7, np.uint8)
    blocks = client.register(data).rows(ns)
    master.place_at = ["a"]
    client.store(ns, "", packed(1), blocks[:1])
    master.stop()
    assert client.store(ns, "", packed(2, 10), blocks).stored.all()
    into = np.zeros((2, SIZE), np.uint8)
    assert client.load(ns, "", packed(2, 10), client.register(into).rows(ns)).loaded.all()
    assert (into == 7).all()


def test_a_late_master_is_late_and_not_lost(connect: Callable[..., Client], master: FakeMaster) -> None:
    client = connect(master.address, transfer_deadline_ms=150)
    ns = space(client)
    master.delay_s = 0.6
    started = time.monotonic()
    found = client.lookup(ns, "", packed(1))
    assert found.reasons == {"late": 1} and not found.answered
    assert time.monotonic() - started < 0.5


def test_a_node_is_no_master(connect: Callable[..., Client]) -> None:
    loops = Loops()
    node = ChannelServer({}, lambda _: pb.HelloOk(role="node"), lambda _: None, loops)
    try:
        with pytest.raises(InvalidArgument, match="not a master"):
            connect(node.listen_tcp("127.0.0.1:0"))
    finally:
        node.stop(0.1)
        loops.stop()


STOPPABLE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.client.fake_pool import FakeMaster, FakeNode
print(FakeMaster({"a": FakeNode("a")}).address, flush=True)
time.sleep(60)
"""


def test_a_stopped_master_costs_one_silence(connect: Callable[..., Client], nodes: dict[str, FakeNode]) -> None:
    here = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STOPPABLE), here], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        client = connect(process.stdout.readline().strip())
        ns = space(client)
        assert client.lookup(ns, "", packed(1)).answered
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # a signal is not there when kill returns
        started = time.monotonic()
        assert not client.lookup(ns, "", packed(1)).answered
        assert time.monotonic() - started < BOUND_S
        started = time.monotonic()
        for _ in range(20):
            assert not client.lookup(ns, "", packed(1)).answered
        assert time.monotonic() - started < 0.5, "the breaker is open: nobody waits"
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: client.lookup(ns, "", packed(1)).answered)
    finally:
        process.kill()
        process.wait(5)
