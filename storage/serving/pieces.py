"""The few pieces of a small pull, as numbers: arrays would take longer to make than their bytes to copy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvstrata.proto.errors import InvalidArgument
from kvstrata.storage.records import Block

#: A pull of at most so many pieces, and bytes, is a small one.
FEW_PIECES: Final = 64
FEW_BYTES: Final = 8 << 20

#: (our address, offset in the region, length) of one piece.
Row = tuple[int, int, int]


class FewPieces(msgspec.Struct, frozen=True):
    """(offset, length) of each piece in a client's region, ``pieces`` of them a block, in order."""

    rows: list[tuple[int, int]]
    pieces: int

    def __len__(self) -> int:
        """Blocks."""
        return len(self.rows) // self.pieces

    def __getitem__(self, blocks: Sequence[int]) -> FewPieces:
        """Those of some blocks."""
        rows, each = self.rows, self.pieces
        return FewPieces([row for at in blocks for row in rows[at * each : (at + 1) * each]], each)


def few(blocks: int, pieces: int, block_bytes: int) -> bool:
    """Whether a pull of so many is a small one."""
    return blocks * pieces <= FEW_PIECES and blocks * block_bytes <= FEW_BYTES


def read_few(packed: bytes, blocks: int, pieces: int, block_bytes: int, region_bytes: int) -> FewPieces:
    """As :func:`~kvstrata.storage.serving.regions.read_descriptors`, of a small pull."""
    if pieces < 1 or len(packed) != blocks * pieces * 16:
        raise InvalidArgument(f"{len(packed)} bytes of descriptors for {blocks} blocks of {pieces} pieces")
    numbers = array("q", packed)
    rows = list(zip(numbers[::2], numbers[1::2], strict=True))
    left = block_bytes
    for position, (offset, length) in enumerate(rows, 1):
        left -= length
        if length <= 0 or left < 0 or (position % pieces == 0 and left):
            raise InvalidArgument(f"the pieces of a block do not add up to its {block_bytes} bytes")
        if not 0 <= offset <= region_bytes - length:
            raise InvalidArgument(f"a descriptor is not inside the region's {region_bytes} bytes")
        left = left or block_bytes
    return FewPieces(rows, pieces)


def placed(blocks: Sequence[Block], table: FewPieces, at: int = 0) -> Iterator[Row]:
    """Where each piece comes from and goes to, from byte ``at`` of each block on; neighbours on both sides as one."""
    rows, each = iter(table.rows), table.pieces
    start = origin = nbytes = 0
    for block in blocks:
        slab = block.memory
        target = slab.address + slab.data_offset + block.slot * slab.slot_bytes + at
        for offset, length in islice(rows, each):
            if target == start + nbytes and offset == origin + nbytes:
                nbytes += length
            else:
                if nbytes:
                    yield start, origin, nbytes
                start, origin, nbytes = target, offset, length
            target += length
    if nbytes:
        yield start, origin, nbytes
