"""The scheduler's view of the KV cache: what is cached already, slots for what is next, everything back at the end."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.capacity import blocks_for_request
from kvstrata.engine_adapter.paged.cache.coordinator import GroupBlockLists, KVCacheCoordinator
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.cache.kv_events import KVEvent
from kvstrata.engine_adapter.paged.outputs import BlockIds
from kvstrata.engine_adapter.paged.request import Request
from kvstrata.proto.errors import InvalidArgument


class ComputedBlocks(NamedTuple):
    """Cached blocks for the first ``num_tokens`` tokens of a request, one list a group (null blocks where nothing
    is read). Holds no references: it is good until blocks are next allocated for anyone."""

    blocks: GroupBlockLists
    num_tokens: int


class KVCacheManager:
    """Block tables of all requests of one engine, over one :class:`BlockPool`. One thread.

    ``hash_block_size``: tokens that each of a request's ``block_hashes`` covers; it divides every group's block
    size. Their greatest common divisor when not given.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        hash_block_size: int | None = None,
        enable_prefix_caching: bool = True,
        events: bool = False,
    ) -> None:
        self.config = config.validated()
        sizes = [group.spec.block_size for group in config.groups]
        self.hash_block_size = hash_block_size or gcd(*sizes)
        if self.hash_block_size < 1 or any(size % self.hash_block_size for size in sizes):
            raise InvalidArgument(f"hash_block_size is {self.hash_block_size}: it must divide block sizes {sizes}")
        self.pool = BlockPool(config.num_blocks, enable_prefix_caching=enable_prefix_caching, events=events)
        self._coordinator = KVCacheCoordinator(config, self.pool, self.hash_block_size)
        self._nothing = ComputedBlocks(tuple([] for _ in config.groups), 0)

    @property
    def usage(self) -> float:
        """Share of the blocks that is referenced, 0 to 1."""
        return self.pool.usage

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix that all groups have: whole aligned blocks, at most ``num_tokens - 1`` tokens,
        since the last one must be computed for its logits. Changes nothing. O(blocks)."""
        if not self.pool.enable_prefix_caching:
            return self._nothing
        hit = self._coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return ComputedBlocks(*hit)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks | None = None,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> BlockIds | None:
        """Slots for the request's next tokens in every group, or in none.

        ::

            first allocation     |<- computed ->|<- external ->|<- new ->|<- lookahead ->|
            a running request    |<--- request.num_computed_tokens -->|<- new ->|<- lookahead ->|

        ``computed``: from :meth:`get_computed_blocks`, just before; only for a request without tables, as
        ``num_external_tokens``, which a load will bring: pass ``delay_cache_blocks`` with them, and call
        :meth:`cache_blocks` when the KV is there.

        Returns the block ids appended to each table after the computed ones (0 is the null block), or None when
        too few blocks are free. Then nothing has changed, but that blocks which the request reads no more, or that
        a load did not bring, may have been given back.
        """
        request_id = request.request_id
        running = self._coordinator.holds(request_id)
        if running:
            assert computed is None and not num_external_tokens, f"{request} has its blocks: nothing to attach"
            num_hit_tokens = request.num_computed_tokens
            self._coordinator.release_unneeded(request_id, num_hit_tokens)
        else:
            num_hit_tokens = (computed.num_tokens if computed else 0) + num_external_tokens
        attached = computed.blocks if computed else self._nothing.blocks
        num_slots = num_hit_tokens + num_new_tokens + num_lookahead_tokens
        needed = self._coordinator.num_blocks_to_allocate(request_id, attached, num_hit_tokens, num_slots)
        if needed > self.pool.num_free_blocks:
            return None
        free_before = self.pool.num_free_blocks
        if not running:
            self._coordinator.attach(request, attached)
        added = self._coordinator.allocate(request_id, num_hit_tokens, num_slots)
        assert free_before - self.pool.num_free_blocks == needed, f"{request}: allocated other than {needed} blocks"
        if not delay_cache_blocks:
            # Lookahead tokens may be rejected, and tokens not yet sampled have no hash: neither is cached.
            self.cache_blocks(request, num_hit_tokens + num_new_tokens)
        return tuple([block.block_id for block in blocks] for blocks in added)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let the full blocks of the first ``num_computed_tokens`` tokens be found by prefix. Idempotent."""
        self._coordinator.cache_blocks(request, min(num_computed_tokens, request.num_tokens))

    def free(self, request: Request) -> None:
        """Give all of the request's blocks back: finished, aborted or preempted. What is cached stays to be found
        until it is handed out, tail first. No-op without tables."""
        self._coordinator.free(request.request_id)

    def block_ids(self, request_id: str) -> BlockIds:
        """The request's whole tables, empty when it has none. O(blocks)."""
        return self._coordinator.block_ids(request_id)

    def get_num_common_prefix_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Blocks, one number a group, that all these requests' tables begin with and that hold computed KV: 0 for
        fewer than two requests, and for a windowed group once blocks were skipped."""
        if len(request_ids) < 2:
            return [0] * len(self.config.groups)
        return self._coordinator.num_common_prefix_blocks(request_ids)

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks that one request of ``num_tokens``, output and lookahead included, holds at a time."""
        return blocks_for_request(self.config.groups, num_tokens, self.config.max_num_batched_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether such a request can always finish when it runs alone: what to ask before admitting it."""
        return self.blocks_needed(num_tokens) <= self.config.num_blocks - 1

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, after the weights changed for example. False while any block is in use."""
        return self.pool.reset_prefix_cache()

    def take_events(self) -> list[KVEvent]:
        """Prefix cache events since the last call, in order."""
        return self.pool.take_events()

    def check(self) -> None:
        """Assert every structural invariant. O(blocks)."""
        self.pool.check()
        self._coordinator.check()
