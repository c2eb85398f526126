"""Blocks that two real nodes have: both serve a load, either one may die or stop during it, and nothing is missed."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from json import loads
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.transfer.base import Endpoint, Push
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.tcp import TcpTransport
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.waiting import until

SIZE = 4096
COUNT = 512
#: A stopped node costs 250 ms; the rest is for a shared machine.
BOUND_S = 1.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path, nodes=2)
    yield pool
    pool.end()


@pytest.fixture(params=["near", "far"])
def client(pool: RealPool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """On the nodes' host, over shared memory; or as if it were on another, over tcp."""
    if request.param == "far":
        for module in ("kvstrata.transfer.identity", "kvstrata.transfer.shm", "kvstrata.client.client"):
            monkeypatch.setattr(f"{module}.boot_id", lambda: "another host")
    with Client(pool.address, verify="always") as client:
        yield client


class Twice:
    """A prefix that every node of the pool has, and a place to load it to."""

    def __init__(self, client: Client, pool: RealPool) -> None:
        self.client = client
        self.pool = pool
        self.ns = client.namespace("model/twice", block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(COUNT, "twice")
        self.data = payload(self.hashes, "", SIZE)
        self.into = np.zeros_like(self.data)
        self.target = client.register(self.into).rows(self.ns)
        source = client.register(self.data.copy()).rows(self.ns)
        transport = TcpTransport(Identity.new())
        for daemon in self.nodes():
            ready = daemon.ready
            peer = transport.connect(Endpoint(ready["node_id"], ready["incarnation"], ready["channel"], "", ""))
            push = Push(self.ns, "", self.hashes, source, time.monotonic() + 10, epoch=self.ns.epoch)
            assert set(peer.push(push).status.tolist()) == {1}
            peer.close()
        transport.close()
        located = client._directory
        until(lambda: located.lookup(self.ns, "", self.hashes, time.monotonic() + 1).replicas == 2)
        assert client.lookup(self.ns, "", self.hashes).hit_blocks == COUNT

    def nodes(self) -> list[Daemon]:
        return [daemon for name, daemon in self.pool.daemons.items() if name != "master"]

    def load(self) -> float:
        """Load all of it; nothing is missing or wrong. Seconds it took."""
        self.into[:] = 0
        started = time.monotonic()
        result = self.client.load(self.ns, "", self.hashes, self.target)
        took_s = time.monotonic() - started
        assert result.loaded.all(), result.reasons
        assert (self.into == self.data).all(), "wrong bytes"
        return took_s

    def served(self) -> list[int]:
        """Bytes that each node has given out."""
        return [_health(daemon)["counts"]["bytes_out"] for daemon in self.nodes()]

    def busiest(self) -> Daemon:
        """The node that loads come from, or one of them."""
        before = self.served()
        self.load()
        gains = [after - was for after, was in zip(self.served(), before, strict=True)]
        return self.nodes()[gains.index(max(gains))]


def _health(daemon: Daemon) -> dict:  # type: ignore[type-arg]
    with urllib.request.urlopen(f"http://{daemon.ready['http']}/healthz", timeout=5) as answer:
        return dict(loads(answer.read()))


@pytest.mark.parametrize("client", ["far"], indirect=True)
def test_a_load_from_afar_uses_both_nodes(client: Client, pool: RealPool) -> None:
    twice = Twice(client, pool)
    before = twice.served()
    twice.load()
    gained = [after - was for after, was in zip(twice.served(), before, strict=True)]
    assert gained == [COUNT * SIZE // 2] * 2


@pytest.mark.parametrize("client", ["near"], indirect=True)
def test_a_load_on_the_host_of_both_uses_one(client: Client, pool: RealPool) -> None:
    twice = Twice(client, pool)
    before = twice.served()
    twice.load()
    gained = [after - was for after, was in zip(twice.served(), before, strict=True)]
    assert sorted(gained) == [0, COUNT * SIZE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_is_lost_costs_no_block(client: Client, pool: RealPool, number: int) -> None:
    twice = Twice(client, pool)
    victim = twice.busiest()
    client.lookup(twice.ns, "", twice.hashes)  # the load that follows is sure to ask the victim first
    victim.signal(number)
    assert twice.load() < BOUND_S
    assert twice.load() < BOUND_S / 2, "nobody waits for it again"
    assert client.lookup(twice.ns, "", twice.hashes).hit_blocks == COUNT
    assert twice.load() < BOUND_S / 2, "nor after a lookup: another replica is named"
    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        until(lambda: bool(client.health()["healthy"]))
        twice.load()


def test_a_node_that_dies_under_load_costs_no_block(client: Client, pool: RealPool) -> None:
    twice = Twice(client, pool)
    victim = twice.busiest()
    took: list[float] = []
    problems: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            while not over.is_set():
                took.append(twice.load())
        except BaseException as problem:  # noqa: BLE001  raised again below, in the test's own thread
            problems.append(problem)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        until(lambda: len(took) >= 5 or bool(problems))
        victim.signal(signal.SIGKILL)
        killed_at = len(took)
        until(lambda: len(took) >= killed_at + 5 or bool(problems), 20)
    finally:
        over.set()
        worker.join(20)
    assert not problems, problems
    assert max(took) < BOUND_S


def test_a_node_that_comes_back_serves_the_same_client(client: Client, pool: RealPool) -> None:
    """Its memory is empty, so the other one serves; then it takes blocks again, from memory registered before."""
    twice = Twice(client, pool)
    pool.node(0).signal(signal.SIGKILL)
    twice.load()
    pool.start_node(0)
    name = pool.node(0).ready["node_id"]
    region = client.allocate(64 * SIZE)
    region.bytes[:] = 7
    rows = region.rows(twice.ns)

    def taken() -> bool:
        assert client.store(twice.ns, "", keys(64, f"again/{time.monotonic()}"), rows).stored.all(), "elsewhere, then"
        return _health(pool.node(0))["blocks"] > 0

    until(taken, 20)
    until(lambda: bool(client.health()["healthy"]))
    shown = {node["node_id"]: node for node in client.health()["nodes"]}  # type: ignore[attr-defined]
    assert shown[name]["reachable"] and shown[name]["incarnation"] == pool.node(0).ready["incarnation"]
    twice.load()
