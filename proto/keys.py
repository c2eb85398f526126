"""Namespaces, salts and packed block hashes: the parts of a key, and their bounds.

A key is (namespace, cache_salt, block hash). Hashes travel packed: one bytes-like of
``n * hash_bytes``, never a list of objects, wherever an array will do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstrata.proto.channel_pb2 import NamespaceSpec
from kvstrata.proto.errors import InvalidArgument

HASH_BYTES_MIN = 16
HASH_BYTES_MAX = 32
#: What the directory keeps of a hash: see :func:`kvstrata.proto.folding.fold`.
FOLDED_BYTES = 16
SALT_CHARACTERS_MAX = 128
GROUP_CHARACTERS_MAX = 1024
SHARD_COUNT_MAX = 1024
BLOCK_BYTES_MAX = 1 << 30
BLOCK_TOKENS_MAX = 1 << 20
#: Hashes in one call on the wire. A client splits longer calls.
HASHES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """One shard of one model's KV: everything in it is interchangeable and of one size.

    ``group`` is the fingerprint of all that makes the bytes interchangeable but the rank.
    Raises :class:`InvalidArgument` from :meth:`validated` when a part is out of bounds.
    """

    group: str
    block_bytes: int
    block_tokens: int
    hash_bytes: int = 16
    shard: int = 0
    shard_count: int = 1

    def validated(self) -> Namespace:
        """Return self, or raise :class:`InvalidArgument` naming the part and its bound."""
        _within("group characters", len(self.group), 1, GROUP_CHARACTERS_MAX)
        _within("block_bytes", self.block_bytes, 1, BLOCK_BYTES_MAX)
        _within("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        _within("hash_bytes", self.hash_bytes, HASH_BYTES_MIN, HASH_BYTES_MAX)
        _within("shard_count", self.shard_count, 1, SHARD_COUNT_MAX)
        _within("shard", self.shard, 0, self.shard_count - 1)
        return self

    @property
    def identity(self) -> bytes:
        """16 bytes that name the namespace: equal exactly when all parts are equal."""
        return hashlib.blake2b(self.to_spec().SerializeToString(deterministic=True), digest_size=16).digest()

    def to_spec(self) -> NamespaceSpec:
        return NamespaceSpec(
            group=self.group,
            shard=self.shard,
            shard_count=self.shard_count,
            block_bytes=self.block_bytes,
            block_tokens=self.block_tokens,
            hash_bytes=self.hash_bytes,
        )

    @classmethod
    def from_spec(cls, spec: NamespaceSpec) -> Namespace:
        """Read one from the wire; raises :class:`InvalidArgument` when it is out of bounds."""
        return cls(
            group=spec.group,
            block_bytes=spec.block_bytes,
            block_tokens=spec.block_tokens,
            hash_bytes=spec.hash_bytes,
            shard=spec.shard,
            shard_count=spec.shard_count,
        ).validated()


def _within(what: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{what} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidArgument(f"{what} is {value}: it must be between {low} and {high}")


def check_salt(cache_salt: str) -> str:
    """Return the salt, or raise :class:`InvalidArgument`. The empty salt is an ordinary tenant."""
    if not isinstance(cache_salt, str):
        raise InvalidArgument(f"cache_salt must be a string, not {type(cache_salt).__name__}")
    if len(cache_salt) > SALT_CHARACTERS_MAX:
        raise InvalidArgument(f"cache_salt has {len(cache_salt)} characters: at most {SALT_CHARACTERS_MAX} are allowed")
    return cache_salt


def salt_tag(cache_salt: str) -> str:
    """What stands for a tenant where its name is not to be shown: the first 12 hex digits of its salt's SHA-256; "" for
    the empty salt. It tells two apart, and who knows a salt can find it again."""
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).hexdigest()[:12] if cache_salt else ""


def check_group(group: str) -> str:
    """Return the name of a namespace group, or raise :class:`InvalidArgument`: it has too many characters to be one."""
    if len(group) > GROUP_CHARACTERS_MAX:
        raise InvalidArgument(f"a namespace group has at most {GROUP_CHARACTERS_MAX} characters, not {len(group)}")
    return group


def pack_hashes(hashes: bytes | bytearray | memoryview | Sequence[bytes], hash_bytes: int) -> bytes:
    """Return ``hashes`` as one bytes of n * hash_bytes.

    Takes a packed bytes-like, or a sequence of bytes of ``hash_bytes`` each. Raises
    :class:`InvalidArgument` when a length does not fit.
    """
    if isinstance(hashes, bytes | bytearray | memoryview):
        packed = bytes(hashes)
        if len(packed) % hash_bytes:
            raise InvalidArgument(f"packed hashes are {len(packed)} bytes: not a multiple of hash_bytes = {hash_bytes}")
        return packed
    for position, item in enumerate(hashes):
        if len(item) != hash_bytes:
            raise InvalidArgument(f"hash {position} has {len(item)} bytes, the namespace says {hash_bytes}")
    return b"".join(hashes)


def split_hashes(packed: bytes, hash_bytes: int) -> Iterator[bytes]:
    """Yield each hash of a packed run. One object a hash: only where a dict needs them."""
    for start in range(0, len(packed), hash_bytes):
        yield packed[start : start + hash_bytes]
