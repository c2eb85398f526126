"""Payloads on SSD, unreadable without their tenant's key: AES-256 in counter mode.

A slot's counter starts where a keyed hash of its header says: generation, payload checksum and block hash. The
generation alone is new with each write of a node; the others keep two payloads apart also when a device and its
superblock were put back to an earlier day, so that no stretch of the key stream ever covers two of them. Counter
mode can begin anywhere, so pieces of a slot need no order, and needs no room of its own.

It hides what is there. It does not prove who wrote it: checksums are against accidents.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvstrata.storage.ssd.base import SlotHeader

_AES_KEY_BYTES: Final = 32
#: The cipher's key, then the key of the hash that counters start from.
DATA_KEY_BYTES: Final = 2 * _AES_KEY_BYTES
_BLOCK_BYTES: Final = 16
_COUNTERS: Final = 1 << (8 * _BLOCK_BYTES)
_NUMBERS: Final = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, repr=False)
class DataKey:
    """One tenant's key, ``DATA_KEY_BYTES`` random bytes. Not shown in logs: it has no repr of its own."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != DATA_KEY_BYTES:
            raise ValueError(f"a data key has {DATA_KEY_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def new(cls) -> DataKey:
        return cls(secrets.token_bytes(DATA_KEY_BYTES))

    def slot(self, header: SlotHeader) -> SlotCipher:
        """The cipher of one write of one slot."""
        numbers = _NUMBERS.pack(header.generation, header.checksum)
        start = hashlib.blake2b(
            numbers + header.hash, key=self.secret[_AES_KEY_BYTES:], digest_size=_BLOCK_BYTES, person=b"kvstrata slot"
        )
        return SlotCipher(self.secret[:_AES_KEY_BYTES], int.from_bytes(start.digest(), "big"))


@dataclass(frozen=True, slots=True, repr=False)
class SlotCipher:
    """Encrypts and decrypts the payload of a slot, in place."""

    key: bytes
    start: int  #: counter of the payload's first 16 bytes

    def apply(self, part: memoryview, at: int = 0) -> None:
        """Change bytes of the payload that begin at ``at`` (a multiple of 16) into the other of plain and cipher."""
        assert at % _BLOCK_BYTES == 0, at
        counter = (self.start + at // _BLOCK_BYTES) % _COUNTERS
        mode = modes.CTR(counter.to_bytes(_BLOCK_BYTES, "big"))
        Cipher(algorithms.AES(self.key), mode).encryptor().update_into(part, part)
