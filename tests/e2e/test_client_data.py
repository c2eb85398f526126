"""Store and load through real processes: every transport, layout and tenant; every byte compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.client import BlockStatus, Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto.errors import FingerprintMismatch, Refused
from kvstrata.transfer.rdma.found import cma_problem, nixl_problem
from tests.e2e.real_pool import RealPool, keys, payload
from tests.waiting import until

SIZE = 64 << 10
NO_RAILS = nixl_problem() or cma_problem()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    rails = () if NO_RAILS else ("--rdma", "cma")
    pool = RealPool(tmp_path_factory.mktemp("pool"), nodes=2, options=rails)
    yield pool
    pool.end()


CMA = pytest.param("rdma-cma", marks=pytest.mark.skipif(bool(NO_RAILS), reason=NO_RAILS))


@pytest.fixture(params=["shm", "tcp", "auto", CMA])
def client(pool: RealPool, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(pool.address, transport=request.param, verify="always") as client:
        yield client


def space(client: Client, size: int = SIZE, group: str = "model/e2e"):  # type: ignore[no-untyped-def]
    return client.namespace(f"{group}/{size}", block_bytes=size, block_tokens=16)


def chain_of(request: pytest.FixtureRequest) -> str:
    return request.node.nodeid


def see(client: Client, ns: object, salt: str, hashes: bytes, count: int) -> None:
    until(lambda: client.lookup(ns, salt, hashes).hit_blocks == count)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["numpy", "shared"])
@pytest.mark.parametrize("size", [96, SIZE, 1 << 20])
def test_bytes_come_back(client: Client, request: pytest.FixtureRequest, memory: str, size: int) -> None:
    ns, hashes = space(client, size), keys(8, chain_of(request))
    data = payload(hashes, "t", size)
    source = client.allocate(data.nbytes) if memory == "shared" else client.register(np.zeros(data.nbytes, np.uint8))
    source.bytes[:] = data.reshape(-1)
    stored = client.store(ns, "t", hashes, source.rows(ns))
    assert stored.reasons == {"stored": 8}
    assert client.store(ns, "t", hashes, source.rows(ns)).reasons == {"already_present": 8}
    see(client, ns, "t", hashes, 8)
    into = np.zeros_like(data)
    loaded = client.load(ns, "t", hashes, client.register(into).rows(ns))
    assert loaded.loaded.all() and (into == data).all() and loaded.bytes_moved == data.nbytes
    transports = {node["transport"] for node in client.health()["nodes"]}  # type: ignore[attr-defined]
    assert transports and transports <= {"shm", "tcp", "rdma"}


def test_paged_memory(client: Client, request: pytest.FixtureRequest) -> None:
    """Blocks in pieces over layers, as an engine's cache has them, stored from one order, loaded to another."""
    ns, hashes, layers = space(client), keys(6, chain_of(request)), 8
    piece = SIZE // layers
    rng = np.random.default_rng(1)

    def table(order: np.ndarray) -> np.ndarray:
        offsets = np.empty((6, layers, 2), np.int64)
        offsets[:, :, 0] = (np.arange(layers) * 16 + order[:, None]) * piece
        offsets[:, :, 1] = piece
        return offsets

    cache, into = rng.integers(0, 256, 16 * SIZE, dtype=np.uint8), np.zeros(16 * SIZE, np.uint8)
    here, there = rng.permutation(16)[:6], rng.permutation(16)[:6]
    assert client.store(ns, "", hashes, client.register(cache).view(ns, table(here))).stored.all()
    assert client.load(ns, "", hashes, client.register(into).view(ns, table(there))).loaded.all()
    grid = (layers, 16, piece)
    assert (into.reshape(grid)[:, there] == cache.reshape(grid)[:, here]).all()
    untouched = np.setdiff1d(np.arange(16), there)
    assert not into.reshape(grid)[:, untouched].any()


def test_holes_stop_nothing(client: Client, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client), keys(9, chain_of(request))
    data = payload(hashes, "", SIZE)
    blocks = client.register(data.copy()).rows(ns)
    for low, high in ((0, 3), (5, 9)):
        assert client.store(ns, "", hashes[low * 16 : high * 16], blocks[low:high], first_index=low).stored.all()
    until(lambda: client.exists(ns, "", hashes).sum() == 7)
    found = client.lookup(ns, "", hashes)
    assert found.hit_blocks == 3 and found.present.tolist() == [True] * 3 + [False] * 2 + [True] * 4
    into = np.full_like(data, 0xA5)
    result = client.load(ns, "", hashes, client.register(into).rows(ns))
    assert result.loaded.tolist() == found.present.tolist() and result.reasons == {"loaded": 7, "missing": 2}
    assert (into[result.loaded] == data[result.loaded]).all()


def test_tenants_and_models_are_apart(client: Client, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client), keys(4, chain_of(request))
    other = space(client, group="model/another")
    into = np.full((4, SIZE), 0xA5, np.uint8)
    target = client.register(into)
    source = client.register(payload(hashes, "alice", SIZE))
    assert client.store(ns, "alice", hashes, source.rows(ns)).stored.all()
    see(client, ns, "alice", hashes, 4)
    for namespace, salt in ((ns, "bob"), (ns, ""), (other, "alice")):
        assert client.lookup(namespace, salt, hashes).hit_blocks == 0
        assert client.load(namespace, salt, hashes, target.rows(namespace)).reasons == {"missing": 4}
    assert (into == 0xA5).all()
    bobs = payload(hashes, "bob", SIZE)
    assert client.store(ns, "bob", hashes, client.register(bobs.copy()).rows(ns)).reasons == {"stored": 4}
    assert client.load(ns, "bob", hashes, target.rows(ns)).loaded.all() and (into == bobs).all()


def test_a_long_prefix_is_striped_over_the_nodes(client: Client, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client, 4096), keys(600, chain_of(request))
    data = payload(hashes, "", 4096)
    assert client.store(ns, "", hashes, client.register(data.copy()).rows(ns)).stored.all()
    see(client, ns, "", hashes, 600)
    into = np.zeros_like(data)
    with Client(client.health()["masters"][0]["address"], transport="tcp") as fresh:  # type: ignore[index]
        ns2 = space(fresh, 4096)
        result = fresh.load(ns2, "", hashes, fresh.register(into).rows(ns2))
        assert result.loaded.all() and (into == data).all()
        assert len(fresh.health()["nodes"]) == 2  # type: ignore[arg-type]


def test_remove_is_a_miss_everywhere(client: Client, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client), keys(4, chain_of(request))
    source = client.register(payload(hashes, "", SIZE))
    client.store(ns, "", hashes, source.rows(ns))
    see(client, ns, "", hashes, 4)
    result = client.remove(ns, "", hashes[:32])
    assert result.removed == 2 and result.complete
    into = client.register(np.zeros((4, SIZE), np.uint8))
    assert client.load(ns, "", hashes, into.rows(ns)).loaded.tolist() == [False, False, True, True]


def test_views_are_the_bytes_themselves(client: Client, pool: RealPool, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client), keys(5, chain_of(request))
    data = payload(hashes, "", SIZE)
    client.store(ns, "", hashes[:64], client.register(data[:4].copy()).rows(ns))
    see(client, ns, "", hashes, 4)
    transport = client.health()["nodes"][0]["transport"]  # type: ignore[index]
    if transport != "shm":
        with pytest.raises(Refused, match="shm"), client.view(ns, "", hashes):
            pass
        return
    with client.view(ns, "", hashes) as view:
        assert [block is None for block in view] == [False] * 4 + [True]
        for i in range(4):
            block = view[i]
            assert block is not None and (block == data[i]).all() and not block.flags.writeable
        assert view.valid()
    assert not view.valid()


def test_prefetch_then_load(client: Client, request: pytest.FixtureRequest) -> None:
    ns, hashes = space(client), keys(4, chain_of(request))
    client.store(ns, "", hashes, client.register(payload(hashes, "", SIZE)).rows(ns))
    see(client, ns, "", hashes, 4)
    found = client.prefetch(ns, "", hashes).wait()
    assert found is not None and found.hit_blocks == 4
    into = np.zeros((4, SIZE), np.uint8)
    loading = client.load_async(ns, "", hashes, client.register(into).rows(ns))
    assert loading.result().loaded.all() and (into == payload(hashes, "", SIZE)).all()


def test_threads_and_clients_at_once(pool: RealPool) -> None:
    errors: list[BaseException] = []

    def work(client: Client, number: int) -> None:
        try:
            ns = space(client, 4096)
            into = np.zeros((16, 4096), np.uint8)
            target = client.register(into)
            for turn in range(8):
                salt = f"t{number % 3}"
                hashes = keys(16, f"threads/{number % 4}/{turn}")  # shared by two threads each: stores collide
                data = payload(hashes, salt, 4096)
                stored = client.store(ns, salt, hashes, client.register(data.copy()).rows(ns))
                assert set(stored.reasons) <= {"stored", "already_present", "in_flight"}, stored.reasons
                into[:] = 0
                loaded = client.load(ns, salt, hashes, target.rows(ns))
                assert loaded.loaded[stored.stored].all(), (loaded.reasons, stored.reasons)
                assert (into[loaded.loaded] == data[loaded.loaded]).all()
        except BaseException as error:  # noqa: BLE001  shown below
            errors.append(error)

    with Client(pool.address, transport="shm", verify="always") as one, Client(pool.address, transport="tcp") as two:
        threads = [threading.Thread(target=work, args=((one, two)[n % 2], n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_one_layout_a_group(client: Client) -> None:
    space(client)
    with pytest.raises(FingerprintMismatch):
        client.namespace(f"model/e2e/{SIZE}", block_bytes=SIZE * 2, block_tokens=16)


def test_a_full_node_evicts_or_says_full(client: Client, request: pytest.FixtureRequest) -> None:
    ns = space(client, 1 << 20)
    data = np.ones((32, 1 << 20), np.uint8)
    blocks = client.register(data).rows(ns)
    for turn in range(6):  # 192 MiB into a pool of 128
        result = client.store(ns, "", keys(32, f"{chain_of(request)}/{turn}"), blocks)
        assert result.stored.sum() >= 16 and not (result.status == BlockStatus.UNKNOWN).any(), result.reasons


def test_the_admin_client_sees_it_all(pool: RealPool) -> None:
    with Client(pool.address, name="an engine") as client, AdminClient(pool.address) as admin:
        space(client, group="model/admin")
        assert admin.health().healthy and {row.state for row in admin.nodes()} == {"active"}
        assert "an engine" in {row.name for row in admin.clients()}
        assert any(row.spec.group.startswith("model/admin") for row in admin.namespaces())
