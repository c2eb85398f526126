"""The index of a node's readable DRAM blocks, as it lies in shared memory: what the node writes and clients read.

::

    head     u64 words (see below) to 4096, then a scope word for each of SCOPES shelves
    table    tag of each row, u64, BUCKET_ROWS a bucket        rows, 64 bytes each
             +--------------------------------------------+----------------------------------+
             | bucket 0: 8 tags | bucket 1: 8 tags | ...   | row 0 | row 1 | ...               |
             +--------------------------------------------+----------------------------------+

A row says where one block is. It stands in one of the two buckets that its key names, in one of the tables; a tag
of 0 is an empty row. All is read without a lock, so whoever reads may see half of a row: its last word is a digest
of the others, and is zeroed before anything else when the block goes. A generation is never given twice, so a digest
that is unchanged means, but for one chance in 2^63, that the row stood all the time; readers compare generations, too.

A *scope* is a shelf: a tenant's blocks of one namespace and weight epoch. Its word holds the number that its rows
carry; another value there means that none of them counts any more.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstrata.proto.status import SLOT_ROW

U64s = npt.NDArray[np.uint64]

MAGIC: Final = int.from_bytes(b"kvsindex", "little")
LAYOUT: Final = 1

#: Words of the head. TABLES: how many there are. SERVING: 1 while the node may be read from. BEAT: nanoseconds of
#: CLOCK_MONOTONIC when the node last said so.
WORD_MAGIC, WORD_LAYOUT, WORD_INCARNATION, WORD_TABLES, WORD_SERVING, WORD_BEAT = range(6)
HEAD_WORDS: Final = 512
SCOPES: Final = 1 << 16
HEAD_BYTES: Final = 8 * (HEAD_WORDS + SCOPES)
#: A scope's number: which word it has, and a count that makes it another one each time the word is given away.
SCOPE_BITS: Final = 16

BUCKET_ROWS: Final = 8
BUCKET_TAGS: Final = struct.Struct(f"@{BUCKET_ROWS}Q")
#: Key (two words), what :data:`SLOT_ROW` has, scope, digest.
ROW: Final = struct.Struct("@QQIIQQQQQ")
ROW_WORDS: Final = 8
ROW_TYPE: Final = np.dtype(
    [("key", "<u8", 2), ("slab", "<u4"), ("slot", "<u4"), ("offset", "<u8"), ("generation", "<u8"),
     ("checksum", "<u8"), ("scope", "<u8"), ("digest", "<u8")]
)  # fmt: skip
assert ROW.size == ROW_TYPE.itemsize == 8 * ROW_WORDS and ROW.size == SLOT_ROW.size + 32
BUCKET_BYTES: Final = BUCKET_ROWS * (8 + ROW.size)
TABLES_MAX: Final = 16

#: A reader believes the index for so long after the node's last beat.
BEAT_MAX_NS: Final = 1_000_000_000

_MASK: Final = (1 << 64) - 1
#: Odd, from the digits of pi; one a word, so that words that change places show.
_ODD: Final = (
    0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1, 0x082EFA98EC4E6C89,
    0x452821E638D01377, 0xBE5466CF34E90C6D, 0xC0AC29B7C97C50DD,
)  # fmt: skip
_ODDS: Final = np.array(_ODD, np.uint64)
_A, _B, _C = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93
_A64, _B64, _29, _32 = np.uint64(_A), np.uint64(_B), np.uint64(29), np.uint64(32)


def keys_of(packed: bytes, width: int) -> U64s:
    """The key of each hash, u64[n, 2]: the hash itself where it is of 16 bytes, else its xxh3_128."""
    if width != 16:
        digest = xxhash.xxh3_128_digest
        packed = b"".join([digest(packed[start : start + width]) for start in range(0, len(packed), width)])
    return np.frombuffer(packed, np.uint64).reshape(-1, 2)


def key_of(packed: bytes) -> tuple[int, int]:
    """:func:`keys_of` of one hash."""
    if len(packed) != 16:
        packed = xxhash.xxh3_128_digest(packed)
    return int.from_bytes(packed[:8], "little"), int.from_bytes(packed[8:], "little")


def spread(low: int, high: int, scope: int) -> int:
    """Where a key is looked for: its tag is this with the lowest bit set; the numbers of its two buckets, to be cut to
    the table, are this, and this >> 32."""
    x = (low * _A + high * _B + scope * _C) & _MASK
    x ^= x >> 29
    x = x * _B & _MASK
    return x ^ x >> 32


def spread_all(keys: U64s, scope: int) -> U64s:
    """:func:`spread` of many keys, u64[n]."""
    x: U64s = keys[:, 0] * _A64
    x += keys[:, 1] * _B64
    x += np.uint64(scope * _C & _MASK)
    x ^= x >> _29
    x *= _B64
    x ^= x >> _32
    return x


def digest(low: int, high: int, place: int, offset: int, generation: int, checksum: int, scope: int) -> int:
    """The last word of a row; ``place`` is slab + (slot << 32). Never 0."""
    k = _ODD
    mixed = low * k[0] + high * k[1] + place * k[2] + offset * k[3] + generation * k[4] + checksum * k[5]
    return (mixed + scope * k[6]) & _MASK | 1


def digests_of(rows: U64s) -> U64s:
    """:func:`digest` of rows, u64[n, 8]."""
    mixed: U64s = rows[:, :-1] @ _ODDS
    return mixed | np.uint64(1)


def beats(beat_ns: int, now_ns: int) -> bool:
    """Whether a beat is fresh. One of the future is not: who wrote it has another clock."""
    return 0 <= now_ns - beat_ns <= BEAT_MAX_NS
