"""What callers pass, checked before any byte moves: every error names the argument and what it should be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstrata.client.namespace import PoolNamespace
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import SALT_CHARACTERS_MAX, check_salt, pack_hashes
from kvstrata.transfer.regions import BlockView

#: n hashes, packed in one bytes-like of n * hash_bytes, as u8[n, hash_bytes], or one bytes each.
Hashes = bytes | bytearray | memoryview | Sequence[bytes] | npt.NDArray[np.uint8]

FIRST_INDEX_MAX = (1 << 32) - 1
REQUEST_CHARACTERS_MAX = 256


def checked_hashes(namespace: PoolNamespace, cache_salt: str, hashes: Hashes) -> bytes:
    """The hashes, packed. Raises :class:`InvalidArgument` for a namespace, salt or hashes that do not fit."""
    if not isinstance(namespace, PoolNamespace):
        raise InvalidArgument(f"the namespace is a {type(namespace).__name__}: open it with client.namespace(...)")
    if type(cache_salt) is not str or len(cache_salt) > SALT_CHARACTERS_MAX:
        check_salt(cache_salt)
    if not cache_salt.isascii():
        check_text("cache_salt", cache_salt)
    if type(hashes) is bytes:
        if len(hashes) % namespace.hash_bytes == 0:
            return hashes
    elif isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint8:
            raise InvalidArgument(f"hashes have dtype {hashes.dtype}: expected uint8[n, {namespace.hash_bytes}]")
        return pack_hashes(hashes.tobytes(), namespace.hash_bytes)
    return pack_hashes(hashes, namespace.hash_bytes)


def check_text(name: str, text: str) -> None:
    """Raises :class:`InvalidArgument` for what is no text, or text that UTF-8 cannot carry."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{name} is a {type(text).__name__}: expected a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is no valid Unicode text: {error.reason} at {error.start}") from error


def checked_request(name: str) -> str:
    """An engine's name of a request; raises :class:`InvalidArgument`."""
    check_text("request", name)
    if len(name) > REQUEST_CHARACTERS_MAX:
        raise InvalidArgument(f"request has {len(name)} characters: at most {REQUEST_CHARACTERS_MAX} are allowed")
    return name


def check_blocks(namespace: PoolNamespace, packed: bytes, blocks: BlockView, *, into: bool) -> int:
    """The number of blocks. Raises :class:`InvalidArgument` when they do not fit the hashes or the namespace,
    or cannot be loaded ``into``; :class:`Closed` when their region was unregistered."""
    if not isinstance(blocks, BlockView):
        raise InvalidArgument(f"blocks is a {type(blocks).__name__}: use region.rows(ns) or region.view(ns, offsets)")
    count = len(blocks.table)
    if count * namespace.hash_bytes != len(packed):
        raise InvalidArgument(f"{len(packed) // namespace.hash_bytes} hashes for {count} blocks")
    if blocks.block_bytes != namespace.block_bytes:
        raise InvalidArgument(f"blocks of {blocks.block_bytes} bytes: the namespace says {namespace.block_bytes}")
    region = blocks.region
    if region.closed:
        region.check_open()
    if into and not region.writable:
        raise InvalidArgument("the region is read-only: nothing can be loaded into it")
    return count


def checked_parts(
    namespace: PoolNamespace, parts: Sequence[int], other: object, name: Literal["landed", "written"]
) -> tuple[int, ...]:
    """Ends of byte ranges, given with the argument called ``name``. Raises :class:`InvalidArgument` for what is no
    partition."""
    ends = tuple(int(end) for end in parts)
    if bool(ends) != (other is not None):
        raise InvalidArgument(
            f"parts and {name} go together: give the ends of byte ranges and what {name} says of them"
        )
    if ends and (ends[-1] != namespace.block_bytes or any(b <= a for a, b in pairwise((0, *ends)))):
        raise InvalidArgument(
            f"parts are {list(ends)}: expected ascending ends of byte ranges up to {namespace.block_bytes}"
        )
    return ends


def checked_parent(namespace: PoolNamespace, parent: bytes | None, first_index: int) -> bytes:
    """The parent's hash, empty at a chain's head."""
    if isinstance(first_index, bool) or not isinstance(first_index, int | np.integer):
        raise InvalidArgument(f"first_index is {first_index!r}: expected an integer")
    if not 0 <= first_index <= FIRST_INDEX_MAX:
        raise InvalidArgument(f"first_index is {first_index}: it must be between 0 and {FIRST_INDEX_MAX}")
    if not parent:
        return b""
    if len(parent) != namespace.hash_bytes:
        raise InvalidArgument(f"parent has {len(parent)} bytes, the namespace's hashes have {namespace.hash_bytes}")
    return bytes(parent)
