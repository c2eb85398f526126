"""What the worker side uses of the client: a protocol, so that tests can script one, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.client import Client
from kvstrata.client.namespace import PoolNamespace
from kvstrata.client.prefetching import Prefetch
from kvstrata.client.results import LoadResult, Lookup, StoreResult
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.transfer.gpu.memory import Buffer
from kvstrata.transfer.regions import BlockView, Region


class BlockClient(Protocol):
    """Blocks in and out, as :class:`kvstrata.client.Client` moves them."""

    def lookup(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes, *, request: str = "") -> Lookup: ...
    def load(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: bytes,
        blocks: BlockView,
        *,
        parts: Sequence[int] = (),
        landed: Callable[[int, npt.NDArray[np.bool_]], None] | None = None,
    ) -> LoadResult: ...
    def store(
        self,
        namespace: PoolNamespace,
        cache_salt: str,
        hashes: bytes,
        blocks: BlockView,
        parent: bytes | None,
        first_index: int,
        *,
        parts: Sequence[int] = (),
        written: Callable[[int, float], bool] | None = None,
    ) -> StoreResult: ...


class PoolClient(BlockClient, Protocol):
    """All that the worker side uses of :class:`kvstrata.client.Client`."""

    def namespace(
        self, group: str, *, block_bytes: int, block_tokens: int, hash_bytes: int, shard: int, shard_count: int
    ) -> PoolNamespace: ...
    def allocate(self, nbytes: int) -> Region: ...
    def register(self, buffer: npt.NDArray[np.uint8] | tuple[Buffer, ...], *, staged: bool = False) -> Region: ...
    def unregister(self, region: Region) -> None: ...
    def prefetch(self, namespace: PoolNamespace, cache_salt: str, hashes: bytes) -> Prefetch: ...
    def health(self) -> dict[str, object]: ...
    def close(self) -> None: ...


def open_client(config: PoolConfig, name: str) -> PoolClient:
    """A client whose calls take at most :func:`transfer_s`. Raises what :class:`Client` raises."""
    return Client(
        config.masters,
        transport=config.transport,
        verify=config.verify,
        transfer_deadline_ms=max(1, int(transfer_s(config) * 1e3)),
        name=name,
        **config.shown(),
    )


def transfer_s(config: PoolConfig) -> float:
    """Seconds one call to the pool may take: half of a load's time, so that a load that begins its last call
    within the other half ends in time."""
    return config.load_deadline_ms / 2e3
