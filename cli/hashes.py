"""Block hashes on a command line: hexadecimal digits, all of them or the first few."""

from __future__ import annotations

import re

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.keys import HASH_BYTES_MAX, HASH_BYTES_MIN

_WHOLE = re.compile(rf"(?:[0-9a-fA-F]{{2}}){{{HASH_BYTES_MIN},{HASH_BYTES_MAX}}}")


def looks_whole(text: str) -> bool:
    """Can ``text`` be a whole hash?"""
    return _WHOLE.fullmatch(text) is not None


def parse_prefix(text: str) -> bytes:
    """The leading bytes of a hash, whole ones; raises :class:`ConfigError`."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if not found or len(found) > HASH_BYTES_MAX or " " in text:
        raise ConfigError(
            f"{text!r} is not the beginning of a block hash: give hexadecimal digits, two a byte, at most "
            f"{2 * HASH_BYTES_MAX}"
        )
    return found
