"""Block tables of layers that read only part of what came before: a sliding window, or the token's own chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.blocks import KVCacheBlock
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import ChunkedLocalSpec, SlidingWindowSpec
from kvstrata.engine_adapter.paged.cache.single_type import SingleTypeManager


class WindowedManager(SingleTypeManager):
    """Tokens before ``first_needed_token`` are not read: their blocks are given back, and a hit does without them."""

    @abstractmethod
    def first_needed_token(self, num_computed_tokens: int) -> int:
        """Position of the first token that the token at position ``num_computed_tokens`` reads."""

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return self.first_needed_token(num_computed_tokens) // self.block_size

    def find_longest_cache_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[KVCacheBlock]:
        # From the longest end down. ``found`` are the blocks that end at ``end``, last first. A hole below them
        # ends every hit whose window reaches over it: the next one to try ends at or before the hole.
        end = max_tokens // alignment * alignment
        found: list[KVCacheBlock] = []
        while end > 0:
            index = end // self.block_size - len(found) - 1
            if index < self.first_needed_block(end):
                return [self._pool.null_block] * (index + 1) + found[::-1]
            block = self._cached(hashes, index)
            if block is None:
                end, found = index * self.block_size // alignment * alignment, []
            else:
                found.append(block)
        return []


class SlidingWindowManager(WindowedManager):
    """A token reads itself and the ``sliding_window - 1`` tokens before it."""

    def __init__(self, spec: SlidingWindowSpec, group: int, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(spec, group, pool, hash_block_size)
        self._window = spec.sliding_window

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self._window + 1, 0)


class ChunkedLocalManager(WindowedManager):
    """A token reads its own chunk only, up to itself. A hit that ends with a chunk needs no block at all."""

    def __init__(self, spec: ChunkedLocalSpec, group: int, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(spec, group, pool, hash_block_size)
        self._chunk = spec.chunk_size

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self._chunk * self._chunk
