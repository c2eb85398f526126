"""What a KV cache block is to the scheduler: an id and its bookkeeping. Its KV lives elsewhere, under that id.

Three structures over the same objects, each O(1): the block itself, the queue of free ones in eviction order,
and the index from a hash to the blocks that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BlockHash = tuple[bytes, int]  #: (hash of the block's tokens and all before them, KV cache group)


class KVCacheBlock:
    """One block id. Compared by identity; one object an id for the life of the pool.

    ``block_hash`` is set while the block is full and may be found by prefix; it stays set while the block is free,
    until the block is handed out again. ``prev`` and ``next`` are the queue's.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next", "prev", "ref_count")

    def __init__(self, block_id: int, *, is_null: bool = False) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.prev: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None
        self.is_null = is_null

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, refs={self.ref_count}, cached={self.block_hash is not None})"


class FreeQueue:
    """Free blocks in eviction order: the first is handed out next. Doubly linked, so that a cached block that is
    hit leaves from the middle in O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._length = 0
        # Two ends that are never handed out spare every operation the empty and the last case.
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-2)
        self._head.next, self._tail.prev = self._tail, self._head
        self.append_all(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def popleft(self) -> KVCacheBlock:
        """The first block, out of the queue. Raises :class:`IndexError` when there is none."""
        first = self._head.next
        assert first is not None
        if first is self._tail:
            raise IndexError("no free block")
        self.remove(first)
        return first

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out, wherever it is. It must be in."""
        before, after = block.prev, block.next
        assert before is not None and after is not None, f"{block} is not in the queue"
        before.next, after.prev = after, before
        block.prev = block.next = None
        self._length -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put ``block`` at the end: evicted after all that are in now. It must be out."""
        assert block.prev is None and block.next is None, f"{block} is in the queue already"
        last = self._tail.prev
        assert last is not None
        last.next, block.prev = block, last
        block.next, self._tail.prev = self._tail, block
        self._length += 1

    def append_all(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put them at the end, in their order."""
        for block in blocks:
            self.append(block)

    def check(self) -> None:
        """Assert that both directions of the links tell one story. O(n)."""
        forward = list(self)
        backward: list[KVCacheBlock] = []
        block = self._tail.prev
        while block is not None and block is not self._head:
            backward.append(block)
            block = block.prev
        assert backward[::-1] == forward, "the free queue's links disagree"
        assert len(forward) == self._length == len({block.block_id for block in forward}), "free queue: length"


class HashIndex:
    """Hash -> the blocks that hold it. Two requests may compute one block at the same time: all copies are kept,
    any of them answers."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        """Different hashes."""
        return len(self._blocks)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._blocks

    def get(self, block_hash: BlockHash) -> KVCacheBlock | None:
        found = self._blocks.get(block_hash)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def add(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        found = self._blocks.get(block_hash)
        if found is None:
            self._blocks[block_hash] = block  # a dict only for the rare second copy
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[block_hash] = {found.block_id: found, block.block_id: block}

    def remove(self, block_hash: BlockHash, block: KVCacheBlock) -> bool:
        """Forget this copy. Returns True when it was the last one. It must be known."""
        found = self._blocks[block_hash]
        if isinstance(found, dict):
            del found[block.block_id]
            if len(found) == 1:
                self._blocks[block_hash] = next(iter(found.values()))
            return False
        assert found is block, f"{block} is not what its hash leads to"
        del self._blocks[block_hash]
        return True

    def clear(self) -> None:
        self._blocks.clear()

    def items(self) -> Iterator[tuple[BlockHash, KVCacheBlock]]:
        """Every (hash, copy)."""
        for block_hash, found in self._blocks.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                yield block_hash, block
