"""What each call needs, and the gate that holds callers to it: the same for gRPC and HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvstrata.proto.errors import Forbidden, Unauthenticated
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tokens import Holder, TokenFile

_SCHEME: Final = "bearer "
#: Why callers are refused, for metrics.
REASONS: Final = ("no_token", "bad_token", "role", "tenant", "throttled")
#: A tenant and a group; None: all of them.
Touched = tuple[str | None, str | None]


def _nothing(_: Any) -> Iterable[Touched]:
    return ()


@dataclass(frozen=True, slots=True)
class Access:
    """A call needs ``role``, and rights to the tenants and groups that ``touches`` finds in the request.

    ``or_role`` will do as well. ``may_reset``: so will a client whose token may reset.
    """

    role: Role
    or_role: Role | None = None
    touches: Callable[[Any], Iterable[Touched]] = _nothing
    may_reset: bool = False


class Gate:
    """Who calls, and whether they may; counts refusals by reason. Thread-safe."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def holder(self, authorization: str | None, names: tuple[str, ...]) -> Holder:
        """Whose ``authorization`` header this is; without one, whose certificate. Raises :class:`Unauthenticated`."""
        if authorization is None:
            holder = self._tokens.holder_of_certificate(names) if names else None
            if holder is None:
                self.count("no_token")
                raise Unauthenticated("no token was shown: send `authorization: Bearer TOKEN`")
            return holder
        try:
            if authorization[: len(_SCHEME)].lower() != _SCHEME:
                raise Unauthenticated("the authorization header is not `Bearer TOKEN`")
            return self._tokens.holder_of(authorization[len(_SCHEME) :].strip())
        except Unauthenticated:
            self.count("bad_token")
            raise

    def admit(self, access: Access | None, authorization: str | None, names: tuple[str, ...], request: Any) -> Rights:
        """The caller's rights. Raises :class:`Unauthenticated` or :class:`Forbidden`; ``request`` None: it is yet to
        come, and touches nothing by itself."""
        holder = self.holder(authorization, names)
        rights = holder.rights
        try:
            if access is None:
                raise Forbidden("nobody may call this while tokens are on")
            if not (access.may_reset and holder.may_reset) and not (access.or_role and rights.has(access.or_role)):
                rights.need(access.role)
        except Forbidden:
            self.count("role")
            raise
        try:
            for salt, group in access.touches(request) if request is not None else ():
                touch(rights, salt, group)
        except Forbidden:
            self.count("tenant")
            raise
        return rights

    def count(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def refused(self) -> dict[str, int]:
        """Callers refused since the start, by :data:`REASONS`."""
        with self._lock:
            return dict(self._refused)


def touch(rights: Rights, salt: str | None, group: str | None) -> None:
    """Raises :class:`ForbiddenSalt`; for None unless all tenants, or all groups, may be touched."""
    rights.touch_all(salts=salt is None, groups=group is None)
    if salt is not None:
        rights.touch_salt(salt)
    if group is not None:
        rights.touch_group(group)
