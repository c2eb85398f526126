"""The class that SGLang loads, one object for each rank: its interface on a :class:`PageStore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from kvstrata.client import Client
from kvstrata.engine_adapter.sglang.host_pages import HostPages
from kvstrata.engine_adapter.sglang.page_store import PageStore
from kvstrata.engine_adapter.sglang.settings import read_settings
from kvstrata.proto.errors import InvalidArgument, Refused

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
    from sglang.srt.mem_cache.pool_host import HostKVCache


class KVStrataStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """Pages of the host pool that SGLang registers, in the pool.

    What would silently give no hits is refused at the start. Later nothing raises: a pool that is absent, slow or gone
    gives misses until it is back.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: dict[str, object] | None = None) -> None:
        self._config = storage_config
        self._settings = read_settings(storage_config.extra_config or {})
        self._client = Client(
            self._settings.masters,
            transport=self._settings.transport,
            verify=self._settings.verify,
            transfer_deadline_ms=self._settings.deadline_ms,
            name=f"sglang-tp{storage_config.tp_rank}-pp{storage_config.pp_rank}",
            **self._settings.shown(),
        )
        self._store: PageStore | None = None

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Name the host pool's memory for transfers. Raises :class:`Refused` where that cannot work."""
        super().register_mem_pool_host(mem_pool_host)
        buffer = mem_pool_host.kv_buffer
        if not isinstance(buffer, torch.Tensor):
            raise InvalidArgument(
                f"{type(mem_pool_host).__name__} with layout {mem_pool_host.layout} keeps KV in several buffers or "
                "none: kvstrata takes pools with one"
            )
        flat = buffer.detach().reshape(-1).view(torch.uint8).numpy()
        pages = HostPages(mem_pool_host, buffer.data_ptr(), torch.arange(mem_pool_host.page_size))
        named = pages.namespace(self._config, self._settings.namespace)
        namespace = self._client.namespace(
            named.group,
            block_bytes=named.block_bytes,
            block_tokens=named.block_tokens,
            hash_bytes=named.hash_bytes,
            shard=named.shard,
            shard_count=named.shard_count,
        )
        self._store = PageStore(self._client, namespace, self._client.register(flat), pages)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Raises :class:`InvalidArgument` for what is kept beside the KV: without it, its KV is of no use."""
        if host_pool_name != PoolName.KV:
            raise InvalidArgument(
                f"this model keeps a pool {str(host_pool_name)!r} beside its KV (a state, a window, an index or a "
                "draft model's KV): kvstrata stores no such pools"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Pages from the start that every rank has."""
        return self._pages.hit_pages(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Into the slots of the host pool, without a copy between."""
        return self._pages.load(keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Out of the slots of the host pool, without a copy between."""
        before = (extra_info.prefix_keys or ()) if extra_info else ()
        return self._pages.store(keys, host_indices, before)

    # What follows is the interface before v1. SGLang calls it only without "interface_v1", which is refused: its pages
    # have another order of bytes.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    # -----------------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Raises :class:`Refused`: SGLang reports it, and the pool keeps what others use too."""
        raise Refused('the pool is shared: an engine does not clear it; name another "namespace" to start afresh')

    def close(self) -> None:
        """Give connections and registered memory back. Later calls are misses."""
        self._client.close()

    @property
    def _pages(self) -> PageStore:
        if self._store is None:
            raise InvalidArgument("no host pool was registered")
        return self._store
