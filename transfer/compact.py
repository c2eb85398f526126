"""Blocks in many small pieces, as one piece each while a call lasts: bytes then move, and are hashed, by block.

A block that is cut by heads has a piece for each token: copied as grids they cost little, and one by one, in a socket's
buffers or a hash's updates, more than all else.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstrata.transfer import copier
from kvstrata.transfer.regions import BlockView, Region

#: Pieces that are smaller on the average are not worth a call each.
PIECE_BYTES_MIN: Final = 4 << 10


def in_small_pieces(blocks: BlockView) -> bool:
    """Whether it is worth a copy to have them in one piece each. In memory of the host."""
    return blocks.pieces > 1 and blocks.block_bytes < blocks.pieces * PIECE_BYTES_MIN


def blank(blocks: BlockView) -> BlockView:
    """As many blocks in new memory, one piece each, with nothing in them."""
    count, size = len(blocks), blocks.block_bytes
    data = np.empty(count * size, np.uint8)
    table = np.empty((count, 1, 2), np.int64)
    table[:, 0, 0], table[:, 0, 1] = np.arange(count, dtype=np.int64) * size, size
    return BlockView(Region(data, data), table, size)


def compact(blocks: BlockView) -> BlockView:
    """The same bytes in one piece a block, copied where they are in small ones."""
    if not len(blocks) or not in_small_pieces(blocks):
        return blocks
    found = blank(blocks)
    copier.copy_between(found, blocks)
    return found


def scatter(blocks: BlockView, found: BlockView) -> None:
    """Put into ``blocks`` what ``found``, a :func:`blank` of them, has received."""
    copier.copy_into(blocks, found.table[:, 0, 0] + found.region.address)
