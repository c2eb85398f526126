"""Block tables whose length does not grow with the request: an encoder's KV, a recurrent state.

Both are right for allocation and admission. Neither is found by prefix: an encoder's KV depends on the encoder's
input, and of a state only the latest is kept, so one such group ends every hit of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.blocks import KVCacheBlock
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import CrossAttentionSpec, MambaSpec
from kvstrata.engine_adapter.paged.cache.single_type import SingleTypeManager


class FixedBlocksManager(SingleTypeManager):
    """All of a request's blocks from its first allocation to its end."""

    cacheable = False

    def __init__(
        self, spec: CrossAttentionSpec | MambaSpec, group: int, pool: BlockPool, hash_block_size: int, num_blocks: int
    ) -> None:
        super().__init__(spec, group, pool, hash_block_size)
        self._num_blocks = num_blocks

    def num_table_blocks(self, num_tokens: int) -> int:
        return self._num_blocks

    def find_longest_cache_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[KVCacheBlock]:
        return []

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return 0

    def num_common_prefix_blocks(self, request_ids: Sequence[str]) -> int:
        return 0


class CrossAttentionManager(FixedBlocksManager):
    """KV of at most ``max_encoder_len`` encoder tokens."""

    def __init__(self, spec: CrossAttentionSpec, group: int, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(spec, group, pool, hash_block_size, -(-spec.max_encoder_len // spec.block_size))


class MambaManager(FixedBlocksManager):
    """One block: the state after the last computed token."""

    def __init__(self, spec: MambaSpec, group: int, pool: BlockPool, hash_block_size: int) -> None:
        super().__init__(spec, group, pool, hash_block_size, 1)
