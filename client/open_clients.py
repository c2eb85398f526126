"""Clients of this process, and what those of them that are closed have counted: what metrics are read from."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from kvstrata.client.counters import Counters
from kvstrata.client.directory import Directory
from kvstrata.client.peers import Peers
from kvstrata.client.security.fetched import FetchedTickets

#: Names of closed clients that are kept apart; those of others are added up under this one.
NAMES_MAX: Final = 256
OTHER_NAMES: Final = "(others)"

R = TypeVar("R")
#: By name.
Rows: TypeAlias = "list[tuple[str, Metered | Past]]"


@dataclass(frozen=True, eq=False, slots=True)
class Metered:
    """What is read of one client at a scrape. ``name`` is its label."""

    name: str
    counters: Counters
    directory: Directory
    peers: Peers
    tickets: FetchedTickets | None

    def opens(self) -> Counter[str]:
        """Breakers that opened, by what kind of peer."""
        return Counter(node=self.peers.breaker_opens(), master=self.directory.masters.breaker_opens())

    def fetched(self) -> Counter[str]:
        """Tickets asked for, by outcome."""
        if self.tickets is None:
            return Counter()
        return Counter(self.tickets.counts())


class Past:
    """What closed clients of one name have counted."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._opens: Counter[str] = Counter()
        self._fetched: Counter[str] = Counter()

    def absorb(self, client: Metered) -> None:
        self.counters.absorb(client.counters)
        self._opens.update(client.opens())
        self._fetched.update(client.fetched())

    def opens(self) -> Counter[str]:
        return self._opens

    def fetched(self) -> Counter[str]:
        return self._fetched


class OpenClients:
    """The clients of this process, and the sums of those that are closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Metered] = set()
        self._past: dict[str, Past] = {}
        #: Closed, and not in the sums yet. A client may be closed by the garbage collector, at any moment in any
        #: thread, maybe in the one that has the lock: it waits for nothing.
        self._closed: deque[Metered] = deque()

    def add(self, client: Metered) -> None:
        with self._lock:
            self._fold()
            self._open.add(client)

    def close(self, client: Metered) -> None:
        """It counts no more; once for each client. Never waits."""
        self._closed.append(client)

    def read(self, question: Callable[[Rows], R]) -> R:
        """Ask something of all clients at one moment, by name."""
        with self._lock:
            self._fold()
            return question([(client.name, client) for client in self._open] + list(self._past.items()))

    def _fold(self) -> None:
        while self._closed:
            client = self._closed.popleft()
            self._open.discard(client)
            name = client.name if client.name in self._past or len(self._past) < NAMES_MAX else OTHER_NAMES
            self._past.setdefault(name, Past()).absorb(client)


#: Of this process.
OPEN: Final = OpenClients()
