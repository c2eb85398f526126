"""How one rank is attached to the pool: a client, the rank's KV memory registered with it, its namespaces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstrata.client.namespace import PoolNamespace
from kvstrata.engine_adapter.connector.chunks import Chunk
from kvstrata.engine_adapter.connector.layout import EngineMemory, PoolLayout
from kvstrata.engine_adapter.connector.pool_client import PoolClient
from kvstrata.proto.errors import InvalidArgument, KVError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.regions import BlockView, Region

log = get_logger(__name__)


class Attachment:
    """``memory`` u8[layout.memory_bytes], zeroed, is the engine's to use, with or without a client; ``engine_memory``
    stands in for it where the engine has memory of its own.

    ``connect`` makes the client. Its :class:`InvalidArgument` is a mistake in the configuration and is raised;
    after any other error :meth:`complete` tries again. Only one thread may complete it at a time.
    """

    def __init__(
        self,
        layout: PoolLayout,
        rank: int,
        connect: Callable[[], PoolClient],
        engine_memory: EngineMemory | None = None,
    ) -> None:
        if not 0 <= rank < layout.shard_count:
            raise InvalidArgument(f"rank {rank}: the layout has {layout.shard_count} shards, one a rank")
        self._layout = layout
        self._rank = rank
        self._connect = connect
        self._engine_memory = engine_memory
        self._region: Region | None = None
        self._namespaces: dict[int, PoolNamespace] = {}
        self._views: dict[int, BlockView] = {}
        self.client: PoolClient | None = None
        self.memory: npt.NDArray[np.uint8]
        try:
            client = connect()
        except InvalidArgument:
            raise
        except KVError as error:
            log.warning("pool absent: serving without it", reason=f"{type(error).__name__}: {error}", rank=rank)
            self.memory = engine_memory.bytes if engine_memory else np.zeros(layout.memory_bytes, np.uint8)
        else:
            if engine_memory is not None:
                self._region = client.register(engine_memory.bytes)
            else:
                self._region = client.allocate(layout.memory_bytes)  # a node on this host maps it
            self.memory = self._region.bytes
            self.client = client

    def complete(self) -> PoolClient:
        """Do what is not done yet; returns the client. Raises the :class:`KVError` that stands in the way.

        A namespace that a master has confirmed is kept as it is: its weight epoch is this engine's, whatever the
        pool's becomes.
        """
        if self.client is None:
            client = self._connect()
            self._region = client.register(self.memory)
            self.client = client
        for index, group in enumerate(self._layout.groups):
            known = self._namespaces.get(index)
            if group.poolable and (known is None or known.pin.epoch is None):
                self._open(self.client, index)
        return self.client

    def _open(self, client: PoolClient, index: int) -> None:
        assert self._region is not None
        group = self._layout.groups[index]
        opened = client.namespace(
            group.fingerprint,
            block_bytes=self._layout.block_bytes(index),
            block_tokens=group.block_tokens,
            hash_bytes=self._layout.hash_bytes,
            shard=self._rank,
            shard_count=self._layout.shard_count,
        )
        if index not in self._views:
            own = self._engine_memory
            table = own.tables[index] if own is not None else self._layout.descriptors(index)
            self._views[index] = self._region.view(opened, table)
        self._namespaces[index] = opened

    def namespace(self, group: int) -> PoolNamespace | None:
        """None while it was never opened, and for a group that is not pooled."""
        return self._namespaces.get(group)

    def any_namespace(self) -> PoolNamespace | None:
        return next(iter(self._namespaces.values()), None)

    def rows(self, chunk: Chunk) -> BlockView:
        """The engine's blocks that a chunk names; its group's namespace is open."""
        ids = np.array(chunk.blocks.block_ids[chunk.start : chunk.stop], np.int64)
        return self._views[chunk.blocks.group][ids]

    def close(self) -> None:
        """Unregister the memory, which stays the caller's, and close the client. No call may be under way."""
        if self.client is None:
            return
        try:
            if self._region is not None:
                self.client.unregister(self._region)
        except KVError as error:
            log.warning("memory not unregistered", reason=f"{type(error).__name__}: {error}")
        self.client.close()
