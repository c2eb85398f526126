"""Blocks of a scope, listed and counted: in steps, so that nobody waits for a large directory to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.master.content.explain import places
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.holders import Ids
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import BEGIN, Cursor
from kvstrata.master.namespaces import Group
from kvstrata.master.state import MasterState
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import HASH_BYTES_MAX

ROWS_MAX: Final = 10_000
#: Slots read in one step: about a millisecond under the lock.
STEP_SLOTS: Final = 1 << 17
#: Tables looked into in one step.
STEP_TABLES: Final = 64
_KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One block; ``key`` is its hash as the directory knows it (longer ones are folded to 16 bytes)."""

    group: str
    shard: int
    salt: str
    key: bytes
    where: tuple[str, ...]


class Listing:
    """Blocks by namespace (""), tenant (None is any) and leading bytes of their hash.

    ``rows`` has at most ``limit`` of them, ``total`` counts all. Raises :class:`InvalidArgument`.
    """

    def __init__(self, group: str, salt: str | None, prefix: bytes, limit: int) -> None:
        if len(prefix) > HASH_BYTES_MAX:
            raise InvalidArgument(f"a hash prefix has at most {HASH_BYTES_MAX} bytes, not {len(prefix)}")
        self.rows: list[Row] = []
        self.total = 0
        self._group = group
        self._salt = salt
        self._prefix = prefix
        self._limit = min(limit or ROWS_MAX, ROWS_MAX)
        self._todo: list[TableKey] | None = None
        self._cursor: Cursor = BEGIN

    def step(self, state: MasterState, now: float) -> bool:
        """Go on; True when all is read. Raises :class:`InvalidArgument` for an unknown group."""
        if self._todo is None:
            self._todo = self._begin(state)
        for _ in range(STEP_TABLES):
            if not self._todo:
                break
            table = self._todo[-1]
            group = state.namespaces.by_number(table.group)
            cursor = None if group is None else self._read(state, table, group)
            if cursor is None:
                self._todo.pop()
                self._cursor = BEGIN
            else:
                self._cursor = cursor
                break
        return not self._todo

    def _begin(self, state: MasterState) -> list[TableKey]:
        number = state.namespaces.named(self._group).number if self._group else None
        tables = [
            (key, count)
            for key, count in state.directory.tables()
            if number in (None, key.group) and self._salt in (None, key.salt)
        ]
        if not self._prefix:
            self.total = sum(count for _, count in tables)
        return sorted((key for key, _ in tables), reverse=True)

    def _read(self, state: MasterState, table: TableKey, group: Group) -> Cursor | None:
        """One table from the cursor on; returns where to go on, None at its end."""
        if len(self._prefix) >= _KEY_BYTES:
            self._find_one(state, table, group)
            return None
        if not self._prefix and len(self.rows) >= self._limit:
            return None
        keys, ids, cursor = state.directory.entries(table, self._cursor, STEP_SLOTS)
        if self._prefix:
            wanted = _begins_with(keys, self._prefix)
            keys, ids = keys[wanted], ids[wanted]
            self.total += len(keys)
        self._take(state, table, group, keys, ids)
        return cursor

    def _find_one(self, state: MasterState, table: TableKey, group: Group) -> None:
        if len(self._prefix) not in (_KEY_BYTES, group.hash_bytes):
            return
        keys = fold(self._prefix, len(self._prefix))
        ids = state.directory.living_ids(table, keys)
        if ids[0]:
            self.total += 1
            self._take(state, table, group, keys, ids)

    def _take(self, state: MasterState, table: TableKey, group: Group, keys: Keys, ids: Ids) -> None:
        room = self._limit - len(self.rows)
        for key, set_id in zip(keys[:room], ids[:room].tolist(), strict=True):
            where = tuple(places(state, set_id))
            self.rows.append(Row(group.name, table.shard, table.salt, key.tobytes(), where))


def _begins_with(keys: Keys, prefix: bytes) -> npt.NDArray[np.bool_]:
    mask = np.frombuffer((b"\xff" * len(prefix)).ljust(_KEY_BYTES, b"\0"), dtype="<u8")
    value = np.frombuffer(prefix.ljust(_KEY_BYTES, b"\0"), dtype="<u8")
    matching: npt.NDArray[np.bool_] = ((keys & mask) == value).all(axis=1)
    return matching
