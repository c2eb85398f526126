"""xxh3 checksums of blocks in a region, whole or in pieces, and the choice of which to verify."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.transfer.base import Verify
from kvstrata.transfer.compact import compact, in_small_pieces
from kvstrata.transfer.regions import BlockView

#: With ``verify="sample"``, one block in this many is hashed.
SAMPLE_ONE_IN: Final = 32
#: Bytes of blocks in small pieces that are put together at a time, to be hashed.
COMPACTED_BYTES: Final = 4 << 20

_digest = xxhash.xxh3_64_intdigest


def block_checksum(blocks: BlockView, index: int) -> int:
    """xxh3_64 over the pieces of block ``index``, in order."""
    if in_small_pieces(blocks):
        return int(checksums(blocks[index : index + 1])[0])
    data = memoryview(blocks.region.bytes)  # type: ignore[arg-type]
    pieces = blocks.table[index]
    if len(pieces) == 1:
        start, length = pieces[0].tolist()
        return _digest(data[start : start + length])
    state = xxhash.xxh3_64()
    for start, length in pieces.tolist():
        state.update(data[start : start + length])
    return state.intdigest()


def digests(view: memoryview, block_bytes: int) -> list[int]:
    """xxh3_64 of each ``block_bytes`` of ``view``, which is whole blocks."""
    digest = _digest
    return [digest(view[start : start + block_bytes]) for start in range(0, view.nbytes, block_bytes)]


def checksums(blocks: BlockView) -> npt.NDArray[np.uint64]:
    """One checksum a block, u64[n]."""
    if len(blocks) and in_small_pieces(blocks):
        step = max(1, COMPACTED_BYTES // blocks.block_bytes)
        return np.concatenate([checksums(compact(blocks[low : low + step])) for low in range(0, len(blocks), step)])
    data, digest = memoryview(blocks.region.bytes), _digest  # type: ignore[arg-type]
    # Flat lists: one a block would be a collector's business.
    starts, lengths = blocks.table[:, :, 0].ravel().tolist(), blocks.table[:, :, 1].ravel().tolist()
    if blocks.pieces == 1:
        rows = zip(starts, lengths, strict=True)
        return np.array([digest(data[start : start + length]) for start, length in rows], np.uint64)
    found, pieces = [], range(blocks.pieces)
    rows = zip(starts, lengths, strict=True)
    for _ in range(len(blocks)):
        state = xxhash.xxh3_64()
        for _, (start, length) in zip(pieces, rows, strict=False):
            state.update(data[start : start + length])
        found.append(state.intdigest())
    return np.array(found, np.uint64)


class RangeChecksums:
    """Checksums of blocks that come range by range."""

    def __init__(self, count: int) -> None:
        self._states = [xxhash.xxh3_64() for _ in range(count)]

    def add(self, blocks: BlockView) -> None:
        """The next range of each block."""
        blocks = compact(blocks)
        data, pieces = memoryview(blocks.region.bytes), range(blocks.pieces)  # type: ignore[arg-type]
        starts, lengths = blocks.table[:, :, 0].ravel().tolist(), blocks.table[:, :, 1].ravel().tolist()
        rows = zip(starts, lengths, strict=True)
        for state in self._states:
            for _, (start, length) in zip(pieces, rows, strict=False):
                state.update(data[start : start + length])

    def keep(self, positions: npt.NDArray[np.intp]) -> None:
        """Only these blocks go on."""
        self._states = [self._states[position] for position in positions.tolist()]

    def values(self) -> npt.NDArray[np.uint64]:
        """One checksum a block, u64[n]."""
        return np.array([state.intdigest() for state in self._states], np.uint64)


class Sampler:
    """Which of n blocks a read verifies, under one policy."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, count: int, verify: Verify) -> range | list[int]:
        """Positions to hash: all, about one in ``SAMPLE_ONE_IN``, or none."""
        if verify == "always":
            return range(count)
        if verify == "never":
            return []
        draw = self._random.random
        if count <= SAMPLE_ONE_IN:
            return [int(draw() * count)] if draw() * SAMPLE_ONE_IN < count else []
        start = int(draw() * SAMPLE_ONE_IN)
        return range(start, count, SAMPLE_ONE_IN)
