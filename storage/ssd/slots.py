"""Sectors that describe themselves: the header of a slot, and the first sector of an extent.

::

    extent   | shape sector | slot 0 | slot 1 | ...
    slot     | header, 4 KiB | payload, padded with zeros to whole sectors |

Both carry a checksum over all of the sector, the device's id and where they belong, so that a flipped bit, a
misplaced write and a sector of another device all show. ``serial`` is new each time an extent is cut to
another slot size: a header that was left over from an earlier cut does not count.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from kvstrata.proto.keys import Namespace
from kvstrata.storage.ssd.base import HEADER_BYTES, SECTOR_BYTES, SlotHeader

FORMAT: Final = 1
_SLOT_MAGIC: Final = b"kvsSlot\0"
_SHAPE_MAGIC: Final = b"kvsShape"
_CHECKSUM: Final = struct.Struct("<Q")
_SUMMED: Final = SECTOR_BYTES - _CHECKSUM.size
#: magic, format, bytes of group, salt, hash and parent, extent, slot, generation, payload checksum, epoch,
#: index, wall time, block bytes, block tokens, shard, shards, hash bytes, device, serial.
_SLOT: Final = struct.Struct("<8sHHHBBIIQQQQdQIIII16sQ")
#: magic, format, device, extent, slot bytes, serial.
_SHAPE: Final = struct.Struct("<8sI16sIQQ")
BLANK: Final = bytes(SECTOR_BYTES)


class HeaderTooLong(ValueError):
    """The group's name and the salt do not fit in a header together."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot is: device id (16 bytes), the cut of its extent, extent of the device, slot of the extent."""

    device: bytes
    serial: int
    extent: int
    slot: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How an extent is cut; ``slot_bytes`` 0: it never was, or nobody can tell any more."""

    slot_bytes: int = 0
    serial: int = 0


def padded(nbytes: int) -> int:
    """Whole sectors for so many bytes."""
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def slot_bytes_of(block_bytes: int) -> int:
    """Header and payload, in whole sectors."""
    return HEADER_BYTES + padded(block_bytes)


def encode_header(header: SlotHeader, place: Place) -> bytes:
    """One sector. Raises :class:`HeaderTooLong`, or ValueError for text that UTF-8 does not have."""
    namespace = header.namespace
    group, salt = namespace.group.encode(), header.salt.encode()
    fixed = _SLOT.pack(
        _SLOT_MAGIC, FORMAT, len(group), len(salt), len(header.hash), len(header.parent), place.extent, place.slot,
        header.generation, header.checksum, header.epoch, header.index, header.written_at, namespace.block_bytes,
        namespace.block_tokens, namespace.shard, namespace.shard_count, namespace.hash_bytes, place.device,
        place.serial,
    )  # fmt: skip
    text = b"".join((fixed, group, salt, header.hash, header.parent))
    if len(text) > _SUMMED:
        raise HeaderTooLong(f"group and salt are {len(group) + len(salt)} bytes: {len(text) - _SUMMED} too many")
    return _sealed(text)


def decode_header(sector: bytes | memoryview) -> tuple[SlotHeader, Place] | None:
    """What a sector says, or None when it is not a sound header."""
    if not _sound(sector, _SLOT_MAGIC):
        return None
    (
        _, version, group_bytes, salt_bytes, hash_bytes, parent_bytes, extent, slot, generation, checksum, epoch, index,
        written_at, block_bytes, block_tokens, shard, shard_count, width, device, serial,
    ) = _SLOT.unpack_from(sector)  # fmt: skip
    if version != FORMAT or _SLOT.size + group_bytes + salt_bytes + hash_bytes + parent_bytes > _SUMMED:
        return None
    at = _SLOT.size
    group, at = bytes(sector[at : at + group_bytes]), at + group_bytes
    salt, at = bytes(sector[at : at + salt_bytes]), at + salt_bytes
    key, at = bytes(sector[at : at + hash_bytes]), at + hash_bytes
    parent = bytes(sector[at : at + parent_bytes])
    namespace = _namespace(group, block_bytes, block_tokens, width, shard, shard_count)
    header = SlotHeader(
        namespace, epoch, _text(salt), key, generation, checksum, parent=parent, index=index, written_at=written_at
    )
    return header, Place(device, serial, extent, slot)


def encode_shape(shape: Shape, device: bytes, extent: int) -> bytes:
    """The first sector of an extent."""
    return _sealed(_SHAPE.pack(_SHAPE_MAGIC, FORMAT, device, extent, shape.slot_bytes, shape.serial))


def decode_shape(sector: bytes | memoryview, device: bytes, extent: int, extent_bytes: int) -> Shape | None:
    """How the extent is cut: ``Shape()`` for one never used, None when the sector cannot be believed."""
    if is_blank(sector):
        return Shape()
    if not _sound(sector, _SHAPE_MAGIC):
        return None
    _, version, its_device, its_extent, slot_bytes, serial = _SHAPE.unpack_from(sector)
    if (version, its_device, its_extent) != (FORMAT, device, extent):
        return None
    if slot_bytes % SECTOR_BYTES or not HEADER_BYTES < slot_bytes <= extent_bytes - SECTOR_BYTES:
        return None
    return Shape(slot_bytes, serial)


def is_blank(sector: bytes | memoryview) -> bool:
    """Never written, or erased."""
    return sector[:SECTOR_BYTES] == BLANK


def _sealed(text: bytes) -> bytes:
    body = text.ljust(_SUMMED, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _sound(sector: bytes | memoryview, magic: bytes) -> bool:
    if sector[: len(magic)] != magic:
        return False
    (checksum,) = _CHECKSUM.unpack_from(sector, _SUMMED)
    return bool(checksum == xxhash.xxh3_64_intdigest(sector[:_SUMMED]))


@lru_cache(maxsize=1024)
def _namespace(group: bytes, block_bytes: int, tokens: int, width: int, shard: int, shards: int) -> Namespace:
    return Namespace(group.decode(), block_bytes, tokens, width, shard, shards)


@lru_cache(maxsize=4096)
def _text(salt: bytes) -> str:
    return salt.decode()
