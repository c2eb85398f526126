"""Bounds of what one client may have and ask of a process. Sans-IO: time comes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstrata.proto.errors import Busy, ConfigError

#: More connections, and requests a second, than a process can have.
NO_BOUND: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one client: of all that come with tickets for one token, or of one session where tickets are off.

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

    __slots__ = ("_at", "_bounds", "_tokens", "connections")

    def __init__(self, bounds: Bounds, now: float) -> None:
        self.connections = 0
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
        return True


class AccountBook:
    """Accounts of those that are connected, by whatever names a client. The caller holds a lock."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._accounts: dict[str | bytes, Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def enter(self, who: str | bytes, now: float) -> Account:
        """One more connection. Raises :class:`Busy` at the bound."""
        account = self._accounts.get(who)
        if account is None:
            account = self._accounts[who] = Account(self.bounds, now)
        if account.connections >= self.bounds.connections:
            raise Busy(f"a client has at most {self.bounds.connections} connections here: close some")
        account.connections += 1
        return account

    def leave(self, who: str | bytes) -> None:
        """One connection less."""
        account = self._accounts[who]
        account.connections -= 1
        if not account.connections:
            del self._accounts[who]

    def check(self) -> None:
        """Assert that only those that are connected are known, each within its bound."""
        for who, account in self._accounts.items():
            assert 0 < account.connections <= self.bounds.connections, (who, account.connections)
            assert account._tokens <= self.bounds.burst, who
