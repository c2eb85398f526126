"""Removals that some node has not confirmed yet: kept until every rostered node has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstrata.master.messages import SaveTombstone
from kvstrata.proto.errors import Busy
from kvstrata.proto.keys import Namespace

TOMBSTONES_MAX: Final = 10_000
HASH_BYTES_MAX_TOTAL: Final = 256 << 20


@dataclass(slots=True)
class Tombstone:
    """One removal, and the node ids that may still hold what it removed."""

    command: int
    namespace: Namespace
    salt: str
    hashes: bytes
    waiting: set[str] = field(default_factory=set)

    def saved(self) -> SaveTombstone:
        return SaveTombstone(self.command, self.namespace, self.salt, self.hashes, tuple(sorted(self.waiting)))


class Tombstones:
    """All of them, by command number. Numbers are never reused, across restarts too."""

    def __init__(self) -> None:
        self._all: dict[int, Tombstone] = {}
        self._bytes = 0
        self._next = 1

    def __iter__(self) -> Iterator[Tombstone]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def restore(self, saved: SaveTombstone) -> None:
        """Load a durable one at start."""
        self._keep(Tombstone(saved.command, saved.namespace, saved.salt, saved.hashes, set(saved.waiting)))
        self._next = max(self._next, saved.command + 1)

    def clear(self) -> None:
        """Forget all: another master has them. Numbers go on."""
        self._all.clear()
        self._bytes = 0

    def start_after(self, command: int) -> None:
        """Give out numbers above ``command`` only."""
        self._next = max(self._next, command + 1)

    @property
    def next_number(self) -> int:
        """What the next command is numbered."""
        return self._next

    def take_number(self) -> int:
        """A number for a command of another kind."""
        self._next += 1
        return self._next - 1

    def add(self, namespace: Namespace, salt: str, hashes: bytes, nodes: Iterable[str]) -> Tombstone:
        """A new removal that ``nodes`` must confirm. Raises :class:`Busy` at the bound."""
        if len(self._all) >= TOMBSTONES_MAX or self._bytes + len(hashes) > HASH_BYTES_MAX_TOTAL:
            raise Busy(
                f"{len(self._all)} removals ({self._bytes} bytes) wait for nodes that are away: bring those nodes "
                "back, so that they confirm"
            )
        stone = Tombstone(self.take_number(), namespace, salt, hashes, set(nodes))
        if stone.waiting:
            self._keep(stone)
        return stone

    def confirm(self, command: int, node_id: str) -> Tombstone | None:
        """``node_id`` has removed it; returns the tombstone if that changed it."""
        stone = self._all.get(command)
        if stone is None or node_id not in stone.waiting:
            return None
        stone.waiting.discard(node_id)
        if not stone.waiting:
            del self._all[command]
            self._bytes -= len(stone.hashes)
        return stone

    def waiting_for(self, node_id: str) -> list[Tombstone]:
        """Those that ``node_id`` has to confirm, oldest first."""
        return [stone for _, stone in sorted(self._all.items()) if node_id in stone.waiting]

    def unconfirmed(self, command: int) -> list[str]:
        """Nodes that have not confirmed ``command``; empty when it is done."""
        stone = self._all.get(command)
        return sorted(stone.waiting) if stone is not None else []

    def _keep(self, stone: Tombstone) -> None:
        self._all[stone.command] = stone
        self._bytes += len(stone.hashes)

    def check(self) -> None:
        assert self._bytes == sum(len(stone.hashes) for stone in self._all.values())
        assert all(stone.waiting for stone in self._all.values())
        assert all(command < self._next for command in self._all)
