"""Block tables of one KV cache group: what all kinds of attention share, and full attention.

A table has one entry for each ``block_size`` tokens, from token 0. Entries that attention reads no more are the
null block::

    tokens   |  out of the window  |  window  |  step  | lookahead |
    table    [ null | null | null  | 17 | 4   | 9 | 23 | 8         ]
                                   ^ first_needed_block(num_computed_tokens)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvstrata.engine_adapter.paged.cache.block_pool import BlockPool
from kvstrata.engine_adapter.paged.cache.blocks import KVCacheBlock
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheSpec
from kvstrata.engine_adapter.paged.request import Request


class SingleTypeManager(ABC):
    """One group's tables. It decides nothing about room: the caller asks ``num_blocks_to_allocate`` of all groups
    first, then calls ``allocate`` of each."""

    #: Whether a hit of n tokens is also one of fewer (aligned) tokens, by cutting the list.
    hits_can_be_cut = False
    #: Whether blocks can be found by prefix at all.
    cacheable = True

    def __init__(self, spec: KVCacheSpec, group: int, pool: BlockPool, hash_block_size: int) -> None:
        self.block_size = spec.block_size
        self.group = group
        self._pool = pool
        self._hash_block_size = hash_block_size
        self._stride = spec.block_size // hash_block_size
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}  # blocks at the table's head that caching has dealt with
        self._num_skipped: dict[str, int] = {}  # entries at the table's head that are null for good

    @abstractmethod
    def find_longest_cache_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[KVCacheBlock]:
        """The table's head for the longest cached prefix of at most ``max_tokens``, a multiple of ``alignment``.

        ``hashes``: the request's, one a hash block. ``len(result) * block_size`` is the hit; null blocks where its
        next token reads nothing. Changes nothing.
        """

    @abstractmethod
    def first_needed_block(self, num_computed_tokens: int) -> int:
        """Index of the first table entry that the token at this position reads."""

    def num_table_blocks(self, num_tokens: int) -> int:
        """Length of a table with slots for ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's table, empty when it has none; valid until it changes."""
        return self._tables.get(request_id, ())

    def has_table(self, request_id: str) -> bool:
        return request_id in self._tables

    def request_ids(self) -> frozenset[str]:
        """Requests that have a table."""
        return frozenset(self._tables)

    def blocks_in_use(self) -> set[KVCacheBlock]:
        """Every block in a table but the null block. O(table entries)."""
        return {block for table in self._tables.values() for block in table if not block.is_null}

    def num_blocks_to_allocate(
        self, request_id: str, computed: Sequence[KVCacheBlock], num_hit_tokens: int, num_tokens: int
    ) -> int:
        """Blocks that :meth:`allocate` with the same arguments would take out of the free queue."""
        first_new = self._first_new_block(request_id, computed, num_hit_tokens)
        touched = sum(block.ref_count == 0 and not block.is_null for block in computed)
        return max(self.num_table_blocks(num_tokens) - first_new, 0) + touched

    def attach(self, request: Request, computed: Sequence[KVCacheBlock]) -> None:
        """Begin the request's table with cached blocks. All groups attach before any allocates: allocating may
        hand out a cached block that nobody touched yet."""
        request_id = request.request_id
        assert request_id not in self._tables, f"{request_id} has a table"
        for index, block in enumerate(computed):
            held = block.is_null or block.block_hash == (self._hash_at(request.block_hashes, index), self.group)
            assert held, f"{block} was handed out since {request_id} found it: its hit is stale"
        self._pool.touch(computed)
        self._tables[request_id] = list(computed)
        self._num_cached[request_id] = len(computed)
        self._num_skipped[request_id] = 0

    def allocate(self, request_id: str, num_hit_tokens: int, num_tokens: int) -> list[KVCacheBlock]:
        """Extend the table to ``num_tokens`` slots; returns the entries added.

        ``num_hit_tokens``: those that are computed, or will be when a load ends. Entries that no token from there
        on reads are null: nothing is loaded into them.
        """
        table = self._tables[request_id]
        before = len(table)
        first_new = self._first_new_block(request_id, (), num_hit_tokens)
        table.extend([self._pool.null_block] * (first_new - before))
        table.extend(self._pool.get_new_blocks(max(self.num_table_blocks(num_tokens) - first_new, 0)))
        return table[before:]

    def _first_new_block(self, request_id: str, computed: Sequence[KVCacheBlock], num_hit_tokens: int) -> int:
        have = len(self._tables.get(request_id, computed))
        return max(have, self.first_needed_block(num_hit_tokens))

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Replace what no token from ``num_computed_tokens`` on reads by the null block, and free it."""
        first, end = self._num_skipped.get(request_id, 0), self.first_needed_block(num_computed_tokens)
        if end <= first:
            return
        table = self._tables.get(request_id, [])
        end = min(end, len(table))
        skipped = table[first:end]
        table[first:end] = [self._pool.null_block] * len(skipped)
        self._num_skipped[request_id] = end
        self._pool.free_blocks(reversed(skipped))

    def drop_unloaded_tail(self, request_id: str, num_computed_tokens: int) -> None:
        """After a load that brought less than was allocated for: cut the table at ``num_computed_tokens`` where
        what follows has null blocks, which were right for the whole load only, so that it is allocated anew."""
        table = self._tables.get(request_id, [])
        keep = self.num_table_blocks(num_computed_tokens)
        if not any(block.is_null for block in table[keep:]):
            return
        needed = table[self.first_needed_block(num_computed_tokens) : keep]
        assert not any(block.is_null for block in needed), f"{request_id}: a window that was never loaded is needed"
        tail = table[keep:]
        del table[keep:]
        self._pool.free_blocks(reversed(tail))

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let the full blocks of the first ``num_tokens`` tokens be found by prefix. Idempotent; O(new blocks)."""
        first, end = self._num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if end <= first or not self.cacheable:
            return
        table = self._tables.get(request.request_id, [])
        assert end <= len(table), f"{request}: {num_tokens} tokens to cache in {len(table)} blocks"
        self._pool.cache_full_blocks(request, table, first, end, self.group, self.block_size, self._hash_block_size)
        self._num_cached[request.request_id] = end

    def free(self, request_id: str) -> None:
        """Give all of the request's blocks back, the tail to be evicted first."""
        table = self._tables.pop(request_id, [])
        self._num_cached.pop(request_id, None)
        self._num_skipped.pop(request_id, None)
        self._pool.free_blocks(reversed(table))

    def num_common_prefix_blocks(self, request_ids: Sequence[str]) -> int:
        """Blocks at the head of all these requests' tables, none of them null."""
        tables = [self._tables[request_id] for request_id in request_ids]
        shared = 0
        for block in tables[0]:
            if block.is_null or block.ref_count < len(tables):
                break
            shared += 1
        for table in tables[1:]:
            if table[:shared] != tables[0][:shared]:
                shared = next(i for i, block in enumerate(tables[0]) if i >= len(table) or table[i] is not block)
        return shared

    def check(self) -> None:
        """Assert every structural invariant. O(table entries)."""
        assert self._tables.keys() == self._num_cached.keys() == self._num_skipped.keys()
        for request_id, table in self._tables.items():
            real = [block for block in table if not block.is_null]
            assert len(real) == len(set(real)), f"{request_id}: a block twice in one table"
            assert all(block.ref_count > 0 for block in real), f"{request_id}: an unreferenced block"
            assert self._num_cached[request_id] <= len(table)
            skipped = self._num_skipped[request_id]
            assert skipped <= len(table) and all(block.is_null for block in table[:skipped])
            keys = [block.block_hash for block in real if block.block_hash is not None]
            assert all(key[1] == self.group for key in keys), f"{request_id}: a block of another group"

    def _cached(self, hashes: Sequence[bytes], index: int) -> KVCacheBlock | None:
        """The cached block at ``index`` of a table, by the hash at its last hash block."""
        block_hash = self._hash_at(hashes, index)
        return self._pool.get_cached_block(block_hash, self.group) if block_hash is not None else None

    def _hash_at(self, hashes: Sequence[bytes], index: int) -> bytes | None:
        """The hash of the block at ``index``, None where the tokens do not fill it."""
        position = (index + 1) * self._stride - 1
        return hashes[position] if position < len(hashes) else None


class FullAttentionManager(SingleTypeManager):
    """Every token reads all before it: nothing is skipped. MLA too, whose pages differ but whose tables do not."""

    hits_can_be_cut = True

    def find_longest_cache_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        for index in range(max_tokens // self.block_size):
            block = self._cached(hashes, index)
            if block is None:
                break
            found.append(block)
        hit = len(found) * self.block_size // alignment * alignment
        return found[: hit // self.block_size]

    def first_needed_block(self, num_computed_tokens: int) -> int:
        return 0
