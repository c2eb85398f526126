"""All KV cache blocks of one engine: who is free, who is referenced, what can be found by its hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvstrata.engine_adapter.paged.cache.blocks import BlockHash, FreeQueue, HashIndex, KVCacheBlock
from kvstrata.engine_adapter.paged.cache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVEvent
from kvstrata.engine_adapter.paged.request import Request
from kvstrata.proto.errors import InvalidArgument


class BlockPool:
    """Blocks 0 to ``num_blocks - 1``. One thread.

    Block 0 is the *null block*: it stands in block tables where attention reads nothing. It is never handed out,
    freed, cached or counted, and nothing is written to it, so its KV stays zero.

    A block is either in the free queue (no references) or referenced. A free block keeps its hash, and is found
    and taken back by it, until it is handed out for other tokens: eviction happens then and only then.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool, events: bool = False) -> None:
        if num_blocks < 2:
            raise InvalidArgument(f"num_blocks is {num_blocks}: at least 2 (block 0 is the null block)")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.null_block = KVCacheBlock(0, is_null=True)
        self._blocks = [self.null_block, *(KVCacheBlock(block_id) for block_id in range(1, num_blocks))]
        self._free = FreeQueue(self._blocks[1:])
        self._cached = HashIndex()
        self._events = EventLog() if events else None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_cached_hashes(self) -> int:
        """Different hashes that can be found."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that is referenced, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def get_cached_block(self, block_hash: bytes, group: int) -> KVCacheBlock | None:
        """A block of ``group`` that holds these tokens. It may be free: ``touch`` it before anything is allocated."""
        return self._cached.get((block_hash, group))

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """``count`` blocks with one reference each and no hash, in eviction order; what they cached is forgotten.

        Raises :class:`ValueError`, and changes nothing, when fewer are free.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._forget(blocks)
        for block in blocks:
            assert block.ref_count == 0, f"{block} was free and referenced"
            block.ref_count = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more reference on each; free ones leave the queue. They keep what they hold until freed and reused."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free_blocks(self, ordered: Iterable[KVCacheBlock]) -> None:
        """One reference less on each. Those that become free are evicted in this order: give a chain's tail first,
        since a block is found only while all before it are."""
        for block in ordered:
            if block.is_null:
                continue
            assert block.ref_count > 0, f"{block} freed once too often"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)

    def hold(self, block_ids: Sequence[int]) -> None:
        """One more reference on each id, until :meth:`release`. No-op for the null block."""
        self.touch([self._blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """End of a :meth:`hold`. ``block_ids`` in chain order."""
        self.free_blocks([self._blocks[block_id] for block_id in reversed(block_ids)])

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached: int,
        num_full: int,
        group: int,
        block_size: int,
        hash_block_size: int,
    ) -> None:
        """Let ``blocks[num_cached:num_full]`` of the request's table be found by prefix. Their KV must be written
        before anyone else's next step. Skips null blocks and those that are cached already."""
        if not self.enable_prefix_caching:
            return
        stride = block_size // hash_block_size
        fresh: list[int] = []
        for index in range(num_cached, num_full):
            block = blocks[index]
            if block.is_null:
                continue
            key: BlockHash = (request.block_hashes[(index + 1) * stride - 1], group)
            if block.block_hash is not None:
                assert block.block_hash == key, f"{block} holds other tokens than {request} has at block {index}"
                continue
            block.block_hash = key
            self._cached.add(key, block)
            fresh.append(index)
        if self._events is not None:
            self._log_stored(self._events, request, fresh, group, block_size, stride)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """They can be found no more, also where they are in use: their content is not to be trusted."""
        self._forget([self._blocks[block_id] for block_id in block_ids])

    def reset_prefix_cache(self) -> bool:
        """Forget every hash. False, and nothing changes, while any block is referenced."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for block in self._blocks:
            block.block_hash = None
        self._cached.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order; none unless asked for when the pool was made."""
        return self._events.take() if self._events is not None else []

    def _forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        gone: list[BlockHash] = []
        for block in blocks:
            if block.block_hash is None:
                continue
            if self._cached.remove(block.block_hash, block):
                gone.append(block.block_hash)
            block.block_hash = None
        if self._events is not None:
            for group, keys in groupby(gone, key=lambda key: key[1]):
                self._events.append(BlockRemoved(hashes=[key[0] for key in keys], group=group))

    @staticmethod
    def _log_stored(
        log: EventLog, request: Request, indices: list[int], group: int, block_size: int, stride: int
    ) -> None:
        for first, count in _runs(indices):
            hashes = [request.block_hashes[(index + 1) * stride - 1] for index in range(first, first + count)]
            log.append(
                BlockStored(
                    hashes=hashes,
                    parent=request.block_hashes[first * stride - 1] if first else b"",
                    token_ids=request.token_ids[first * block_size : (first + count) * block_size],
                    block_size=block_size,
                    group=group,
                    salt=request.cache_salt,
                )
            )

    def check(self) -> None:
        """Assert every structural invariant. O(blocks)."""
        self._free.check()
        free = {block.block_id for block in self._free}
        assert 0 not in free and self.null_block.ref_count == 0 and self.null_block.block_hash is None, "null block"
        for block_id, block in enumerate(self._blocks):
            assert block.block_id == block_id
            if not block.is_null:
                assert (block.ref_count == 0) == (block_id in free), f"{block}: free queue and references disagree"
                assert block.ref_count >= 0
        hashed = {block.block_id: block.block_hash for block in self._blocks if block.block_hash is not None}
        indexed = [(block.block_id, key) for key, block in self._cached.items()]
        assert len(indexed) == len(hashed) and dict(indexed) == hashed, "hash index and blocks disagree"
        assert not hashed or self.enable_prefix_caching


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as (first, count) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
