"""Who is let in on the channel, and to what: tickets, the role that each kind of frame needs, bounds a client.

Without ticket keys everybody is let in to everything, and only the bounds hold.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Forbidden, KVError, TicketExpired, TicketNotYetValid, Unauthenticated
from kvstrata.proto.wire import Kind
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.rates import USUAL, Account, AccountBook, Bounds
from kvstrata.transfer.security.rights import Rights, Role, includes
from kvstrata.transfer.security.tickets import CHALLENGE_BYTES, expired, verify

#: Id and secret of the key that a ticket was made with.
Signature = tuple[str, bytes]
_UNSIGNED: Final[Signature] = ("", b"")
#: Why frames and peers are refused: what :attr:`Admission.counts` has.
REFUSALS: Final = ("unauthenticated", "expired", "forbidden", "throttled")


@dataclass(frozen=True, slots=True)
class Need:
    """``roles``: one of them will do; none: whoever has proved a ticket. What ``begins`` nothing is let through when
    the ticket has run out, or too much was asked: it ends, or goes on with, what was begun under a good one."""

    roles: tuple[Role, ...]
    begins: bool = True


_CLIENT: Final = Need((Role.CLIENT,))
_GOES_ON: Final = Need((Role.CLIENT,), begins=False)

#: What a frame of each kind needs. A kind that is not here is refused.
NEEDS: Final[Mapping[int, Need]] = {
    Kind.PING: Need((), begins=False),
    Kind.PROVE: Need((), begins=False),
    Kind.OPEN_NAMESPACE: _CLIENT,
    Kind.LOOKUP: _CLIENT,
    Kind.PLACE: _CLIENT,
    Kind.MISS_REPORT: _CLIENT,
    Kind.REMOVE: _CLIENT,
    Kind.HEARTBEAT: Need((Role.NODE,)),
    Kind.ACQUIRE: _CLIENT,
    Kind.RELEASE: _GOES_ON,
    Kind.RENEW: _GOES_ON,
    Kind.MAP_SLABS: _CLIENT,
    Kind.MAP_INDEX: _CLIENT,
    Kind.TOUCHED: _CLIENT,
    Kind.REGISTER_REGION: _CLIENT,
    Kind.UNREGISTER_REGION: _GOES_ON,
    Kind.RESERVE: _CLIENT,
    Kind.WRITE: _GOES_ON,
    Kind.PULL: _CLIENT,
    Kind.COMMIT: _GOES_ON,
    Kind.ABORT: _GOES_ON,
    Kind.HINT: _CLIENT,
    Kind.OPEN_RAILS: _CLIENT,
    Kind.TEST_RAIL: _CLIENT,
    Kind.NODE_INFO: Need((Role.READ, Role.CLIENT)),
    Kind.NODE_CHECK: Need((Role.OPERATE, Role.NODE)),
}
#: The same by role, for the way of every frame.
_MAY: Final = {
    role: frozenset(
        kind for kind, need in NEEDS.items() if not need.roles or any(includes(role, each) for each in need.roles)
    )
    for role in Role
}
_BEGIN: Final = frozenset(kind for kind, need in NEEDS.items() if need.begins)


class Admission:
    """Of one process. ``key_file`` None: tickets are off. ``counts`` get :data:`REFUSALS`. ``clock`` gives
    Unix seconds. Thread-safe."""

    def __init__(
        self, key_file: KeyFile | None = None, bounds: Bounds = USUAL, clock: Callable[[], float] = time.time
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.bounds = bounds
        self._key_file = key_file
        self._clock = clock
        self._accounts = AccountBook(bounds)
        self._lock = threading.Lock()

    @property
    def asks(self) -> bool:
        """Whether whoever connects has to prove a ticket."""
        return self._key_file is not None

    @staticmethod
    def challenge() -> bytes:
        return os.urandom(CHALLENGE_BYTES)

    def prove(self, message: bytes, greeting: bytes) -> tuple[Rights, pb.ProveOk, Signature]:
        """What a PROVE frame's ticket allows, the answer, and what made the ticket. Raises as :func:`verify`."""
        assert self._key_file is not None
        try:
            proof = pb.Prove.FromString(message)
        except DecodeError as error:
            raise Unauthenticated("a proof that does not decode") from error
        keys = self._key_file.keys()
        try:
            verified = verify(keys, proof, greeting, self._clock())
        except Unauthenticated:
            keys = self._key_file.refresh()  # a master may have read the key that signs a second earlier
            verified = verify(keys, proof, greeting, self._clock())
        return verified.rights, verified.answer, (verified.key, keys.secrets[verified.key])

    def admit(self, rights: Rights, account: Account, kind: int, now: float, signature: Signature = _UNSIGNED) -> None:
        """Whether a frame of this kind may be handled at ``now`` (monotonic seconds).

        A ticket ends with its time, and with its key: so keys that leaked end what was proved with them, too.
        Raises :class:`Forbidden`, :class:`TicketExpired`, or :class:`Busy`.
        """
        if self._key_file is not None:
            if kind not in _MAY[rights.role]:
                raise _forbidden(rights, kind)
            if kind in _BEGIN:
                if rights.expires is not None and expired(rights.expires, self._clock()):
                    raise TicketExpired("the ticket has run out: prove a fresh one")
                if self._key_file.keys().secrets.get(signature[0]) != signature[1]:
                    raise TicketExpired("the ticket's key was taken away: prove one that was made with another")
        if not account.take(now) and kind in _BEGIN:
            self.counts["throttled"] += 1
            raise Busy(f"more than {self.bounds.requests_s:.0f} requests a second of one client: slow down")

    def count(self, error: KVError) -> None:
        """Count a refusal, if it is one."""
        if isinstance(error, Unauthenticated | TicketNotYetValid):
            self.counts["unauthenticated"] += 1
        elif isinstance(error, TicketExpired):
            self.counts["expired"] += 1
        elif isinstance(error, Forbidden):
            self.counts["forbidden"] += 1

    # ------------------------------------------------------------------ connections a client

    def enter(self, subject: str, session: bytes, now: float) -> Account:
        """One more connection of a client. Raises :class:`Busy` at its bound, or that of its subject."""
        with self._lock:
            return self._accounts.enter(subject, session, now)

    def leave(self, subject: str, session: bytes) -> None:
        with self._lock:
            self._accounts.leave(subject, session)

    def check(self) -> None:
        """Assert what holds for the accounts."""
        with self._lock:
            self._accounts.check()


def _forbidden(rights: Rights, kind: int) -> Forbidden:
    roles = " or ".join(NEEDS[kind].roles) if kind in NEEDS else "of nobody"
    return Forbidden(f"this needs the role {roles}, and {rights.subject} has {rights.role}")
