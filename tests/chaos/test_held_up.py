"""A process that does nothing for long and is not dead: its interpreter held, its disks hanging (INV-8).

What nobody may conclude: that a node is offline, that its blocks are gone, that a client has left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from tests.chaos.cluster import ROOT
from tests.e2e.real_pool import ANY, Daemon, RealPool, keys, payload
from tests.waiting import until

SIZE = 4096
COUNT = 100
#: Longer than the ten seconds after which a silent node is offline; the long tier holds it as long as is promised.
HELD_S = [
    pytest.param(13, marks=pytest.mark.slow),
    pytest.param(30, marks=[pytest.mark.long, pytest.mark.timeout(120)]),
]
HUNG_S = [
    pytest.param(13, marks=pytest.mark.slow),
    pytest.param(60, marks=[pytest.mark.long, pytest.mark.timeout(180)]),
]


class HurtDaemon(Daemon):
    """A storage node that takes signals which hold it up."""

    def __init__(self, *arguments: str, log: Path, hog_s: float) -> None:
        command = [sys.executable, "-m", "tests.chaos.hurt_node", *arguments, "--log-format", "json"]
        self._log = log
        env = {**os.environ, "KVSTRATA_HOG_S": str(hog_s)}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=ROOT)


class HurtPool(RealPool):
    """One node, with an SSD; blocks of 1 MiB of memory are in it, those of the rest on disk too."""

    def __init__(self, base: Path, hog_s: float) -> None:
        self._hog_s = hog_s
        super().__init__(base, nodes=1)

    def start_node(self, index: int) -> None:
        self.daemons[f"node{index}"] = HurtDaemon(
            "storage", "--master", self.address, "--listen", ANY, "--http", ANY,
            "--data", str(self._base / "node"), "--dram", self._dram, "--slab", "1MiB",
            "--ssd", f"{self._base / 'ssd'}=32MiB", "--ssd-policy", "write-through",
            log=self._base / "node.log", hog_s=self._hog_s,
        )  # fmt: skip


def watched(admin: AdminClient, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> set[str]:
    """The states that the master saw the node in."""
    states: set[str] = set()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        states.add(admin.nodes()[0].state)
        meanwhile()
        time.sleep(0.1)
    return states


@pytest.mark.parametrize("held_s", HELD_S)
def test_a_node_whose_interpreter_is_held(tmp_path: Path, held_s: int) -> None:
    pool = HurtPool(tmp_path, held_s)
    try:
        with Client(pool.address, transport="tcp", verify="always") as client, AdminClient(pool.address) as admin:
            ns = client.namespace("model/h", block_bytes=SIZE, block_tokens=16)
            hashes = keys(COUNT, "held")
            data = payload(hashes, "", SIZE)
            rows = client.register(data.copy()).rows(ns)
            until(lambda: client.store(ns, "", hashes, rows).stored.all())
            until(lambda: client.lookup(ns, "", hashes).hit_blocks == COUNT)
            before = admin.nodes()[0]
            pool.node().process.send_signal(signal.SIGUSR1)
            states = watched(admin, held_s - 1)
            assert "offline" not in states, "its heartbeats come from a process of their own"
            until(lambda: admin.nodes()[0].state == "active")
            # Nothing was forgotten: what it holds is found at once, in the incarnation that it had.
            assert client.lookup(ns, "", hashes).hit_blocks == COUNT
            assert admin.nodes()[0].incarnation == before.incarnation
            into = np.zeros_like(data)
            target = client.register(into).rows(ns)
            until(lambda: client.load(ns, "", hashes, target).loaded.all())
            assert (into == data).all()
    finally:
        pool.end()


@pytest.mark.parametrize("hung_s", HUNG_S)
def test_a_node_whose_disks_hang(tmp_path: Path, hung_s: int) -> None:
    """Memory is served all the while, the node stays active, and writers do not wait for the disk."""
    pool = HurtPool(tmp_path, 1)
    try:
        with Client(pool.address, transport="tcp", verify="always") as client, AdminClient(pool.address) as admin:
            ns = client.namespace("model/h", block_bytes=SIZE, block_tokens=16)
            hashes = keys(COUNT, "hung")
            data = payload(hashes, "", SIZE)
            rows = client.register(data.copy()).rows(ns)
            until(lambda: client.store(ns, "", hashes, rows).stored.all())
            until(lambda: client.lookup(ns, "", hashes).hit_blocks == COUNT)
            into = np.zeros_like(data)
            target = client.register(into).rows(ns)
            slowest_s = 0.0
            number = 0

            def load_and_store() -> None:
                nonlocal slowest_s, number
                number += 1
                began = time.monotonic()
                assert client.load(ns, "", hashes, target).loaded.all() and (into == data).all()
                slowest_s = max(slowest_s, time.monotonic() - began)
                began = time.monotonic()
                client.store(ns, "", keys(4, f"hung/{number}"), rows[:4])
                assert time.monotonic() - began < 3.0, "bounded by its deadline"

            pool.node().process.send_signal(signal.SIGUSR2)
            assert watched(admin, hung_s, load_and_store) == {"active"}
            assert slowest_s < 1.0
            pool.node().process.send_signal(signal.SIGUSR2)
            assert client.load(ns, "", hashes, target).loaded.all()
            assert pool.node().process.poll() is None
    finally:
        pool.end()


@pytest.mark.parametrize("held_s", HELD_S)
@pytest.mark.parametrize("slices", [1, 15], ids=["whole", "in slices"])
def test_a_client_whose_interpreter_is_held(tmp_path: Path, held_s: int, slices: int) -> None:
    """It is still known afterwards, and goes on as if nothing had been."""
    pool = RealPool(tmp_path, nodes=1)
    code = (
        "import sys, numpy as np\n"
        "from kvstrata.client import Client\n"
        "from tests.chaos.hurt_node import hold_the_interpreter\n"
        "from tests.e2e.real_pool import keys, payload\n"
        "with Client(sys.argv[1], name='held') as c:\n"
        "    ns = c.namespace('model/h', block_bytes=4096, block_tokens=16)\n"
        "    hashes = keys(100, 'client'); data = payload(hashes, '', 4096)\n"
        "    print(c.store(ns, '', hashes, c.register(data.copy()).rows(ns)).stored.sum(), flush=True)\n"
        "    for slice in range(int(sys.argv[3])): hold_the_interpreter(float(sys.argv[2]) / int(sys.argv[3]))\n"
        "    into = np.zeros_like(data)\n"
        "    got = c.load(ns, '', hashes, c.register(into).rows(ns)).loaded\n"
        "    print(got.sum(), int((into[got] != data[got]).sum()), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, pool.address, str(held_s), str(slices)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "100\n"
        with AdminClient(pool.address) as admin:
            until(lambda: "held" in {row.name for row in admin.clients()})
            ends = time.monotonic() + held_s - 1
            while time.monotonic() < ends:
                assert "held" in {row.name for row in admin.clients()}
                time.sleep(0.2)
            assert child.stdout.readline() == "100 0\n"
            assert "held" in {row.name for row in admin.clients()}
            child.kill()
            until(lambda: "held" not in {row.name for row in admin.clients()})
    finally:
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
        pool.end()
