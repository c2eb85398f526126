"""A bounded log of changes to the directory, from which any number of readers follow it.

It is written while somebody reads it, and a little longer, so that a reader who was cut off goes on where it was. A
reader that falls behind the bound begins again with a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.messages import NodeFacts
from kvstrata.master.namespaces import Group, Namespaces

LOG_BYTES_MAX: Final = 64 << 20
LOG_ENTRIES_MAX: Final = 1 << 17
#: What an entry costs beside its hashes, and each node that it names.
ENTRY_BYTES: Final = 200
#: The log is kept so long after its last reader has gone.
LINGER_S: Final = 60.0
#: Groups whose names are kept for what the log says of them.
NAMES_MAX: Final = 1 << 14


class Kind(IntEnum):
    """What an entry says."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3  #: blocks that no slot has
    DROPPED = 4  #: a table
    SLOT_DROPPED = 5
    NODES = 6  #: the slots that readers may be sent to, all of them


class Entry(NamedTuple):
    """One change; ``hashes`` are packed, 16 bytes each. ``nodes`` is never changed once it is here."""

    kind: Kind
    slot: int = 0
    tier: int = 0
    table: TableKey | None = None
    hashes: bytes = b""
    nodes: Mapping[int, NodeFacts] | None = None


class Bell(Protocol):
    """Rung when there is something new, under the state's lock: a :class:`threading.Event` will do."""

    def set(self) -> None: ...


class IndexLog:
    """Part of the master's state: the directory's tap while it is read. ``sequence`` numbers the last entry."""

    def __init__(
        self, directory: Directory, namespaces: Namespaces, nodes: Callable[[], Mapping[int, NodeFacts]]
    ) -> None:
        self.sequence = 0
        self._bells: list[Bell] = []
        self._directory = directory
        self._namespaces = namespaces
        self._nodes = nodes
        self._entries: list[Entry] = []
        self._first = 1  #: number of the first of ``_entries``
        self._forgotten = 0  #: entries at the beginning of the list that count no more
        self._bytes = 0
        self._told: Mapping[int, NodeFacts] = {}
        self._groups: dict[int, Group] = {}
        self._idle_since: float | None = None

    @property
    def on(self) -> bool:
        return self._directory.tap is self

    # ------------------------------------------------------------------ readers

    def join(self, bell: Bell) -> None:
        """A reader begins, with a bell of its own; the log is written from now on at the latest."""
        self._bells.append(bell)
        self._idle_since = None
        if not self.on:
            self.sequence += 1  # who has read all before may have missed something since
            self._restart()
            self._directory.tap = self
            self._told = dict(self._nodes())

    def leave(self, bell: Bell, now: float) -> None:
        self._bells.remove(bell)
        if not self._bells:
            self._idle_since = now

    def turn(self, now: float) -> None:
        """Time passes: nobody may have read for long."""
        if self.on and self._idle_since is not None and now - self._idle_since >= LINGER_S:
            self._directory.tap = None
            self._restart()
            self._groups.clear()
            self._told = {}

    def since(self, sequence: int, count: int, nbytes: int) -> list[Entry] | None:
        """The next entries after ``sequence``: at most ``count``, of about ``nbytes``. None: they are gone."""
        if not self._first - 1 <= sequence <= self.sequence:
            return None
        start = self._forgotten + sequence + 1 - self._first
        found, size = self._entries[start : start + count], 0
        for index, entry in enumerate(found):
            size += _size(entry)
            if size > nbytes:
                return found[: index + 1]
        return found

    def nodes(self) -> Mapping[int, NodeFacts]:
        """What the last entry about nodes says."""
        return self._told

    def group(self, number: int) -> Group | None:
        """The group that had this number when the log last spoke of it, or has it now."""
        group = self._groups.get(number)
        if group is None:
            group = self._namespaces.by_number(number)
            if group is not None:
                if len(self._groups) >= NAMES_MAX:
                    self._groups.clear()
                self._groups[number] = group
        return group

    # ------------------------------------------------------------------ writers

    def rerouted(self) -> None:
        """The nodes that readers may be sent to may have changed."""
        if self.on:
            nodes = self._nodes()
            if nodes != self._told:
                self._told = dict(nodes)
                self._append(Entry(Kind.NODES, nodes=self._told))

    def stored(self, slot: int, table: TableKey, tier: int, keys: Keys) -> None:
        self._blocks(Kind.STORED, slot, table, tier, keys)

    def removed(self, slot: int, table: TableKey, tier: int, keys: Keys) -> None:
        self._blocks(Kind.REMOVED, slot, table, tier, keys)

    def cleared(self, table: TableKey, keys: Keys) -> None:
        self._blocks(Kind.CLEARED, 0, table, 0, keys)

    def dropped(self, tables: Collection[TableKey]) -> None:
        for table in tables:
            self._append(Entry(Kind.DROPPED, table=table))

    def slot_dropped(self, slot: int) -> None:
        self._append(Entry(Kind.SLOT_DROPPED, slot))

    def _blocks(self, kind: Kind, slot: int, table: TableKey, tier: int, keys: Keys) -> None:
        if len(keys) and self.group(table.group) is not None:
            self._append(Entry(kind, slot, tier, table, keys.tobytes()))

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._bytes += _size(entry)
        self.sequence += 1
        while self._bytes > LOG_BYTES_MAX or self.sequence - self._first >= LOG_ENTRIES_MAX:
            self._bytes -= _size(self._entries[self._forgotten])
            self._forgotten += 1
            self._first += 1
        if self._forgotten > 1024 and self._forgotten * 2 > len(self._entries):
            del self._entries[: self._forgotten]
            self._forgotten = 0
        for bell in self._bells:
            bell.set()

    def _restart(self) -> None:
        self._entries, self._first, self._forgotten, self._bytes = [], self.sequence + 1, 0, 0

    def check(self) -> None:
        kept = self._entries[self._forgotten :]
        assert len(kept) == self.sequence + 1 - self._first
        assert self._bytes == sum(map(_size, kept))
        assert self._bytes <= LOG_BYTES_MAX
        assert not self._bells or self.on
        assert not self.on or self._told == self._nodes()


def _size(entry: Entry) -> int:
    """Bytes, about: in memory, and in a message."""
    return ENTRY_BYTES * (1 + len(entry.nodes or ())) + len(entry.hashes)


def matching(entries: Iterable[Entry], wanted: Callable[[TableKey], bool]) -> list[Entry]:
    """Those about no table, or about one that is wanted."""
    return [entry for entry in entries if entry.table is None or wanted(entry.table)]
