"""vLLM's block pool, as the scheduler side holds blocks of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from kvstrata.engine_adapter.vllm.capability import check_methods

Block = TypeVar("Block")


class VllmBlockPool(Protocol[Block]):
    """What is used of ``vllm.v1.core.block_pool.BlockPool``."""

    blocks: list[Block]

    def touch(self, blocks: Sequence[Block]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class PoolBlockHolder(Generic[Block]):
    """A :class:`~kvstrata.engine_adapter.connector.base.BlockHolder`: references on vLLM's blocks, by their ids."""

    def __init__(self, pool: VllmBlockPool[Block]) -> None:
        check_methods(pool, ("blocks", "touch", "free_blocks"), "block pool")
        self._pool = pool

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        # The tail first: what is freed first is evicted first.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
