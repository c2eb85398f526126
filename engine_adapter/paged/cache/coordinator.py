"""All KV cache groups of one engine as one: hits that every group has, room for every group or for none."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.blocks import KVCacheBlock
from kvstrata.engine_adapter.paged.cache.fixed_blocks import CrossAttentionManager, MambaManager
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kvstrata.engine_adapter.paged.cache.single_type import FullAttentionManager, SingleTypeManager
from kvstrata.engine_adapter.paged.cache.windowed import ChunkedLocalManager, SlidingWindowManager
from kvstrata.engine_adapter.paged.outputs import BlockIds
from kvstrata.engine_adapter.paged.request import Request

GroupBlockLists = tuple[list[KVCacheBlock], ...]  #: one list a KV cache group


def make_manager(spec: KVCacheSpec, group: int, pool: BlockPool, hash_block_size: int) -> SingleTypeManager:
    """The manager of the spec's kind."""
    match spec:
        case SlidingWindowSpec():
            return SlidingWindowManager(spec, group, pool, hash_block_size)
        case ChunkedLocalSpec():
            return ChunkedLocalManager(spec, group, pool, hash_block_size)
        case CrossAttentionSpec():
            return CrossAttentionManager(spec, group, pool, hash_block_size)
        case MambaSpec():
            return MambaManager(spec, group, pool, hash_block_size)
        case _:  # full attention and MLA: after its subclasses
            return FullAttentionManager(spec, group, pool, hash_block_size)


class KVCacheCoordinator:
    """One single-type manager a group of ``config``, in its order, over one pool.

    ``hash_block_size`` divides every group's block size: the tokens that one of the request's hashes covers.
    """

    def __init__(self, config: KVCacheConfig, pool: BlockPool, hash_block_size: int) -> None:
        self._pool = pool
        self._alignment = config.aligned_tokens
        self.managers = tuple(
            make_manager(group.spec, index, pool, hash_block_size) for index, group in enumerate(config.groups)
        )

    def find_longest_cache_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[GroupBlockLists, int]:
        """The blocks of every group for the longest prefix that all have, and its tokens: a multiple of
        ``aligned_tokens``, at most ``max_tokens``. Changes nothing.

        Each group shortens what the ones before it left, until a whole round changes nothing: the hit only
        shrinks, by an alignment at least, so this ends.
        """
        hit = max_tokens // self._alignment * self._alignment
        found: list[list[KVCacheBlock] | None] = [None] * len(self.managers)
        agreed = 0
        while agreed < len(self.managers):
            for index, manager in enumerate(self.managers):
                blocks = self._hit_of(manager, found[index], hashes, hit)
                found[index] = blocks
                length = len(blocks) * manager.block_size
                agreed = agreed + 1 if length == hit else 1
                hit = length
                if agreed >= len(self.managers):
                    break
        return tuple(blocks if blocks is not None else [] for blocks in found), hit

    def _hit_of(
        self, manager: SingleTypeManager, known: list[KVCacheBlock] | None, hashes: Sequence[bytes], hit: int
    ) -> list[KVCacheBlock]:
        """The group's hit of at most ``hit`` tokens; ``known``: its hit of some more."""
        if hit == 0:
            return []
        if known is not None and (manager.hits_can_be_cut or len(known) * manager.block_size == hit):
            return known[: hit // manager.block_size]
        return manager.find_longest_cache_hit(hashes, hit, self._alignment)

    def holds(self, request_id: str) -> bool:
        """Whether the request has tables."""
        return self.managers[0].has_table(request_id)

    def num_blocks_to_allocate(
        self, request_id: str, computed: GroupBlockLists, num_hit_tokens: int, num_tokens: int
    ) -> int:
        """Blocks that attaching and allocating would take out of the free queue, over all groups."""
        return sum(
            manager.num_blocks_to_allocate(request_id, blocks, num_hit_tokens, num_tokens)
            for manager, blocks in zip(self.managers, computed, strict=True)
        )

    def attach(self, request: Request, computed: GroupBlockLists) -> None:
        """Begin the request's tables with cached blocks; every group, before any :meth:`allocate`."""
        for manager, blocks in zip(self.managers, computed, strict=True):
            manager.attach(request, blocks)

    def allocate(self, request_id: str, num_hit_tokens: int, num_tokens: int) -> GroupBlockLists:
        """Extend every table to ``num_tokens`` slots; the entries added."""
        return tuple(manager.allocate(request_id, num_hit_tokens, num_tokens) for manager in self.managers)

    def release_unneeded(self, request_id: str, num_computed_tokens: int) -> None:
        """Give back what the request reads no more, and what a load did not bring."""
        for manager in self.managers:
            manager.drop_unloaded_tail(request_id, num_computed_tokens)
            manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        for manager in self.managers:
            manager.cache_blocks(request, num_tokens)

    def free(self, request_id: str) -> None:
        for manager in self.managers:
            manager.free(request_id)

    def block_ids(self, request_id: str) -> BlockIds:
        """The request's whole tables, empty when it has none. O(entries)."""
        return tuple([block.block_id for block in manager.table(request_id)] for manager in self.managers)

    def num_common_prefix_blocks(self, request_ids: Sequence[str]) -> list[int]:
        return [manager.num_common_prefix_blocks(request_ids) for manager in self.managers]

    def check(self) -> None:
        """Assert every structural invariant of all groups, and that no block is in tables of two of them."""
        owner: dict[int, int] = {}
        for manager in self.managers:
            manager.check()
            for block in manager.blocks_in_use():
                assert owner.setdefault(block.block_id, manager.group) == manager.group, f"{block} in two groups"
        assert len({manager.request_ids() for manager in self.managers}) == 1, "groups hold different requests"
