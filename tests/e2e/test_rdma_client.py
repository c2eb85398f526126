"""Clients over rails (NIXL, between processes of this host) and real nodes that are killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.client import BlockStatus, Client, PoolNamespace
from kvstrata.proto.errors import Closed
from kvstrata.transfer.rdma.found import cma_problem, nixl_problem
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(nixl_problem() or cma_problem()), reason=nixl_problem() or cma_problem()),
    pytest.mark.timeout(180),
]

SIZE = 256 << 10
COUNT = 64
S = BlockStatus


def started(base: Path, nodes: int = 1) -> RealPool:
    return RealPool(base, nodes=nodes, options=("--rdma", "cma"))


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = started(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.end()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    pool = started(tmp_path)
    yield pool
    pool.end()


def space(client: Client, size: int = SIZE) -> PoolNamespace:
    return client.namespace(f"model/rails/{size}", block_bytes=size, block_tokens=16)


def node_of(client: Client) -> dict[str, Any]:
    (node,) = client.health()["nodes"]  # type: ignore[attr-defined]
    return dict(node)


class Loads:
    """A stored chain, and loads of it: each has the right bytes where it says so, and none touches what is not its."""

    def __init__(self, client: Client, chain: str) -> None:
        self.client, self.ns = client, space(client)
        self.hashes = keys(COUNT, chain)
        self.data = payload(self.hashes, "", SIZE)
        assert client.store(self.ns, "", self.hashes, client.register(self.data.copy()).rows(self.ns)).stored.all()
        self.into = np.zeros_like(self.data)
        self.rows = client.register(self.into).rows(self.ns)

    def load(self) -> dict[str, int]:
        self.into[:] = 0
        result = self.client.load(self.ns, "", self.hashes, self.rows)
        assert (self.into[result.loaded] == self.data[result.loaded]).all()
        assert result.settled(time.monotonic() + 30), "a transfer with a dead node, or one that goes on, ends"
        return result.reasons


def test_rails_are_what_carries_and_health_says_so(shared_pool: RealPool) -> None:
    with Client(shared_pool.address, transport="rdma-cma", verify="always") as client:
        loads = Loads(client, "health")
        assert loads.load() == {"loaded": COUNT}
        node, rails = node_of(client), client.health()["rails"]
        assert node["transport"] == "rdma"
        assert node["rails"]["self_test"] == "passed" and node["rails"]["kind"] == "cma"
        assert rails["bytes_read"] >= COUNT * SIZE, "the client's own agent has read them"  # type: ignore[index]
        assert client.health()["healthy"]


def test_auto_takes_shared_memory_on_one_host(shared_pool: RealPool) -> None:
    with Client(shared_pool.address) as client:
        assert Loads(client, "auto").load() == {"loaded": COUNT}
        assert node_of(client)["transport"] == "shm"
        assert client.health()["rails"]["open"] is False  # type: ignore[index]


def test_a_node_without_rails_is_a_clear_problem_when_rails_are_all_that_is_allowed(tmp_path: Path) -> None:
    pool = RealPool(tmp_path)
    try:
        with Client(pool.address, transport="rdma-cma") as client:
            ns = space(client)
            rows = client.register(np.zeros((2, SIZE), np.uint8)).rows(ns)
            assert client.store(ns, "", keys(2), rows).reasons == {"node_lost": 2}
            problems = client.health()["problems"]
            assert any("the node has no rails" in problem for problem in problems)  # type: ignore[attr-defined]
    finally:
        pool.end()


def test_rdma_without_a_device_says_what_is_missing(shared_pool: RealPool) -> None:
    if Path("/sys/class/infiniband").exists() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this machine has an RDMA device")
    with Client(shared_pool.address, transport="rdma") as client:
        ns = space(client)
        rows = client.register(np.zeros((2, SIZE), np.uint8)).rows(ns)
        assert client.store(ns, "", keys(2, "none"), rows).reasons == {"node_lost": 2}
        assert "device" in str(client.health()["rails"]["problem"])  # type: ignore[index]


def test_a_node_killed_under_loads_leaves_misses_and_nothing_pending(pool: RealPool) -> None:
    with Client(pool.address, transport="rdma-cma", verify="always") as client:
        loads = Loads(client, "killed")
        assert loads.load() == {"loaded": COUNT}
        killer = threading.Timer(0.15, pool.node().signal, [signal.SIGKILL])
        killer.start()
        reasons, seen = {"loaded": COUNT}, []
        while reasons.get("loaded"):
            reasons = loads.load()
            seen.append(reasons)
        killer.join()
        assert set().union(*seen) <= {"loaded", "node_lost", "late", "lease_lost", "missing", "pending"}
        assert client.health()["rails"]["given_up"] == 0  # type: ignore[index]


def test_a_stopped_node_is_given_up_and_comes_back(pool: RealPool) -> None:
    with Client(pool.address, transport="rdma-cma", verify="always", transfer_deadline_ms=20_000) as client:
        loads = Loads(client, "stopped")
        assert loads.load() == {"loaded": COUNT}
        pool.node().signal(signal.SIGSTOP)
        began = time.monotonic()
        reasons = loads.load()
        assert time.monotonic() - began < 10, "it is silent, and that is not waited out"
        assert "loaded" not in reasons
        pool.node().signal(signal.SIGCONT)
        seen: list[dict[str, int]] = []
        until(lambda: (seen.append(loads.load()), seen[-1] == {"loaded": COUNT})[1], 40)
        assert node_of(client)["rails"]["state"] == "up"


def test_a_restarted_node_has_its_rails_opened_anew(pool: RealPool) -> None:
    with Client(pool.address, transport="rdma-cma", verify="always") as client:
        loads = Loads(client, "restarted")
        assert loads.load() == {"loaded": COUNT}
        first = node_of(client)["incarnation"]
        pool.node().signal(signal.SIGKILL)
        pool.node().end()
        pool.start_node(0)
        assert pool.node().ready["rails"] == "cma"
        rows = client.register(loads.data.copy()).rows(loads.ns)
        until(lambda: bool(client.store(loads.ns, "", loads.hashes, rows).stored.all()), 30)
        until(lambda: loads.load() == {"loaded": COUNT}, 20)
        node = node_of(client)
        assert node["incarnation"] != first and node["rails"]["state"] == "up"


def test_a_forked_child_leaves_rails_alone(shared_pool: RealPool) -> None:
    with Client(shared_pool.address, transport="rdma-cma", verify="always") as client:
        loads = Loads(client, "fork")
        assert loads.load() == {"loaded": COUNT}
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                try:
                    client.load(loads.ns, "", loads.hashes, loads.rows)
                except Closed:
                    client.close()
                    code = 0
            finally:
                os._exit(code)
        until(lambda: (ended := os.waitpid(pid, os.WNOHANG)) != (0, 0) and ended[1] == 0)
        assert loads.load() == {"loaded": COUNT}


def test_clients_come_and_go_and_the_node_forgets_them(shared_pool: RealPool) -> None:
    for turn in range(5):
        with Client(shared_pool.address, transport="rdma-cma", verify="always") as client:
            assert Loads(client, f"turn/{turn}").load() == {"loaded": COUNT}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_comes_as_over_tcp(shared_pool: RealPool, both: tuple[Client, Client], data: st.DataObject) -> None:
    """Stored over one, loaded over the other, in pieces of any size and order."""
    size = data.draw(st.sampled_from([64, 4096, 65_000, 1 << 20]))
    pieces = data.draw(st.integers(1, min(size, 24)))
    count = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    hashes = keys(count, f"layout/{seed}/{size}")
    content = payload(hashes, "", size)
    first, second = data.draw(st.permutations(both))

    def laid_out(client: Client) -> tuple[Any, npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        cuts = np.sort(rng.choice(np.arange(1, size), pieces - 1, replace=False)) if pieces > 1 else np.array([], int)
        lengths = np.tile(np.diff([0, *cuts.tolist(), size]), (count, 1))
        order = rng.permutation(count * pieces)
        starts = np.empty(count * pieces, np.int64)
        gaps = rng.integers(0, 100, count * pieces)
        flat = lengths.ravel()
        at = np.cumsum(flat[order] + gaps) - flat[order]
        starts[order] = at
        table = np.stack([starts.reshape(count, pieces), lengths], axis=2)
        memory = np.full(int((flat + gaps).sum()) + 8, 0xA5, np.uint8)
        return client.register(memory), table, memory

    region, table, memory = laid_out(first)
    for block, row in zip(content, table.tolist(), strict=True):
        begin = 0
        for start, length in row:
            memory[start : start + length] = block[begin : begin + length]
            begin += length
    ns = space(first, size)
    stored = first.store(ns, "", hashes, region.view(ns, table))
    assert stored.stored.all(), stored.reasons
    into, there, target = laid_out(second)
    ns = space(second, size)
    until(lambda: bool(second.exists(ns, "", hashes).all()))
    loaded = second.load(ns, "", hashes, into.view(ns, there))
    assert loaded.loaded.all(), loaded.reasons
    untouched = np.ones(len(target), bool)
    for block, row in zip(content, there.tolist(), strict=True):
        assert (np.concatenate([target[start : start + length] for start, length in row]) == block).all()
        for start, length in row:
            untouched[start : start + length] = False
    assert (target[untouched] == 0xA5).all()
    first.unregister(region)
    second.unregister(into)


@pytest.fixture(scope="module")
def both(shared_pool: RealPool) -> Iterator[tuple[Client, Client]]:
    with (
        Client(shared_pool.address, transport="rdma-cma", verify="always", transfer_deadline_ms=10_000) as rails,
        Client(shared_pool.address, transport="tcp", verify="always", transfer_deadline_ms=10_000) as tcp,
    ):
        yield rails, tcp
