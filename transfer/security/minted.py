"""Tickets of a process that has the ticket keys itself: it makes its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstrata.proto import channel_pb2 as pb
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tickets import LIFE_S, TicketKeys, issue


class MintedTickets:
    """A :class:`TicketSource`: a fresh ticket at half of the last one's life, and when the keys change. Thread-safe:
    two threads may mint at once, and both tickets are good."""

    def __init__(
        self, key_file: KeyFile, rights: Rights, *, life_s: float = LIFE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._key_file = key_file
        self._rights = rights
        self._life_s = life_s
        self._clock = clock
        self._minted: tuple[pb.Ticket, TicketKeys, float] | None = None

    def current(self) -> pb.Ticket:
        keys, now = self._key_file.keys(), self._clock()
        minted = self._minted
        if minted is not None:
            ticket, of, at = minted
            if of is keys and 0 <= now - at < self._life_s / 2:
                return ticket
        ticket = issue(keys, self._rights, now, self._life_s)
        self._minted = (ticket, keys, now)
        return ticket

    def refused(self, ticket: pb.Ticket) -> None:
        """Mint another, with the keys that the file has now."""
        self._key_file.refresh()
        minted = self._minted
        if minted is not None and minted[0] is ticket:
            self._minted = None


def node_tickets(key_file: KeyFile, node_id: str) -> MintedTickets:
    """A storage node's: it serves every tenant, so it may touch all."""
    return MintedTickets(key_file, Rights(node_id, Role.NODE, ("*",), ("*",)))
