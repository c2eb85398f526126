"""What a block holds in a replay: a pseudo-random stream of its key, so that every byte can be verified.

The stream is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
in counter mode: word i of a block is ``mix(seed + (i + 1) * GAMMA)``, and the seed is a mix of the
namespace, the cache salt and the block hash. Bytes of another key, another tenant or another offset differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvstrata.cli.replay.blocks import HASH_BYTES

#: Words made at a time: small enough that a dozen passes over them stay in the L2 cache.
CHUNK_WORDS = 1 << 13

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]


class PayloadStream:
    """Makes and verifies the payload of one namespace's blocks. Not thread-safe: it owns its scratch."""

    def __init__(self, namespace: bytes, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}: it must be 1 or more")
        self.block_bytes = block_bytes
        self._namespace = namespace
        words = -(-block_bytes // 8)
        with np.errstate(over="ignore"):
            self._counters = np.arange(1, words + 1, dtype=np.uint64) * _GAMMA
        self._columns = min(words, CHUNK_WORDS)
        self._rows = max(1, CHUNK_WORDS // self._columns)
        self._made = np.empty((self._rows, self._columns), dtype=np.uint64)
        self._scratch = np.empty_like(self._made)

    def fill(self, rows: Rows, salt: str, hashes: Rows) -> None:
        """Write block i's payload to ``rows[i]``; rows uint8 [n, block_bytes], hashes uint8 [n, 16]."""
        for part, expected in self._pieces(rows, salt, hashes):
            part[:] = expected

    def wrong_bytes(self, rows: Rows, salt: str, hashes: Rows) -> int:
        """How many bytes of ``rows`` are not what their keys say; shapes as in :meth:`fill`."""
        wrong = 0
        for part, expected in self._pieces(rows, salt, hashes):
            if not np.array_equal(part, expected):
                wrong += int(np.count_nonzero(part != expected))
        return wrong

    def _pieces(self, rows: Rows, salt: str, hashes: Rows) -> Iterator[tuple[Rows, Rows]]:
        """Yield (piece of ``rows``, its payload), the payload valid until the next piece."""
        if rows.shape != (len(hashes), self.block_bytes):
            raise ValueError(f"rows are {rows.shape}, not {(len(hashes), self.block_bytes)}")
        seeds = self._seeds(salt, hashes)
        for top in range(0, len(rows), self._rows):
            for left in range(0, len(self._counters), self._columns):
                words = self._mixed(seeds[top : top + self._rows], self._counters[left : left + self._columns])
                part = rows[top : top + self._rows, left * 8 : (left + self._columns) * 8]
                # The last word of a block whose size is no multiple of 8 is cut.
                yield part, words.view(np.uint8)[:, : part.shape[1]]

    def _seeds(self, salt: str, hashes: Rows) -> Words:
        """uint64 [n], one a key."""
        tenant = hashlib.blake2b(self._namespace + b"\0" + salt.encode(), digest_size=8).digest()
        halves = np.ascontiguousarray(hashes).view(np.uint64).reshape(len(hashes), HASH_BYTES // 8)
        seeds = _mix(halves[:, 0] ^ np.frombuffer(tenant, dtype=np.uint64)[0], np.empty(len(halves), np.uint64))
        seeds ^= halves[:, 1]
        return _mix(seeds, np.empty(len(halves), np.uint64))

    def _mixed(self, seeds: Words, counters: Words) -> Words:
        made = self._made[: len(seeds), : len(counters)]
        np.add(seeds[:, None], counters[None, :], out=made)
        return _mix(made, self._scratch[: len(seeds), : len(counters)])


def _mix(words: Words, scratch: Words) -> Words:
    """The finaliser of splitmix64, in place."""
    np.right_shift(words, _S30, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX_1, out=words)
    np.right_shift(words, _S27, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, _MIX_2, out=words)
    np.right_shift(words, _S31, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    return words
