"""What a tenant is called where everybody who may look can read it."""

from __future__ import annotations

from kvstrata.proto.keys import salt_tag

EMPTY = "(empty)"


def shown(salt: str, *, named: bool) -> str:
    """The salt where it is an operator's word (``named``: it has a policy), else ``#`` and its :func:`salt_tag`: a salt
    may tell who an end user is."""
    if not salt:
        return EMPTY
    if named and not salt.startswith(("#", "(")):
        return salt
    return "#" + salt_tag(salt)
