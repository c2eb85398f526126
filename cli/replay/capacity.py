"""How many blocks a pool really holds: slots are rounded up, and slabs have tables and tails."""

from __future__ import annotations

from kvstrata.storage.arena import slab_bytes_for
from kvstrata.storage.slab import slot_size, slots_of
from kvstrata.storage.ssd.base import HEADER_BYTES, SECTOR_BYTES

#: The least memory a node may have.
NODE_BYTES_MIN = 8 << 20


def blocks_held(node_bytes: int, block_bytes: int) -> int:
    """Blocks of one size in a node of ``node_bytes`` with default slabs."""
    slab_bytes = slab_bytes_for(node_bytes, None)
    return node_bytes // slab_bytes * slots_of(slab_bytes, slot_size(block_bytes))


def ssd_blocks_held(ssd_bytes: int, block_bytes: int) -> int:
    """About how many blocks of one size an SSD tier of ``ssd_bytes`` holds: tails of extents are not counted off."""
    return ssd_bytes // (HEADER_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES)


def node_bytes_for(blocks: int, block_bytes: int) -> int:
    """About the least memory with which one node holds ``blocks`` blocks."""
    page = 4096
    node_bytes = max(NODE_BYTES_MIN, blocks * slot_size(block_bytes))
    while blocks_held(node_bytes, block_bytes) < blocks:
        node_bytes += max(page, node_bytes // 256 // page * page)
    return node_bytes
