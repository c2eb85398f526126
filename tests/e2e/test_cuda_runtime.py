"""The CUDA runtime under a whole pool, on the stand-in for cupy: kernels run on this CPU, queues are as on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.client import Client
from kvstrata.transfer.gpu.cuda import CudaRuntime
from kvstrata.transfer.gpu.runtimes import installed
from kvstrata.transfer.memory import Memory
from tests.e2e.real_pool import RealPool, keys, payload
from tests.transfer.gpu.cpu_kernels import CpuKernels, compiled, compiler
from tests.transfer.gpu.fake_cupy import ILLEGAL_ADDRESS, FakeCupy

SIZE = 64 << 10
PIECES = 16
COUNT = 300  # more than a chunk


class DeviceArray:
    """Memory that says it is a device's."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.content = content
        self.device = SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.content.ctypes.data
        return {"version": 3, "shape": self.content.shape, "typestr": "|u1", "data": (address, False), "stream": 1}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler: apt-get install g++")
    return compiled(tmp_path_factory.mktemp("kernels"), found)


@pytest.fixture
def cupy(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy(kernels)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with installed(CudaRuntime(Memory("cuda", 0))):
        yield fake


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    base: Path = tmp_path_factory.mktemp("cuda")
    pool = RealPool(base)
    yield pool
    pool.end()


def test_pages_are_stored_and_come_back(pool: RealPool, cupy: FakeCupy) -> None:
    """By several threads at once, from pages in a random order."""
    hashes = keys(COUNT, "cuda")
    data = payload(hashes, "", SIZE)
    order = np.random.default_rng(0).permutation(COUNT * PIECES)
    pages = (order * (SIZE // PIECES)).reshape(COUNT, PIECES)
    table = np.stack([pages, np.full_like(pages, SIZE // PIECES)], axis=-1)
    source = np.empty((COUNT * PIECES, SIZE // PIECES), np.uint8)
    source[order] = data.reshape(source.shape)
    with Client(pool.address, transfer_deadline_ms=30_000) as client:
        ns = client.namespace("cuda-runtime", block_bytes=SIZE, block_tokens=16)
        blocks = client.register(DeviceArray(source)).view(ns, table)
        assert client.store(ns, "", hashes, blocks).stored.all()

        def load(turn: int) -> bool:
            target = np.zeros_like(source)
            into = client.register(DeviceArray(target)).view(ns, table)
            result = client.load(ns, "", hashes, into)
            return bool(result.loaded.all()) and np.array_equal(target, source)

        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(load, range(2)))
        assert client.health()["healthy"]
        assert {kind for kind, _ in cupy.device.launches} == {"gather", "scatter"}
        assert sum(kind == "gather" for kind, _ in cupy.device.launches) <= 3, "a launch a chunk"
    assert not cupy.device.registered, "what was pinned is given back"


def test_a_device_that_fails_costs_misses_and_says_so(pool: RealPool, cupy: FakeCupy) -> None:
    hashes = keys(8, "failed")
    data = payload(hashes, "", SIZE)
    with Client(pool.address, transfer_deadline_ms=30_000) as client:
        ns = client.namespace("cuda-failed", block_bytes=SIZE, block_tokens=16)
        rows = client.register(DeviceArray(data)).rows(ns)
        assert client.store(ns, "", hashes, rows).stored.all()
        cupy.device.status = ILLEGAL_ADDRESS
        result = client.load(ns, "", hashes, rows)
        assert not result.loaded.any()
        report = client.health()
        assert not report["healthy"] and "cudaError 700" in str(report["problems"])
        into = np.zeros((8, SIZE), np.uint8)
        assert client.load(ns, "", hashes, client.register(into).rows(ns)).loaded.all(), "the host's memory is reached"
        assert np.array_equal(into, data)
