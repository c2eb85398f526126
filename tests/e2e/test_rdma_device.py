"""A pool over a real RDMA device: ``pytest -m rdma``. Both ends are on this host; the bytes go through the device.

They check what tests over CMA check too (tests/e2e/test_rdma_client.py): nothing of it may depend on a read being over
when it is posted, which over CMA it always is.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client, PoolNamespace
from kvstrata.transfer.rdma.found import find_rails
from kvstrata.transfer.rdma.rails import RailOptions
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

#: As a node and a client are told it.
NODE, TRANSPORT = "on", "rdma"
WHY_NOT = find_rails(RailOptions()).problem

pytestmark = [pytest.mark.rdma, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    one = RealPool(tmp_path_factory.mktemp("pool"), dram="1GiB", options=("--rdma", NODE))
    yield one
    one.end()


@pytest.fixture
def client(pool: RealPool) -> Iterator[Client]:
    with Client(pool.address, transport=TRANSPORT, verify="always", transfer_deadline_ms=10_000) as one:
        yield one


def space(client: Client, size: int) -> PoolNamespace:
    return client.namespace(f"rdma/{size}", block_bytes=size, block_tokens=16)


def paged(size: int, pieces: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """i64[count, pieces, 2]: piece j of all blocks, then piece j + 1 of all."""
    block, piece = np.arange(count)[:, None], np.arange(pieces)[None, :]
    length = size // pieces
    return np.stack([(piece * count + block) * length, np.full((count, pieces), length)], axis=2).astype(np.int64)


@pytest.mark.parametrize(
    ("size", "pieces", "count"), [(64 << 10, 1, 64), (32 << 10, 1, 1024), (2 << 20, 64, 16), (64 << 20, 1, 1)]
)
def test_blocks_come_back_as_they_were(client: Client, size: int, pieces: int, count: int) -> None:
    namespace, names = space(client, size), keys(count, f"whole/{size}")
    table = paged(size, pieces, count)
    given = payload(names, "", size)
    source, target = (client.register(np.zeros(count * size, np.uint8)) for _ in range(2))
    laid_out = given.reshape(count, pieces, size // pieces).transpose(1, 0, 2)
    source.bytes[:] = laid_out.reshape(-1)
    stored = client.store(namespace, "", names, source.view(namespace, table))
    assert stored.stored.all(), (stored.reasons, client.health())
    loaded = client.load(namespace, "", names, target.view(namespace, table))
    assert loaded.loaded.all(), (loaded.reasons, client.health())
    assert (target.bytes == source.bytes).all()
    (node,) = client.health()["nodes"]  # type: ignore[attr-defined]
    assert node["transport"] == "rdma" and node["rails"]["self_test"] == "passed"
    client.remove(namespace, "", names)
    client.unregister(source)
    client.unregister(target)


def test_ranges_land_in_order(client: Client) -> None:
    """Each is there when it is told of, and not believed before."""
    size, count = 1 << 20, 16
    namespace, names = space(client, size), keys(count, "ranges")
    given = payload(names, "", size)
    source, target = client.register(given), client.register(np.zeros((count, size), np.uint8))
    assert client.store(namespace, "", names, source.rows(namespace)).stored.all()
    ends = [size // 4, size // 2, size]
    seen: list[int] = []

    def landed(index: int, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        low = ends[index - 1] if index else 0
        rows = target.bytes.reshape(count, size)
        assert mask.all() and (rows[:, low : ends[index]] == given[:, low : ends[index]]).all()
        seen.append(index)

    result = client.load(namespace, "", names, target.rows(namespace), parts=ends, landed=landed)
    assert result.loaded.all() and seen == [0, 1, 2], (result.reasons, seen)


def test_clients_that_read_side_by_side_get_their_own_bytes(pool: RealPool) -> None:
    size, count = 256 << 10, 32
    wrong: list[str] = []

    def work(number: int) -> None:
        with Client(pool.address, transport=TRANSPORT, verify="never", transfer_deadline_ms=10_000) as one:
            namespace, names = space(one, size), keys(count, f"side/{number}")
            given = payload(names, "", size)
            source, target = one.register(given), one.register(np.zeros((count, size), np.uint8))
            if not one.store(namespace, "", names, source.rows(namespace)).stored.all():
                wrong.append(f"client {number}: not stored")
            for _ in range(20):
                target.bytes[:] = 0
                result = one.load(namespace, "", names, target.rows(namespace))
                if not result.loaded.all() or (target.bytes.reshape(count, size) != given).any():
                    wrong.append(f"client {number}: {result.reasons}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_killed_node_leaves_nothing_pending(tmp_path: Path) -> None:
    size, count = 1 << 20, 64
    one = RealPool(tmp_path, dram="256MiB", options=("--rdma", NODE))
    try:
        with Client(one.address, transport=TRANSPORT, transfer_deadline_ms=5_000) as client:
            namespace, names = space(client, size), keys(count, "killed")
            region = client.register(payload(names, "", size))
            assert client.store(namespace, "", names, region.rows(namespace)).stored.all()
            target = client.register(np.zeros((count, size), np.uint8))
            killer = threading.Timer(0.02, lambda: one.node().signal(signal.SIGKILL))
            killer.start()
            results = [client.load(namespace, "", names, target.rows(namespace)) for _ in range(10)]
            killer.join()
            assert not results[-1].loaded.any()
            for result in results:
                until(result.settled)
                done = {"loaded", "node_lost", "pending", "missing", "late"}
                assert set(result.reasons) <= done, result.reasons
            assert (results[-1].status != BlockStatus.LOADED).all()
    finally:
        one.end()


def test_the_doctor_and_the_bench_go_over_the_device(pool: RealPool) -> None:
    for command in (
        ("doctor", "--master", pool.address, "--round-trip"),
        (
            "bench",
            "--master",
            pool.address,
            "--transport",
            TRANSPORT,
            "--size",
            "1MiB",
            "--blocks",
            "16",
            "--rounds",
            "1",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kvstrata.cli.app", *command],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
