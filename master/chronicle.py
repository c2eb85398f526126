"""What happened to a block, as the master saw it: a bounded record that answers ``story(key)``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvstrata.master.directory import TableKey
from kvstrata.master.probing import Keys

RECORDS_MAX: Final = 4096
KEYS_MAX: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened: when (the owner's clock), what, and at which node."""

    at: float
    what: str
    node_id: str


class _Record(NamedTuple):
    at: float
    what: str
    node_id: str
    table: TableKey | None  #: None: concerns every block of the node
    keys: Keys | None


class Chronicle:
    """The last batches of changes. Writing costs one reference a batch, reading a scan."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque()
        self._keys = 0

    def note(self, at: float, what: str, node_id: str, table: TableKey | None = None, keys: Keys | None = None) -> None:
        """Remember a batch; the oldest go when there are too many records or keys."""
        if keys is not None and len(keys) > KEYS_MAX // 4:
            keys = keys[: KEYS_MAX // 4].copy()
        self._records.append(_Record(at, what, node_id, table, keys))
        self._keys += _size(keys)
        while len(self._records) > RECORDS_MAX or self._keys > KEYS_MAX:
            self._keys -= _size(self._records.popleft().keys)

    def story(self, table: TableKey, key: Keys) -> list[Line]:
        """What is remembered of one block (``key`` is u64[1, 2]), oldest first."""
        return [
            Line(record.at, record.what, record.node_id)
            for record in self._records
            if record.table is None
            or (record.table == table and record.keys is not None and bool(np.any((record.keys == key).all(axis=1))))
        ]


def _size(keys: Keys | None) -> int:
    return 0 if keys is None else len(keys)
