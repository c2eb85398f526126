"""A real GPU's memory through a whole pool: cupy's and torch's arrays are stored and loaded, over each transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.client import Client, PoolNamespace
from tests.e2e.real_pool import RealPool, keys, payload
from tests.transfer.gpu.gpus import gpu_or_skip

pytestmark = pytest.mark.gpu

SIZE = 256 << 10
LAYERS, PARTS, COUNT = 8, 2, 48
PIECE = SIZE // (LAYERS * PARTS)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    gpu_or_skip()
    base: Path = tmp_path_factory.mktemp("gpu")
    pool = RealPool(base)
    yield pool
    pool.end()


@pytest.fixture(params=["shm", "tcp"])
def client(pool: RealPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(pool.address, transport=request.param, transfer_deadline_ms=20_000) as client:
        yield client


def opened(client: Client, name: str) -> PoolNamespace:
    return client.namespace(f"gpu-{name}-{client._choice.spec}", block_bytes=SIZE, block_tokens=16)


def healthy(client: Client) -> bool:
    report = client.health()
    staging = report["staging"]["cuda:0"]  # type: ignore[index]
    assert report["healthy"], report["problems"]
    return bool((staging["in_use"], staging["held"], staging["lost"], staging["failures"]) == (0, 0, 0, 0))


def test_rows_of_a_cupy_array(client: Client) -> None:
    cupy = gpu_or_skip()
    ns, hashes = opened(client, "rows"), keys(COUNT, "rows")
    data = payload(hashes, "", SIZE)
    source, target = cupy.asarray(data), cupy.zeros((COUNT, SIZE), cupy.uint8)
    stored = client.store(ns, "", hashes, client.register(source).rows(ns))
    assert stored.stored.all(), stored.reasons
    loaded = client.load(ns, "", hashes, client.register(target).rows(ns))
    assert loaded.loaded.all(), loaded.reasons
    assert np.array_equal(target.get(), data) and healthy(client)


def test_pages_of_torch_tensors(client: Client) -> None:
    """A tensor a layer, of K of all blocks and then V of all blocks, in bfloat16; layers are told of as they land."""
    gpu_or_skip()
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    ns, hashes = opened(client, "pages"), keys(COUNT, "pages")
    data = payload(hashes, "", SIZE)
    cut = data.reshape(COUNT, LAYERS, PARTS, PIECE).transpose(1, 2, 0, 3)

    def blocks_of(layers: list[Any]) -> Any:
        region = client.register(layers)
        table = np.empty((COUNT, LAYERS, PARTS, 2), np.int64)
        for layer, tensor in enumerate(layers):
            pages = tensor.data_ptr() - region.address + np.arange(PARTS * COUNT, dtype=np.int64) * PIECE
            table[:, layer, :, 0] = pages.reshape(PARTS, COUNT).T
        table[..., 1] = PIECE
        return region.view(ns, table.reshape(COUNT, LAYERS * PARTS, 2))

    def bytes_of(layer: Any) -> Any:
        return layer.view(torch.uint8).cpu().numpy().reshape(PARTS, COUNT, PIECE)

    source = [torch.from_numpy(part.copy()).cuda().view(torch.bfloat16) for part in cut]
    target = [torch.zeros_like(layer) for layer in source]
    assert client.store(ns, "", hashes, blocks_of(source)).stored.all()
    told: list[tuple[int, bool]] = []
    result = client.load(
        ns,
        "",
        hashes,
        blocks_of(target),
        parts=[(layer + 1) * PARTS * PIECE for layer in range(LAYERS)],
        landed=lambda layer, mask: told.append((layer, bool(mask.all()))),
    )
    assert result.loaded.all(), result.reasons
    assert told == [(layer, True) for layer in range(LAYERS)]
    assert all(np.array_equal(bytes_of(layer), part) for layer, part in zip(target, cut, strict=True))
    assert healthy(client)


def test_what_a_stream_has_queued_is_what_is_stored(client: Client) -> None:
    """The array is computed on a stream of the caller's, for a while; the store is asked for at once."""
    cupy = gpu_or_skip()
    ns, hashes = opened(client, "stream"), keys(8, "stream")
    stream = cupy.cuda.Stream(non_blocking=True)
    array, busy = cupy.zeros((8, SIZE), cupy.uint8), cupy.zeros(64 << 20, cupy.uint8)
    rows = client.register(array).rows(ns)
    cupy.cuda.Device(0).synchronize()
    with stream:
        for value in range(200):
            busy.fill(value)
        array.fill(7)
        assert client.store(ns, "", hashes, rows).stored.all()
    into = np.zeros((8, SIZE), np.uint8)
    assert client.load(ns, "", hashes, client.register(into).rows(ns)).loaded.all()
    assert (into == 7).all()
