"""Whoever is told of every change to the directory, in order."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from kvstrata.master.directory.probing import Keys

if TYPE_CHECKING:
    from kvstrata.master.directory.directory import TableKey


class Tap(Protocol):
    """Called as changes are made; keeps no array that it is given. What is said may be no news."""

    def stored(self, slot: int, table: TableKey, tier: int, keys: Keys) -> None:
        """Readers of ``slot`` find these blocks in ``tier``."""

    def removed(self, slot: int, table: TableKey, tier: int, keys: Keys) -> None:
        """And no more."""

    def cleared(self, table: TableKey, keys: Keys) -> None:
        """No slot has these blocks."""

    def dropped(self, tables: Collection[TableKey]) -> None:
        """No slot has anything of these tables."""

    def slot_dropped(self, slot: int) -> None:
        """``slot`` has nothing; its number may be another's soon."""
