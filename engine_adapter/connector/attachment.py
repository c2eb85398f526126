"""How one rank is attached to the pool: a client, the rank's KV memory registered with it, its namespaces.

A group has a namespace for each of the rank's shards, all of one weight epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvstrata.client.namespace import PoolNamespace
from kvstrata.engine_adapter.connector.chunks import Chunk
from kvstrata.engine_adapter.connector.layout import BlockPieces, EngineMemory, PoolLayout
from kvstrata.engine_adapter.connector.pool_client import PoolClient
from kvstrata.proto.errors import InvalidArgument, KVError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.gpu.runtime import Event
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.regions import BlockView, Region

log = get_logger(__name__)

#: Of one group: one a shard.
Namespaces = tuple[PoolNamespace, ...]


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
        if not 0 <= rank < layout.distinct_ranks:
            raise InvalidArgument(
                f"rank {rank}: the layout has {layout.shard_count} shards, {layout.shards_per_rank} a rank"
            )
        self._layout = layout
        self._rank = rank
        self._connect = connect
        self._engine_memory = engine_memory
        self._region: Region | None = None
        #: The generation of the engine's weights, and its namespaces: one object, so that no call mixes two.
        self._opened: tuple[int, dict[int, Namespaces]] = (0, {})
        self._views: dict[int, BlockView] = {}  # where a rank has one shard: all blocks
        self._shards: dict[int, tuple[BlockPieces, ...]] = {}  # where it has several
        self.client: PoolClient | None = None
        self.memory: npt.NDArray[np.uint8]
        try:
            client = connect()
        except InvalidArgument:
            raise
        except KVError as error:
            log.warning("pool absent: no connection at the start", reason=f"{type(error).__name__}: {error}", rank=rank)
            self.memory = engine_memory.bytes if engine_memory else np.zeros(layout.memory_bytes, np.uint8)
        else:
            try:
                if engine_memory is None:
                    self._region = client.allocate(layout.memory_bytes)  # a node on this host maps it
                else:
                    self._region = client.register(engine_memory.registered, staged=engine_memory.staged)
            except BaseException:
                client.close()
                raise
            self.memory = self._region.bytes if self._region.memory.on_host else np.zeros(0, np.uint8)
            self.client = client

    def complete(self) -> PoolClient:
        """Do what is not done yet; returns the client. Raises the :class:`KVError` that stands in the way.

        A namespace that a master has confirmed is kept as it is: its weight epoch is this engine's, whatever the
        pool's becomes, until :meth:`renew`.
        """
        if self.client is None:
            client = self._connect()
            own = self._engine_memory
            try:
                if own is None:
                    self._region = client.register(self.memory)
                else:
                    self._region = client.register(own.registered, staged=own.staged)
            except BaseException:
                client.close()
                raise
            self.client = client
        # What is opened while another thread renews is of the older weights, and must not be found by the new ones.
        namespaces = self._opened[1]
        for index, group in enumerate(self._layout.groups):
            known = namespaces.get(index)
            if group.poolable and (known is None or known[0].pin.epoch is None):
                namespaces[index] = self._open(self.client, index)
        return self.client

    @property
    def generation(self) -> int:
        """How often the engine's weights were new."""
        return self._opened[0]

    def renew(self) -> None:
        """The engine's weights are new: :meth:`complete` opens every namespace anew. From any thread."""
        self._opened = (self._opened[0] + 1, {})

    def _open(self, client: PoolClient, index: int) -> Namespaces:
        assert self._region is not None
        group = self._layout.groups[index]
        opened: list[PoolNamespace] = []
        for shard in self._layout.shards(self._rank):
            namespace = client.namespace(
                group.fingerprint,
                block_bytes=self._layout.shard_bytes(index),
                block_tokens=group.block_tokens,
                hash_bytes=self._layout.hash_bytes,
                shard=shard,
                shard_count=self._layout.shard_count,
            )
            if opened:  # an epoch that began in between is not these weights' either
                if namespace.pin.epoch is not None:
                    opened[0].pin.learn(namespace.pin.epoch)
                namespace = replace(namespace, pin=opened[0].pin)
            opened.append(namespace)
        self._find_blocks(self._region, index, opened[0])
        return tuple(opened)

    def _find_blocks(self, region: Region, index: int, namespace: PoolNamespace) -> None:
        own, each = self._engine_memory, self._layout.shards_per_rank
        if index in self._views or index in self._shards:
            return
        if each == 1:
            table = own.tables[index] if own is not None else self._layout.descriptors(index)
            self._views[index] = region.view(namespace, table)
        elif own is not None:
            self._shards[index] = own.shards[index]
        else:
            self._shards[index] = tuple(self._layout.shard_pieces(index, shard) for shard in range(each))

    def namespaces(self, group: int, generation: int | None = None) -> Namespaces:
        """One for each of the rank's shards. None of them while they were never opened, for a group that is not pooled,
        and when ``generation`` is not of now."""
        now, namespaces = self._opened
        return namespaces.get(group, ()) if generation in (None, now) else ()

    def any_namespaces(self) -> Namespaces:
        """Those of some group; none while no group's were opened."""
        return next(iter(self._opened[1].values()), ())

    def rows(self, chunk: Chunk, index: int, namespace: PoolNamespace) -> BlockView:
        """The engine's blocks that a chunk names, as far as they are of the rank's ``index``-th shard, which is
        ``namespace``'s."""
        ids = np.array(chunk.blocks.block_ids[chunk.start : chunk.stop], np.int64)
        group = chunk.blocks.group
        if self._layout.shards_per_rank == 1:
            return self._views[group][ids].coming_after(chunk.after)
        assert self._region is not None
        return self._region.view(namespace, self._shards[group][index].rows(ids)).coming_after(chunk.after)

    def mark(self) -> Event | None:
        """What the engine's stream has queued by now, in the calling thread; None for memory of the host.

        Raises :class:`KVError` when the device fails.
        """
        own = self._engine_memory
        return runtime_of(own.device[0].memory).mark() if own is not None and own.device else None

    def layer_ends(self, group: int) -> tuple[int, ...]:
        """Where each layer's pages end in a pool block of the group; one end for all where that is not known."""
        own = self._engine_memory
        if own is None or not own.layer_ends:
            return self._layout.layer_ends(group)
        return tuple(end // self._layout.shards_per_rank for end in own.layer_ends[group])

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
