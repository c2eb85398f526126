"""What an agent says of itself, wrapped for the way: NIXL takes garbage for metadata and ends the process.

::

    "KVRAIL1\\n" | xxh3_64 of all that follows, u64 | n, u8 | NIXL's version, n bytes | metadata

The checksum is against accidents. Who may open rails is trusted with the memory behind them in any case.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from kvstrata.proto.errors import InvalidArgument, VersionMismatch

MAGIC: Final = b"KVRAIL1\n"
METADATA_BYTES_MAX: Final = 16 << 20
_HEAD: Final = struct.Struct("<8sQB")


def seal(version: str, metadata: bytes) -> bytes:
    """``version``: NIXL's, as "1.5.1"."""
    spelled = version.encode()[:255]
    rest = bytes([len(spelled)]) + spelled + metadata
    return MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def unseal(version: str, sealed: bytes) -> bytes:
    """The metadata. Raises :class:`InvalidArgument` for what is damaged, :class:`VersionMismatch` when the other side
    has a NIXL that may spell it another way (its first two numbers differ)."""
    if len(sealed) > METADATA_BYTES_MAX:
        raise InvalidArgument(f"{len(sealed)} bytes of an agent's metadata, and {METADATA_BYTES_MAX} is the bound")
    if len(sealed) < _HEAD.size or not sealed.startswith(MAGIC):
        raise InvalidArgument("this is not what an agent says of itself")
    _, checksum, count = _HEAD.unpack_from(sealed)
    if xxhash.xxh3_64_intdigest(sealed[_HEAD.size - 1 :]) != checksum or len(sealed) < _HEAD.size + count:
        raise InvalidArgument("an agent's metadata is damaged")
    theirs = sealed[_HEAD.size : _HEAD.size + count].decode("ascii", "replace")
    if theirs.split(".")[:2] != version.split(".")[:2]:
        raise VersionMismatch(f"the other side has NIXL {theirs}, and here is {version}: install the same on both")
    return sealed[_HEAD.size + count :]
