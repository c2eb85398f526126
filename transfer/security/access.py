"""What each call needs, and the gate that holds callers to it: the same for gRPC and HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstrata.proto.errors import Forbidden, Unauthenticated
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role

if TYPE_CHECKING:
    from kvstrata.transfer.security.tokens import Holder, TokenFile

#: Of whoever made the call that is answered now, within its handler; everything where tokens are off.
CALLER: ContextVar[Rights] = ContextVar("kvstrata_caller", default=EVERYTHING)
_SCHEME: Final = "bearer "
#: Why callers are refused, for metrics.
REASONS: Final = ("no_token", "bad_token", "role", "tenant", "throttled")


def _nothing(_: Rights, __: Any) -> None:
    return


@dataclass(frozen=True, slots=True)
class Access:
    """A call needs ``role``, and rights to what ``touches`` finds named in the request, which else raises
    :class:`ForbiddenSalt`.

    ``role`` None: any will do. ``may_reset``: a client whose token may reset will do as well. ``open``: nothing has to
    be shown, but what is shown has to be good.
    """

    role: Role | None
    touches: Callable[[Rights, Any], None] = _nothing
    may_reset: bool = False
    open: bool = False


class Gate:
    """Who calls, and whether they may; counts refusals by reason. Thread-safe."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def knows(self, names: tuple[str, ...]) -> bool:
        """Whether a certificate of these names stands for a token."""
        return self._tokens.holder_of_certificate(names) is not None

    @property
    def knows_certificates(self) -> bool:
        return self._tokens.knows_certificates

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
            if access.role is not None and not (access.may_reset and holder.may_reset):
                rights.need(access.role)
        except Forbidden:
            self.count("role")
            raise
        try:
            if request is not None:
                access.touches(rights, request)
        except Forbidden:
            self.count("tenant")
            raise
        CALLER.set(rights)
        return rights

    def stand(self, authorization: str | None, names: tuple[str, ...], rights: Rights) -> None:
        """For a call that lasts: whether who made it still has ``rights``. Cheap: the file is looked at at most once a
        second. Raises :class:`Unauthenticated` when its token is gone, or when it allows something else by now."""
        if self.holder(authorization, names).rights != rights:
            self.count("bad_token")
            raise Unauthenticated("what this token may do has changed: call again")

    def count(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def refused(self) -> dict[str, int]:
        """Callers refused since the start, by :data:`REASONS`."""
        with self._lock:
            return dict(self._refused)


def touch_salts(rights: Rights, salt: str | None) -> None:
    """Raises :class:`ForbiddenSalt` unless this tenant, or for None every one, may be touched."""
    if salt is None:
        rights.touch_all(salts=True, groups=False)
    else:
        rights.touch_salt(salt)


def touch_groups(rights: Rights, group: str | None) -> None:
    """As :func:`touch_salts`, for a namespace group."""
    if group is None:
        rights.touch_all(salts=False, groups=True)
    else:
        rights.touch_group(group)
