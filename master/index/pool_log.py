"""What nodes say that they have taken in and let go of, for whoever publishes it: whole hashes, as nodes name them.

Not the directory's log: that one knows folded hashes, and is followed by as many as like.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.keys import Namespace

#: What waits for the publisher; past it the newest is lost, and the publisher leaves a gap for it.
ENTRIES_MAX: Final = 1 << 16
BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Blocks:
    """A node has these blocks in ``tier``, or (not ``added``) no more. ``hashes``: packed."""

    added: bool
    node_id: str
    namespace: Namespace
    salt: str
    tier: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class NodeCleared:
    """What a node was said to have does not count; it may say it again."""

    node_id: str


@dataclass(frozen=True, slots=True)
class ScopeCleared:
    """Nobody has anything of a namespace group ("": of any), or of one tenant of it (None: of any)."""

    group: str
    salt: str | None


Said = Blocks | NodeCleared | ScopeCleared


class PoolLog:
    """A bounded queue, part of the master's state. Nothing is kept while it is not :attr:`on`."""

    def __init__(self) -> None:
        self.on = False
        self.lost = 0  #: entries that found no room
        self._said: deque[Said] = deque()
        self._bytes = 0

    def append(self, said: Said) -> None:
        if not self.on:
            return
        size = len(said.hashes) if isinstance(said, Blocks) else 0
        if len(self._said) >= ENTRIES_MAX or self._bytes + size > BYTES_MAX:
            self.lost += 1
            return
        self._said.append(said)
        self._bytes += size

    def take(self, count: int) -> tuple[list[Said], int]:
        """The oldest ``count``, and how many were lost after them that nobody was told of: 0 while more are here."""
        said = [self._said.popleft() for _ in range(min(count, len(self._said)))]
        self._bytes -= sum(len(each.hashes) for each in said if isinstance(each, Blocks))
        lost = 0
        if not self._said:
            lost, self.lost = self.lost, 0
        return said, lost

    def check(self) -> None:
        assert self._bytes == sum(len(each.hashes) for each in self._said if isinstance(each, Blocks)) <= BYTES_MAX
        assert len(self._said) <= ENTRIES_MAX and (self.on or not self._said)
