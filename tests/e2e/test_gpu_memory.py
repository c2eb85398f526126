"""Memory of a real GPU through a whole pool: what :mod:`tests.e2e.test_device_memory` shows on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstrata.client import Client
from tests.e2e.real_pool import RealPool, keys, payload
from tests.transfer.gpu.gpus import gpu_or_skip

SIZE, COUNT, LAYERS = 256 << 10, 96, 8

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy() -> Any:
    return gpu_or_skip()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    gpu_or_skip()  # before two processes are started for nothing
    pool = RealPool(tmp_path_factory.mktemp("gpu"), dram="128MiB")
    yield pool
    pool.end()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_of_a_gpu_are_stored_and_come_back_in_pieces(pool: RealPool, cupy: Any, transport: str) -> None:
    with Client(pool.address, transport=transport, transfer_deadline_ms=20_000) as client:
        ns = client.namespace(f"gpu-{transport}", block_bytes=SIZE, block_tokens=16)
        hashes = keys(COUNT, "gpu")
        data = payload(hashes, "", SIZE)
        stored = client.store(ns, "", hashes, client.register(cupy.asarray(data)).rows(ns))
        assert stored.stored.all(), stored.reasons
        layers = [cupy.zeros((COUNT, SIZE // LAYERS), cupy.uint8) for _ in range(LAYERS)]
        region = client.register(layers)
        table = np.empty((COUNT, LAYERS, 2), np.int64)
        for layer, array in enumerate(layers):
            pages = np.arange(COUNT, dtype=np.int64) * (SIZE // LAYERS)
            table[:, layer, 0] = array.data.ptr - region.address + pages
        table[..., 1] = SIZE // LAYERS
        loaded = client.load(ns, "", hashes, region.view(ns, table))
        assert loaded.loaded.all(), loaded.reasons
        assert (cupy.asnumpy(cupy.concatenate(layers, axis=1)) == data).all()
        assert client.health()["healthy"], client.health()["problems"]


def test_what_the_callers_stream_has_queued_is_what_is_stored(pool: RealPool, cupy: Any) -> None:
    with Client(pool.address, transfer_deadline_ms=20_000) as client:
        ns = client.namespace("gpu-stream", block_bytes=SIZE, block_tokens=16)
        hashes, stream = keys(4, "stream"), cupy.cuda.Stream(non_blocking=True)
        with stream:
            array = cupy.zeros((4, SIZE), cupy.uint8)
            work = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(50):
                work = work @ work * 1e-4
            array += 7
            assert client.store(ns, "", hashes, client.register(array).rows(ns)).stored.all()
        into = np.zeros((4, SIZE), np.uint8)
        assert client.load(ns, "", hashes, client.register(into).rows(ns)).loaded.all()
        assert (into == 7).all()
