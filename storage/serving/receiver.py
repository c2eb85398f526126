"""Blocks between slots and a socket: neighbours as one buffer, checksums while the bytes are in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from kvstrata.storage.records import Block, Reservation
from kvstrata.transfer.sessions import ServerConnection

#: Neighbouring slots are received as one buffer of at most this, and hashed while it is in cache.
RECEIVE_BYTES: Final = 1 << 20
#: Neighbouring slots are sent as one buffer of at most this.
SEND_BYTES: Final = 1 << 30

_digest = xxhash.xxh3_64_intdigest


def runs(blocks: Sequence[Block], nbytes_max: int = SEND_BYTES) -> list[tuple[memoryview, int]]:
    """(buffer, blocks in it) over the slots, in order: contiguous ones joined up to ``nbytes_max``."""
    joined: list[tuple[memoryview, int]] = []
    block_bytes = blocks[0].shelf.entry.block_bytes
    dense = block_bytes == blocks[0].slab.slot_bytes
    start = 0
    for position in range(1, len(blocks) + 1):
        if position < len(blocks) and dense and (position - start + 1) * block_bytes <= nbytes_max:
            before, block = blocks[position - 1], blocks[position]
            if block.slot == before.slot + 1 and block.slab is before.slab:
                continue
        offset = blocks[start].offset
        count = position - start
        joined.append((blocks[start].memory.view[offset : offset + count * block_bytes], count))
        start = position
    return joined


def receive(connection: ServerConnection, blocks: Sequence[Block], checksums: Sequence[int]) -> list[int]:
    """Receive the blocks' bytes, in order, into their slots; positions whose checksum does not match.

    Raises :class:`Unavailable` when the sender stalls or goes. The caller keeps the slots from reuse.
    """
    pieces = runs(blocks, RECEIVE_BYTES)
    first = [0]
    for _, count in pieces:
        first.append(first[-1] + count)
    block_bytes = blocks[0].shelf.entry.block_bytes
    wrong: list[int] = []

    def filled(piece: int) -> None:
        view = pieces[piece][0]
        for index, position in enumerate(range(first[piece], first[piece + 1])):
            if _digest(view[index * block_bytes : (index + 1) * block_bytes]) != checksums[position]:
                wrong.append(position)

    connection.receive_raw([view for view, _ in pieces], filled=filled)
    return wrong


def receive_range(connection: ServerConnection, reservation: Reservation, nbytes: int) -> None:
    """Receive the next ``nbytes`` of every block, and hash them. Raises as :func:`receive`."""
    if not reservation.hashing:
        reservation.hashing = [xxhash.xxh3_64() for _ in reservation.blocks]
    hashing, at = reservation.hashing, reservation.arrived
    views = [block.bytes()[at : at + nbytes] for block in reservation.blocks]
    connection.receive_raw(views, filled=lambda index: hashing[index].update(views[index]))


def mismatched(blocks: Sequence[Block], checksums: Sequence[int]) -> list[int]:
    """Positions whose bytes, as they lie in their slots, do not match."""
    rows = enumerate(zip(blocks, checksums, strict=True))
    return [i for i, (b, expected) in rows if _digest(b.bytes()) != expected]


def digests(blocks: Sequence[Block]) -> list[int]:
    """Checksums of blocks as they lie in their slots."""
    return [_digest(block.bytes()) for block in blocks]
