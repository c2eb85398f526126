"""Tables of dropped scopes, kept whole for a while: a block that was in one is a miss with a reason.

A scope is dropped without a look at its blocks, so their reason is not written to each. Whoever misses a
block looks for it here too, as long as its scope's old table is remembered.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import Table

#: Entries kept in all; past it the oldest table goes. A larger table is not kept at all.
BURIED_MAX: Final = 1 << 20
BURIED_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Grave:
    """A table as it was when its scope was dropped, at ``at`` of the owner's clock."""

    table: Table
    reason: MissReason
    at: float


class Graves:
    """One table a key: the newest that was buried there."""

    def __init__(self) -> None:
        self._all: dict[Hashable, Grave] = {}
        self._entries = 0

    def bury(self, key: Hashable, table: Table, reason: MissReason, now: float) -> None:
        """Keep ``table``, which its owner must not change any more."""
        self._dig_up(key)
        if table.live > BURIED_MAX:
            return
        self._all[key] = Grave(table, reason, now)
        self._entries += table.live
        while self._entries > BURIED_MAX:
            self._dig_up(next(iter(self._all)))

    def find(self, key: Hashable) -> Grave | None:
        return self._all.get(key)

    def holds(self, key: Hashable, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which blocks were in the table of ``key``: bool[n]."""
        grave = self._all.get(key)
        if grave is None:
            return np.zeros(len(keys), dtype=np.bool_)
        known: npt.NDArray[np.bool_] = grave.table.find(keys) != 0
        return known

    def turn(self, now: float) -> None:
        """Time passes: old tables go."""
        for key in [key for key, grave in self._all.items() if now - grave.at >= BURIED_S]:
            self._dig_up(key)

    def _dig_up(self, key: Hashable) -> None:
        grave = self._all.pop(key, None)
        if grave is not None:
            self._entries -= grave.table.live

    def check(self) -> None:
        assert self._entries == sum(grave.table.live for grave in self._all.values()) <= BURIED_MAX
