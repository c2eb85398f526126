"""Processes that die, stop and come back under a client: bounded calls, misses with reasons, right bytes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from tests.e2e.real_pool import Daemon, RealPool, keys, payload
from tests.waiting import until

SIZE = 512
#: A stopped node costs 250 ms; the rest is for a shared machine.
BOUND_S = 1.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = RealPool(tmp_path, nodes=2)
    yield pool
    pool.end()


@pytest.fixture(params=["shm", "tcp"])
def client(pool: RealPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(pool.address, transport=request.param, verify="always") as client:
        yield client


class Stored:
    """Small blocks in the pool, striped over both nodes, and a place to load them to."""

    count = 1280

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ns = client.namespace("model/f", block_bytes=SIZE, block_tokens=16)
        self.hashes = keys(self.count, "faults")
        self.data = payload(self.hashes, "", SIZE)
        self.source = client.register(self.data.copy()).rows(self.ns)
        self.into = np.zeros_like(self.data)
        self.target = client.register(self.into).rows(self.ns)
        until(lambda: client.store(self.ns, "", self.hashes, self.source).stored.all())
        until(lambda: client.lookup(self.ns, "", self.hashes).hit_blocks == self.count)

    def load(self):  # type: ignore[no-untyped-def]
        self.into[:] = 0
        started = time.monotonic()
        result = self.client.load(self.ns, "", self.hashes, self.target)
        assert (self.into[result.loaded] == self.data[result.loaded]).all(), "wrong bytes"
        return result, time.monotonic() - started


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_lost_between_lookup_and_load(client: Client, pool: RealPool, number: int) -> None:
    stored = Stored(client)
    assert stored.load()[0].loaded.all()
    pool.node(0).signal(number)
    stopped = time.monotonic()
    result, took_s = stored.load()
    while result.loaded.all() and number == signal.SIGSTOP:  # its index is good for as long as nobody misses it
        assert time.monotonic() - stopped < 5 * BOUND_S
        result, took_s = stored.load()
    assert took_s < BOUND_S
    lost = int((~result.loaded).sum())
    assert 0 < lost < stored.count and result.reasons == {"loaded": stored.count - lost, "node_lost": lost}
    result, took_s = stored.load()
    assert took_s < BOUND_S / 2, "the breaker is open: nobody waits for it again"
    assert not client.health()["healthy"]
    started = time.monotonic()
    more = client.store(stored.ns, "", keys(stored.count, "more"), stored.source)
    assert time.monotonic() - started < BOUND_S and set(more.reasons) <= {"stored", "node_lost"}
    if number == signal.SIGSTOP:
        pool.node(0).signal(signal.SIGCONT)
        until(lambda: stored.load()[0].loaded.all())


@pytest.mark.parametrize("client", ["tcp"], indirect=True)
def test_a_restarted_node_is_known_anew(client: Client, pool: RealPool) -> None:
    stored = Stored(client)
    pool.node(0).signal(signal.SIGKILL)
    pool.start_node(0)
    until(lambda: client.store(stored.ns, "", stored.hashes, stored.source).stored.all(), 20)
    until(lambda: stored.load()[0].loaded.all())
    until(lambda: client.health()["healthy"])


@pytest.mark.parametrize("client", ["shm"], indirect=True)
def test_the_master_dies_and_comes_back(client: Client, pool: RealPool) -> None:
    stored = Stored(client)
    address = pool.address
    pool.daemons["master"].signal(signal.SIGKILL)
    result, took_s = stored.load()
    assert result.loaded.all() and took_s < BOUND_S, "known locations need no master"
    started = time.monotonic()
    found = client.lookup(stored.ns, "", stored.hashes)
    assert not found.answered and found.hit_blocks == 0 and time.monotonic() - started < BOUND_S
    unknown = client.load(stored.ns, "", keys(4, "unknown"), stored.target[:4])
    assert set(unknown.reasons) == {"node_lost"}
    pool.start_master(address)
    assert pool.daemons["master"].ready
    started = time.monotonic()
    until(lambda: client.lookup(stored.ns, "", stored.hashes).hit_blocks == stored.count)
    assert time.monotonic() - started < 6.0
    assert stored.load()[0].loaded.all()


@pytest.mark.parametrize("client", ["tcp"], indirect=True)
def test_everything_stopped_is_bounded(client: Client, pool: RealPool) -> None:
    stored = Stored(client)
    for daemon in pool.daemons.values():
        daemon.signal(signal.SIGSTOP)
    result, took_s = stored.load()
    assert not result.loaded.any() and took_s < 2 * BOUND_S
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 3 * BOUND_S


def test_an_engine_that_dies_leaves_nothing_behind(pool: RealPool, tmp_path: Path) -> None:
    """Its leases and reservations end with it: the node is usable for others at once."""
    with Client(pool.address) as client:
        stored = Stored(client)
        code = (
            "import sys, os, time; sys.path.insert(0, sys.argv[2]); from real_pool import keys\n"
            "from kvstrata.client import Client\n"
            "c = Client(sys.argv[1]); ns = c.namespace('model/f', block_bytes=512, block_tokens=16)\n"
            "v = c.view(ns, '', keys(1280, 'faults')); v.__enter__()\n"
            "print('held', flush=True); time.sleep(60)\n"
        )
        engine = subprocess.Popen(
            [sys.executable, "-c", code, pool.address, str(Path(__file__).parent)], stdout=subprocess.PIPE
        )
        try:
            assert engine.stdout is not None and engine.stdout.readline() == b"held\n"
        finally:
            engine.kill()
            engine.wait(10)
            assert engine.stdout is not None
            engine.stdout.close()
        blocks = client.register(np.ones((64, SIZE), np.uint8)).rows(stored.ns)
        assert client.store(stored.ns, "", keys(64, "after"), blocks).stored.all()
        assert stored.load()[0].loaded.all()


def test_daemons_say_why_they_are_not_ready(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not ready"):
        assert Daemon("master", "--listen", "nonsense", log=tmp_path / "log").ready
