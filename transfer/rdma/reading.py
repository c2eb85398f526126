"""One read of leased slots over rails: the blocks' pieces, range by range, then the slots' generation words.

::

    range 0 posted -- landed --> words posted, range 1 posted -- words as granted, lease stands --> landed(0, ...)
                                                              -- range 1 landed --> words, range 2 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import LeaseExpired, ProtocolError
from kvstrata.transfer.base import Mask
from kvstrata.transfer.copier import merge_runs
from kvstrata.transfer.grants import Granted
from kvstrata.transfer.rdma.engine import Job, Pieces
from kvstrata.transfer.rdma.memory import Scratch
from kvstrata.transfer.rdma.opening import Opened
from kvstrata.transfer.regions import BlockView

#: Generation words that lie no farther apart than this many are read as one piece.
GAP_WORDS: Final = 32
WORD_BYTES: Final = 8

Int64s = npt.NDArray[np.int64]
U64s = npt.NDArray[np.uint64]

#: Returns when the job is DONE; raises :class:`KVError` when it is not, or will not be in time.
Wait = Callable[[Job], None]


class Words:
    """The generation words of ``count`` slots: where they are, and which place in scratch each comes to."""

    def __init__(self, slabs: U64s, slab: Int64s, slot: Int64s) -> None:
        order = np.lexsort((slot, slab))
        by_slab, by_slot = slab[order], slot[order]
        apart = (by_slab[1:] != by_slab[:-1]) | (by_slot[1:] - by_slot[:-1] > GAP_WORDS)
        starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        stops = np.concatenate((starts[1:], [len(order)])) - 1
        first, words = by_slot[starts], by_slot[stops] - by_slot[starts] + 1
        base = np.cumsum(words) - words
        run = np.repeat(np.arange(len(starts)), stops - starts + 1)
        self.index = np.empty(len(order), np.int64)
        self.index[order] = base[run] + by_slot - first[run]
        self.remote = slabs[by_slab[starts], 0].astype(np.int64) + first * WORD_BYTES
        self.offset, self.length = base * WORD_BYTES, words * WORD_BYTES
        self.nbytes = int(words.sum()) * WORD_BYTES

    def read_from(self, scratch: Scratch) -> U64s:
        """u64[count]"""
        words: U64s = scratch.bytes[: self.nbytes].view(np.uint64)[self.index]
        return words


class Reading:
    """``blocks`` are those that were granted, in order. ``jobs``: all that were posted, settled or not."""

    def __init__(self, opened: Opened, granted: Granted, blocks: BlockView, deadline: float) -> None:
        self.jobs: list[Job] = []
        self._opened = opened
        self._granted = granted
        self._blocks = blocks
        self._deadline = deadline
        slab, slot = granted.slab.astype(np.int64), granted.slot.astype(np.int64)
        self._base = _addresses(opened.slabs, granted, blocks.block_bytes)
        self._words = Words(opened.slabs, slab, slot)

    def run(self, wait: Wait, parts: tuple[int, ...], landed: Callable[[int, Mask], None]) -> Mask:
        """bool[count]: blocks whose slots were not given to others meanwhile. Raises :class:`KVError`.

        ``parts`` as in :class:`Fetch`; ``landed`` gets bool[count].
        """
        ends = parts or (self._blocks.block_bytes,)
        good = np.ones(self._granted.count, bool)
        job = self._post(0, ends[0])
        for index, end in enumerate(ends):
            wait(job)
            scratch, words = self._post_words()
            if index + 1 < len(ends):
                job = self._post(end, ends[index + 1])
            try:
                wait(words)
                good &= self._words.read_from(scratch) == self._granted.generation
            finally:
                self._opened.agent.memory.put_back(scratch, words)
            if time.monotonic() > self._granted.expires:
                raise LeaseExpired("the lease ended before the bytes had come")
            landed(index, good)
        return good

    def _post(self, low: int, high: int) -> Job:
        """Bytes ``low`` to ``high`` of every block."""
        local, skipped, length = pieces_between(self._blocks, low, high)
        local, remote, length = merge_runs(local, self._base[skipped[0]] + skipped[1], length)
        memory = self._blocks.region.memory
        return self._read(Pieces(local, length, memory), Pieces(remote, length))

    def _post_words(self) -> tuple[Scratch, Job]:
        words = self._words
        scratch = self._opened.agent.memory.scratch(words.nbytes, self._deadline)
        local = Pieces(words.offset + scratch.address, words.length)
        return scratch, self._read(local, Pieces(words.remote, words.length))

    def _read(self, local: Pieces, remote: Pieces) -> Job:
        job = self._opened.agent.engine.read(self._opened.peer, local, remote)
        self.jobs.append(job)
        return job


def pieces_between(blocks: BlockView, low: int, high: int) -> tuple[Int64s, tuple[Int64s, Int64s], Int64s]:
    """The pieces of bytes ``low`` to ``high`` of every block, in order: (address, (block, offset in it), length)."""
    start, length = blocks.table[:, :, 0] + blocks.region.address, blocks.table[:, :, 1]
    begin = np.cumsum(length, axis=1) - length
    block = np.broadcast_to(np.arange(len(blocks))[:, None], length.shape)
    if low == 0 and high == blocks.block_bytes:
        return start.ravel(), (block.ravel(), begin.ravel()), length.ravel()
    cut = np.maximum(low - begin, 0)
    left = np.minimum(begin + length, high) - (begin + cut)
    inside = left > 0
    return (start + cut)[inside], (block[inside], (begin + cut)[inside]), left[inside]


def _addresses(slabs: U64s, granted: Granted, block_bytes: int) -> Int64s:
    """Where each granted block lies in the node's address space; raises :class:`ProtocolError` if one does not."""
    if (granted.slab >= len(slabs)).any():
        raise ProtocolError(f"the node named a slab beyond its {len(slabs)}")
    address, nbytes = slabs[granted.slab, 0], slabs[granted.slab, 1]
    words = (granted.slot.astype(np.uint64) + np.uint64(1)) * np.uint64(WORD_BYTES)
    room = np.maximum(nbytes, np.uint64(block_bytes)) - np.uint64(block_bytes)
    if ((granted.offset > room) | (nbytes < block_bytes) | (words > nbytes)).any():
        raise ProtocolError("the node named a slot that is not inside its slab")
    base: Int64s = (address + granted.offset).astype(np.int64)
    return base
