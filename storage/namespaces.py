"""Which namespaces a node knows, by handle, and the weight epoch of each group of them. Sans-IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.storage.records import NamespaceEntry
from kvstrata.transfer.security.rates import count_opened

NAMESPACES_MAX: Final = 16_384
#: Of those that are new to this process, one subject opens no more than this: what is left is for others.
NAMESPACES_OF_A_SUBJECT: Final = NAMESPACES_MAX // 16


class NamespaceBook:
    """Handles count from 1 and hold for its life. Epochs only grow; a group nobody spoke of is at 0."""

    def __init__(self) -> None:
        self._handles: dict[Namespace, NamespaceEntry] = {}
        self._entries: list[NamespaceEntry] = []
        self._groups: dict[str, list[NamespaceEntry]] = {}
        self._epochs: dict[str, int] = {}
        self._opened_by: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[NamespaceEntry]:
        return iter(self._entries)

    def find(self, namespace: Namespace) -> NamespaceEntry | None:
        return self._handles.get(namespace)

    def open(self, namespace: Namespace, by: str = "") -> tuple[NamespaceEntry, bool]:
        """(its entry, whether it is a new one). ``by``: the subject of who opens it; "" is not counted. Raises
        :class:`Busy` at the bound, or that of a subject."""
        entry = self._handles.get(namespace)
        if entry is not None:
            return entry, False
        if len(self._entries) >= NAMESPACES_MAX:
            raise Busy(f"this node knows {NAMESPACES_MAX} namespaces: it takes no more until it is restarted")
        count_opened(self._opened_by, by, NAMESPACES_OF_A_SUBJECT, "namespaces", "node")
        entry = NamespaceEntry(len(self._entries) + 1, namespace, self.epoch(namespace.group))
        self._handles[namespace] = entry
        self._entries.append(entry)
        self._groups.setdefault(namespace.group, []).append(entry)
        return entry, True

    def entry(self, handle: int) -> NamespaceEntry:
        """Raises :class:`FingerprintMismatch` for a handle that was never given."""
        if not 1 <= handle <= len(self._entries):
            raise FingerprintMismatch(f"namespace handle {handle} is unknown here: open the namespace again")
        return self._entries[handle - 1]

    def of_group(self, group: str) -> list[NamespaceEntry]:
        return self._groups.get(group, [])

    # ------------------------------------------------------------------ weight epochs

    @property
    def epochs(self) -> Mapping[str, int]:
        """Groups past epoch 0."""
        return self._epochs

    def epoch(self, group: str) -> int:
        return self._epochs.get(group, 0)

    def advance(self, group: str, epoch: int) -> bool:
        """Move the group's namespaces to ``epoch``; False when they are there, or past it."""
        if epoch <= self.epoch(group):
            return False
        self._epochs[group] = epoch
        for entry in self.of_group(group):
            entry.epoch = epoch
        return True

    def check(self) -> None:
        """Assert that handles count up and that every entry is at its group's epoch."""
        assert [entry.handle for entry in self._entries] == list(range(1, len(self._entries) + 1))
        assert sum(len(entries) for entries in self._groups.values()) == len(self._entries) == len(self._handles)
        assert all(0 < count <= NAMESPACES_OF_A_SUBJECT for count in self._opened_by.values())
        assert self._opened_by.total() <= len(self._entries)
        for entry in self._entries:
            assert self._handles[entry.namespace] is entry
            assert entry.epoch == self.epoch(entry.namespace.group), (
                f"{entry.namespace.group}: an entry was left behind"
            )
