"""What happened to a block, as the master saw it: a bounded record that answers ``story(key)``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.proto.status import BlockStatus

RECORDS_MAX: Final = 4096
KEYS_MAX: Final = 1 << 18


class Scope(NamedTuple):
    """What a record is about: None stands for any. A group goes by its first number."""

    group: int | None = None
    shard: int | None = None
    salt: str | None = None

    def covers(self, table: TableKey) -> bool:
        return all(mine is None or mine == its for mine, its in zip(self, table, strict=True))


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened: when (the owner's clock), what, and at which node.

    ``reason`` is why a block left or was not had, where it did; ``cause`` whose need it was; ``status`` how a load or
    a store of it ended, where a client said so.
    """

    at: float
    what: str
    node_id: str
    reason: MissReason | None = None
    cause: str = ""
    status: BlockStatus | None = None


class _Record(NamedTuple):
    line: Line
    scope: Scope
    keys: Keys | None  #: None: concerns every block of the scope


class Chronicle:
    """The last batches of changes. Writing costs one reference a batch, reading a scan."""

    def __init__(self) -> None:
        self._records: deque[_Record] = deque()
        self._keys = 0

    def note(
        self,
        at: float,
        what: str,
        node_id: str,
        scope: Scope = Scope(),  # noqa: B008 - immutable
        keys: Keys | None = None,
        reason: MissReason | None = None,
        cause: str = "",
        status: BlockStatus | None = None,
    ) -> None:
        """Remember a batch; the oldest go when there are too many records or keys."""
        if keys is not None and len(keys) > KEYS_MAX // 4:
            keys = keys[: KEYS_MAX // 4].copy()
        self._records.append(_Record(Line(at, what, node_id, reason, cause, status), scope, keys))
        self._keys += _size(keys)
        while len(self._records) > RECORDS_MAX or self._keys > KEYS_MAX:
            self._keys -= _size(self._records.popleft().keys)

    def story(self, table: TableKey, key: Keys) -> list[Line]:
        """What is remembered of one block (``key`` is u64[1, 2]), oldest first."""
        return [
            record.line
            for record in self._records
            if record.scope.covers(table) and (record.keys is None or bool(np.any((record.keys == key).all(axis=1))))
        ]

    def failures(self, table: TableKey, keys: Keys, since: float) -> list[tuple[Line, Keys]]:
        """Reports of blocks among ``keys`` that were not had since then, oldest first, each with its blocks."""
        asked = {(low, high) for low, high in keys.tolist()}
        found = []
        for record in self._records:
            if record.keys is None or record.line.at < since or record.line.reason is not MissReason.LOAD_FAILED:
                continue
            if record.scope.covers(table):
                among = [row for row, pair in enumerate(record.keys.tolist()) if (pair[0], pair[1]) in asked]
                if among:
                    found.append((record.line, record.keys[among]))
        return found


def _size(keys: Keys | None) -> int:
    return 0 if keys is None else len(keys)
