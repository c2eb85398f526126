"""What their limits leave tenants of each node, remembered from one placement to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.master.tenants.ledger import UNLIMITED
from kvstrata.master.tenants.tenancy import Room

#: Tenants that are remembered: the one that came first goes first.
TENANTS_MAX: Final = 1024


class Rooms(NamedTuple):
    """Along a list of nodes: a tenant's share of the memory of each, and what is free of it. Bytes, i64[n]."""

    share: npt.NDArray[np.int64]
    free: npt.NDArray[np.int64]


class KnownRooms:
    """``room`` tells one anew, by salt and node id; None: there is no limit. Whoever changes one says so."""

    def __init__(self, room: Callable[[str, str], Room | None]) -> None:
        self._room = room
        self._node_ids: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        self._known: dict[str, Rooms] = {}

    def along(self, salt: str, node_ids: tuple[str, ...]) -> Rooms:
        """Of these nodes, in this order. O(1) where the same tuple was given before, and the salt."""
        if node_ids is not self._node_ids:
            self._node_ids, self._rows = node_ids, {node_id: row for row, node_id in enumerate(node_ids)}
            self._known.clear()
        known = self._known.get(salt)
        if known is None:
            if len(self._known) >= TENANTS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[salt] = self._made(salt)
        return known

    def _made(self, salt: str) -> Rooms:
        pairs = [self._pair(salt, node_id) for node_id in self._node_ids]
        return Rooms(*np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy())

    def _pair(self, salt: str, node_id: str) -> tuple[int, int]:
        room = self._room(salt, node_id)
        return (UNLIMITED, UNLIMITED) if room is None else (room.share, room.free)

    def changed(self, salt: str, node_id: str) -> None:
        """What a tenant has of one node is not what it was."""
        known, row = self._known.get(salt), self._rows.get(node_id)
        if known is not None and row is not None:
            known.share[row], known.free[row] = self._pair(salt, node_id)

    def forget(self, salt: str | None = None) -> None:
        """Of a tenant (None: of all) much may have changed."""
        if salt is None:
            self._known.clear()
        else:
            self._known.pop(salt, None)

    def check(self) -> None:
        """Assert that nothing has changed unsaid."""
        assert len(self._known) <= TENANTS_MAX
        for salt, known in self._known.items():
            made = self._made(salt)
            assert np.array_equal(known.share, made.share) and np.array_equal(known.free, made.free), salt
