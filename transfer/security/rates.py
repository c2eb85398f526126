"""Bounds of what one client may have and ask of a process. Sans-IO: time comes in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from kvstrata.proto.errors import Busy, ConfigError

#: More connections, and requests a second, than a process can have.
NO_BOUND: Final = 1 << 31
#: All clients of one token have together so many times what one of them may have: a fleet of engines shares a token.
CLIENTS_OF_A_SUBJECT: Final = 64
#: But no more connections than this where they are bounded: of those that a process takes some are left to others.
CONNECTIONS_OF_A_SUBJECT: Final = 1536


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one client, which is one session; where tickets are on, what they are for has :meth:`together` bounds too.

    ``burst`` requests may come at once, ``requests_s`` a second for long. ``unproved`` bounds the connections of all
    that have not shown a ticket yet: past it, the one that is longest about it is closed. Raises
    :class:`ConfigError`.
    """

    connections: int = 1024
    requests_s: float = 20_000.0
    burst: int = 20_000
    unproved: int = 256

    def __post_init__(self) -> None:
        if self.connections < 1 or self.requests_s <= 0 or self.burst < 1 or self.unproved < 1:
            raise ConfigError("bounds of a client are 1 or more: leave them out for the usual ones")

    def together(self) -> Bounds:
        """Of all clients that come with tickets for one token."""
        most = max(self.connections, CONNECTIONS_OF_A_SUBJECT)
        return replace(
            self,
            connections=min(self.connections * CLIENTS_OF_A_SUBJECT, most),
            requests_s=self.requests_s * CLIENTS_OF_A_SUBJECT,
            burst=self.burst * CLIENTS_OF_A_SUBJECT,
        )


USUAL: Final = Bounds()


def bounds_of(requests_s: int, connections: int) -> Bounds:
    """As an operator gives them, 0 for no bound. A second's worth may come at once. Raises :class:`ConfigError`."""
    if requests_s < 0 or connections < 0:
        raise ConfigError("--client-requests and --client-connections are 0 or more: 0 is no bound")
    requests_s = requests_s or NO_BOUND
    return Bounds(connections or NO_BOUND, float(requests_s), requests_s)


class Account:
    """What one client has and has asked for: its connections, and a bucket of tokens for its requests.

    A request takes a token; tokens come back at ``requests_s`` a second, up to ``burst`` (the token bucket of Turner,
    "New directions in communications", 1986). Threads may race in :meth:`take`: then a token more or less is taken.
    """

    __slots__ = ("_at", "_bounds", "_tokens", "_whole", "connections")

    def __init__(self, bounds: Bounds, now: float, whole: Account | None = None) -> None:
        self.connections = 0
        self._whole = whole  #: that of all clients of its subject, which is asked after its own
        self._bounds = bounds
        self._tokens = float(bounds.burst)
        self._at = now

    def take(self, now: float) -> bool:
        """One request at ``now`` (monotonic seconds): False when there have been too many."""
        bounds = self._bounds
        tokens = self._tokens + (now - self._at) * bounds.requests_s
        if tokens > bounds.burst:
            tokens = float(bounds.burst)
        self._at = now
        if tokens < 1.0:
            self._tokens = tokens
            return False
        self._tokens = tokens - 1.0
        return self._whole is None or self._whole.take(now)


class AccountBook:
    """Accounts of those that are connected: by session, and by subject too where there is one. The caller holds a
    lock."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.together = bounds.together()
        self._clients: dict[tuple[str, bytes], Account] = {}
        self._subjects: dict[str, Account] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def enter(self, subject: str, session: bytes, now: float) -> Account:
        """One more connection; ``subject`` "" where tickets are off. Raises :class:`Busy` at a bound."""
        whole = self._subjects.get(subject)
        if whole is None and subject:
            whole = Account(self.together, now)
        account = self._clients.get((subject, session)) or Account(self.bounds, now, whole)
        if account.connections >= self.bounds.connections:
            raise Busy(f"a client has at most {self.bounds.connections} connections here: close some")
        if whole is not None:
            if whole.connections >= self.together.connections:
                raise Busy(
                    f"all clients of {subject} have at most {self.together.connections} connections here together: "
                    "close some, or give some of them a token of their own"
                )
            whole.connections += 1
            self._subjects[subject] = whole
        account.connections += 1
        self._clients[subject, session] = account
        return account

    def leave(self, subject: str, session: bytes) -> None:
        """One connection less."""
        account = self._clients[subject, session]
        account.connections -= 1
        if not account.connections:
            del self._clients[subject, session]
        whole = self._subjects.get(subject)
        if whole is not None:
            whole.connections -= 1
            if not whole.connections:
                del self._subjects[subject]

    def check(self) -> None:
        """Assert that only those that are connected are known, each within its bound, and that sums agree."""
        sums: dict[str, int] = {}
        for (subject, session), account in self._clients.items():
            assert 0 < account.connections <= self.bounds.connections, (subject, account.connections)
            assert account._tokens <= self.bounds.burst, (subject, session)
            assert account._whole is self._subjects.get(subject), subject
            if subject:
                sums[subject] = sums.get(subject, 0) + account.connections
        assert sums == {subject: whole.connections for subject, whole in self._subjects.items()}
        assert all(count <= self.together.connections for count in sums.values())


def count_opened(counts: Counter[str], subject: str, most: int, what: str, where: str) -> None:
    """One more of what ``subject`` has opened, and was new to this process; "" is not counted. ``what`` it is, of which
    there is room for a bounded number, and ``where``, go into the error. Raises :class:`Busy` past ``most``."""
    if not subject:
        return
    if counts[subject] >= most:
        raise Busy(
            f"{subject} has opened {most} {what} that were new to this {where}, which is the bound of one token until "
            f"the {where} is restarted: use those, or another token"
        )
    counts[subject] += 1
