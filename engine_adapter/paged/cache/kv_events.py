"""What an engine tells others about its prefix cache, and the log they are taken from.

A consumer that applies the events in order to a set of (group, hash) has exactly what the engine can find by
prefix: a hash is reported stored at least once before it is reported removed, and removed when its last copy went.
A consumer that fell too far behind is told to forget all, and has less than the engine from then on, never more.
"""

from __future__ import annotations

from typing import Final

import msgspec

#: Events that nobody has taken. Past it they are replaced by one :class:`AllBlocksCleared`.
KV_EVENTS_MAX: Final = 65_536


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="stored"):
    """Consecutive blocks of one chain. ``parent``: the hash before the first, empty at the chain's beginning.

    ``token_ids``: those of the blocks, ``len(hashes) * block_size``.
    """

    hashes: list[bytes]
    parent: bytes
    token_ids: list[int]
    block_size: int
    group: int
    salt: str


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="removed"):
    """These can be found no more. Ignore those you do not know."""

    hashes: list[bytes]
    group: int


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="cleared"):
    """Forget everything said before."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in order until they are taken. Bounded by :data:`KV_EVENTS_MAX`."""

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def append(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared) or len(self._events) >= KV_EVENTS_MAX:
            # Whatever was said before does not matter to someone who forgets it all.
            self._events = [AllBlocksCleared()]
        if not isinstance(event, AllBlocksCleared):
            self._events.append(event)

    def take(self) -> list[KVEvent]:
        """All since the last call."""
        events, self._events = self._events, []
        return events
