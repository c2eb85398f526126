"""SGLang's names of pages as hashes of the pool.

SGLang names a page by the hexadecimal SHA-256 of its tokens and all before them in the chain, which begins at the
request's ``extra_key`` and ``cache_salt``: other tenants and other adapters have other names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

#: Bytes of a hash in the pool.
HASH_BYTES: Final = 32

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def page_hash(key: str) -> bytes:
    """32 bytes: the digest that ``key`` spells, else the digest of its text (a backend may be handed tagged names)."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.sha256(key.encode()).digest()


def page_hashes(keys: Iterable[str]) -> bytes:
    """The hashes of pages, packed: 32 bytes each."""
    return b"".join(page_hash(key) for key in keys)
