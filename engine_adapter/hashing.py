"""Chained block hashes: the same tokens, salt and extra keys give the same hash in every process.

::

    root   = H(scheme, block tokens, salt, extra keys)
    hash_0 = H(root,   tokens of block 0)
    hash_i = H(hash_i-1, tokens of block i)

Tokens are hashed as little-endian unsigned 32-bit integers, texts as length-prefixed UTF-8, so that nothing
depends on the process: not on PYTHONHASHSEED, not on the byte order, not on how a prompt was cut in calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import numpy as np
import xxhash

from kvstrata.proto.errors import InvalidArgument

HashAlgorithm = Literal["sha256", "xxh3-128"]

#: Part of every root and of the namespace fingerprint: raise it when anything in this module changes a hash.
SCHEME_VERSION: Final = 1
TOKEN_MAX: Final = (1 << 32) - 1


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


_DIGESTS: Final[dict[str, Callable[[bytes], bytes]]] = {"sha256": _sha256, "xxh3-128": _xxh3}
_WIDTHS: Final[dict[str, int]] = {"sha256": 32, "xxh3-128": 16}


class BlockHasher:
    """Hashes the full blocks of token sequences. Stateless, thread-safe.

    ``algorithm``: ``sha256`` (32 bytes; a tenant cannot construct another's block) or ``xxh3-128`` (16 bytes;
    several times faster, not collision-resistant against an adversary: for pools with one trust domain).
    """

    def __init__(self, block_tokens: int, algorithm: HashAlgorithm = "sha256") -> None:
        if block_tokens < 1:
            raise InvalidArgument(f"block_tokens is {block_tokens}: expected at least 1")
        if algorithm not in get_args(HashAlgorithm):
            raise InvalidArgument(f"hash algorithm {algorithm!r}: choose one of {', '.join(get_args(HashAlgorithm))}")
        self.block_tokens = block_tokens
        self.algorithm = algorithm
        self.hash_bytes = _WIDTHS[algorithm]
        self._digest = _DIGESTS[algorithm]

    @property
    def scheme(self) -> str:
        """Names all that decides a hash but its input: part of the namespace fingerprint."""
        return f"chain{SCHEME_VERSION}/{self.algorithm}/{self.block_tokens}"

    def root(self, cache_salt: str, extra_keys: Sequence[str] = ()) -> bytes:
        """What the first block of a sequence is chained to."""
        parts = [self.scheme.encode(), cache_salt.encode(), *(key.encode() for key in extra_keys)]
        return self._digest(b"".join(len(part).to_bytes(4, "little") + part for part in parts))

    def extend(self, root: bytes, hashes: list[bytes], token_ids: Sequence[int]) -> None:
        """Append to ``hashes`` the hash of every full block of ``token_ids`` that it does not cover yet.

        O(new blocks). Raises :class:`InvalidArgument` for a token id outside 0 to 2**32 - 1.
        """
        size = self.block_tokens
        first, last = len(hashes), len(token_ids) // size
        if first >= last:
            return
        try:
            packed = np.asarray(token_ids[first * size : last * size], dtype=np.int64)
        except (OverflowError, ValueError, TypeError) as error:
            raise InvalidArgument(f"token ids must be integers from 0 to {TOKEN_MAX}: {error}") from error
        if packed.min() < 0 or packed.max() > TOKEN_MAX:
            raise InvalidArgument(f"token ids must be from 0 to {TOKEN_MAX}")
        data = packed.astype("<u4").tobytes()
        parent = hashes[-1] if hashes else root
        step, digest = 4 * size, self._digest
        for start in range(0, len(data), step):
            parent = digest(parent + data[start : start + step])
            hashes.append(parent)
