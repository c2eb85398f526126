"""What a tenant is called where everybody who may look can read it."""

from __future__ import annotations

import hashlib

EMPTY = "(empty)"
HASH_DIGITS = 12


def shown(salt: str, *, named: bool) -> str:
    """The salt where it is an operator's word (``named``: it has a policy), else a hash of it: ``#`` and hex digits.

    A salt may tell who an end user is. The hash tells two apart, and the owner of a salt can find it again.
    """
    if not salt:
        return EMPTY
    if named and not salt.startswith(("#", "(")):
        return salt
    return "#" + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]
