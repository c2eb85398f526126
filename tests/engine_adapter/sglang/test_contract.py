"""The backend as SGLang makes and calls it: its own factory, base class, configuration and names of pages."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstrata.proto.errors import InvalidArgument, Refused
from tests.e2e.real_pool import RealPool
from tests.engine_adapter.sglang.stand_ins import ArrayPool
from tests.waiting import until

pytest.importorskip("sglang", exc_type=ImportError)
torch = pytest.importorskip("torch")
hicache = pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
backends = pytest.importorskip("sglang.srt.mem_cache.storage", exc_type=ImportError)


class TensorPool(ArrayPool):
    """The same memory as SGLang has it: one tensor."""

    @property
    def kv_buffer(self) -> Any:
        return torch.from_numpy(self.bytes).view(torch.bfloat16)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    real = RealPool(tmp_path_factory.mktemp("pool"))
    yield real
    real.end()


def extra_config(masters: str, **settings: object) -> dict[str, object]:
    """What ``--hicache-storage-backend-extra-config`` says, after SGLang has read it."""
    text = {
        "backend_name": "kvstrata",
        "module_path": "kvstrata.engine_adapter.sglang",
        "class_name": "KVStrataStorage",
        "interface_v1": 1,
        "kvstrata": {"masters": masters, **settings},
    }
    return dict(json.loads(json.dumps(text)))


def created(masters: str, host: TensorPool, extra: dict[str, object] | None = None, **config: object) -> Any:
    """As ``HiCacheController.attach_storage_backend`` does."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    made = hicache.HiCacheStorageConfig(
        **{
            **ranks,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": host.layout == "page_first",
            "model_name": "org/model",
            "extra_config": extra or extra_config(masters),
            **config,
        }
    )
    backend = backends.StorageBackendFactory.create_backend("dynamic", made, host)
    try:
        backend.register_mem_pool_host(host)
        backend.register_mem_host_pool_v2(host, hicache.PoolName.KV)
        backend.on_host_pools_registered()
    except Exception:
        backend.close()
        raise
    return backend


def chain(tokens: list[int], page_size: int, prior: str | None = None) -> list[str]:
    """SGLang's own names of the pages of these tokens."""
    from sglang.srt.mem_cache.utils import get_hash_str

    return list(get_hash_str(array("q", tokens), prior, page_size=page_size))


def test_the_class_is_a_whole_backend() -> None:
    from kvstrata.engine_adapter.sglang import KVStrataStorage

    assert issubclass(KVStrataStorage, hicache.HiCacheStorage) and not KVStrataStorage.__abstractmethods__


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_one_engine_reads_what_another_wrote(pool: RealPool, layout: str) -> None:
    here, there = TensorPool(layout).fill(1), TensorPool(layout).fill(2)
    writer, reader = created(pool.address, here), created(pool.address, there)
    keys = chain(list(range(20)), here.page_size)
    assert len(keys) == 5 and len(set(keys)) == 5
    source, target = (
        torch.from_numpy(host.slots_of(*pages)) for host, pages in ((here, (4, 1, 9, 3, 7)), (there, (0, 5, 2, 6, 8)))
    )
    info = hicache.HiCacheStorageExtraInfo(prefix_keys=[])
    assert reader.batch_exists(keys, info) == 0 and reader.exists(keys[0]) is False
    until(lambda: writer.batch_set_v1(keys, source, info) == [True] * 5)
    until(lambda: reader.batch_exists(keys, info) == 5)
    assert reader.exists(keys[0]) is True
    until(lambda: reader.batch_get_v1(keys, target, info) == [True] * 5)
    assert (there.tokens(target.numpy()) == here.tokens(source.numpy())).all()
    for backend in (writer, reader):
        backend.close()
    assert reader.batch_exists(keys) == 0 and reader.batch_get_v1(keys, target) == [False] * 5


def test_the_chain_goes_on_where_the_prefix_ends(pool: RealPool) -> None:
    host = TensorPool().fill(3)
    backend = created(pool.address, host)
    first = chain(list(range(8)), 4)
    second = chain(list(range(8, 16)), 4, first[-1])
    assert first + second == chain(list(range(16)), 4)
    slots = torch.from_numpy(host.slots_of(0, 1, 2, 3))
    until(lambda: all(backend.batch_set_v1(first, slots[:8], hicache.HiCacheStorageExtraInfo(prefix_keys=[]))))
    until(lambda: all(backend.batch_set_v1(second, slots[8:], hicache.HiCacheStorageExtraInfo(prefix_keys=first))))
    until(lambda: backend.batch_exists(first + second) == 4)
    backend.close()


def test_tenants_and_adapters_have_names_of_their_own() -> None:
    """What keeps tenants apart here: SGLang begins a chain at the request's ``extra_key`` and ``cache_salt``."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    seeds = [storage_namespace_seed(*of) for of in ((None, None), ("lora", None), (None, "tenant"), (None, "other"))]
    assert len({chain(list(range(4)), 4, seed)[0] for seed in seeds}) == 4


def test_an_absent_pool_is_misses() -> None:
    host = TensorPool()
    backend = created("127.0.0.1:1", host)
    keys, slots = chain(list(range(8)), 4), torch.from_numpy(host.slots_of(0, 1))
    assert backend.batch_exists(keys) == 0 and not backend.exists(keys[0])
    assert backend.batch_get_v1(keys, slots) == backend.batch_set_v1(keys, slots) == [False, False]
    backend.close()


def test_a_node_that_dies_is_misses_and_a_new_one_is_used(tmp_path: Path) -> None:
    own = RealPool(tmp_path)
    try:
        host = TensorPool().fill(4)
        backend = created(own.address, host)
        keys, slots = chain(list(range(8)), 4), torch.from_numpy(host.slots_of(0, 1))
        until(lambda: all(backend.batch_set_v1(keys, slots)))
        own.node().signal(9)
        assert backend.batch_get_v1(keys, slots) == [False, False]
        own.start_node(1)
        until(lambda: all(backend.batch_set_v1(keys, slots)), 30)
        until(lambda: all(backend.batch_get_v1(keys, slots)), 30)
        backend.close()
    finally:
        own.end()


def test_what_would_silently_give_no_hits_is_refused(pool: RealPool) -> None:
    no_v1 = {key: value for key, value in extra_config(pool.address).items() if key != "interface_v1"}
    with pytest.raises(InvalidArgument, match="interface_v1"):
        created(pool.address, TensorPool(), no_v1)
    with pytest.raises(InvalidArgument, match="did you mean 'namespace'"):
        created(pool.address, TensorPool(), extra_config(pool.address, namespce="x"))
    with pytest.raises(InvalidArgument, match="names no model"):
        created(pool.address, TensorPool(), model_name=None)
    split: Any = SimpleNamespace(layout="page_first_kv_split", kv_buffer=None)
    with pytest.raises(InvalidArgument, match="several buffers or none"):
        created(pool.address, split)


def test_pools_beside_the_kv_and_clearing_are_refused(pool: RealPool) -> None:
    backend = created(pool.address, TensorPool())
    with pytest.raises(InvalidArgument, match="'mamba'"):
        backend.register_mem_host_pool_v2(TensorPool(), hicache.PoolName.MAMBA)
    with pytest.raises(Refused, match="shared"):
        backend.clear()
    backend.close()


def real_pool_host(layout: str, seed: int) -> Any:
    """SGLang's own host pool for K and V: 3 layers, 64 slots in pages of 4, 2 heads of 8, in its own memory."""
    info = pytest.importorskip("sglang.srt.mem_cache.device_pool_info", exc_type=ImportError)
    mha = pytest.importorskip("sglang.srt.mem_cache.pool_host.mha", exc_type=ImportError)
    layers = tuple(torch.zeros(64, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    device = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=layers, v=layers, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=info.KVBufferLayout.NHD
        ),
        page_size=4,
        head_num=2,
        head_dim=8,
        v_head_dim=8,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    host = mha.MHATokenToKVPoolHost(
        device, 1.0, 0, 4, layout, pin_memory=False,
        device_capacity_tokens=64, start_layer=0, end_layer=3, host_token_capacity=64,
    )  # fmt: skip
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return host


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_of_sglangs_own_host_pool(pool: RealPool, layout: str) -> None:
    here, there = real_pool_host(layout, 1), real_pool_host(layout, 2)
    writer, reader = created(pool.address, here), created(pool.address, there)
    keys = chain(list(range(12)), 4)
    source, target = (torch.from_numpy(ArrayPool().slots_of(*pages)) for pages in ((9, 2, 5), (0, 7, 3)))
    kept = there.get_data_page(4).clone()
    until(lambda: all(writer.batch_set_v1(keys, source)))
    until(lambda: reader.batch_exists(keys) == 3)
    until(lambda: all(reader.batch_get_v1(keys, target)))
    for from_slot, to_slot in zip(source.tolist()[::4], target.tolist()[::4], strict=True):
        assert torch.equal(there.get_data_page(to_slot), here.get_data_page(from_slot))
    assert torch.equal(there.get_data_page(4), kept)
    for backend in (writer, reader):
        backend.close()
