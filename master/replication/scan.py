"""The directory read for what lacks replicas and what has too many, some at a time.

Each table counts its blocks by holder set, so one in which all is well is passed over unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.table import BEGIN, Cursor
from kvstrata.master.namespaces import Group, Namespaces
from kvstrata.master.nodes import Node
from kvstrata.master.replication.replicas import Replicas
from kvstrata.master.replication.rules import Rules
from kvstrata.master.replication.waiting import Rows

#: Tables whose counts are looked at in one step, and slots that are read: about a millisecond.
TABLES_A_STEP: Final = 256
SLOTS_A_STEP: Final = 1 << 16
#: A pass over everything begins at most this often.
PASS_S: Final = 2.0
#: The directory keeps 16 bytes of a hash: longer ones it cannot name.
NAMED_BYTES: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Amiss:
    """Blocks of one table: ``short`` lack replicas, ``over`` have too many."""

    table: TableKey
    group: Group
    short: Rows
    over: Rows


class Scan:
    """One pass after another. ``wanting`` and ``surplus`` are replicas, as the last pass counted them."""

    def __init__(self, directory: Directory, namespaces: Namespaces, rules: Rules, replicas: Replicas) -> None:
        self.wanting = 0
        self.surplus = 0
        #: A node whose inventory would name blocks that the directory cannot, found in this pass.
        self.unnamed: Node | None = None
        self._directory = directory
        self._namespaces = namespaces
        self._rules = rules
        self._replicas = replicas
        self._todo: list[TableKey] = []
        self._cursor: Cursor = BEGIN
        self._wanting = 0
        self._surplus = 0
        self._next_at = 0.0
        self._running = False
        self._reading = False  #: within the last table of ``_todo``

    def again(self) -> None:
        """Begin a new pass at once: things have changed."""
        self._todo, self._cursor, self._next_at = [], BEGIN, 0.0
        self._running = self._reading = False

    def step(self, now: float) -> Iterator[Amiss]:
        """Go on for a bounded number of tables and slots."""
        if not self._running:
            if now < self._next_at:
                return
            self._todo = [key for key, _ in self._directory.tables()]
            self._running, self._next_at, self._cursor = True, now + PASS_S, BEGIN
            self._wanting = self._surplus = 0
            self.unnamed = None
        for _ in range(TABLES_A_STEP):
            if not self._todo:
                self._running = False
                self.wanting, self.surplus = self._wanting, self._surplus
                return
            table = self._todo[-1]
            group = self._namespaces.by_number(table.group)
            if group is None or not (self._reading or self._amiss(table, group)):
                self._next()
                continue
            self._reading = True
            keys, ids, cursor = self._directory.entries(table, self._cursor, SLOTS_A_STEP)
            wanted = self._rules.wanted(group.name, table.salt)
            rows = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, NAMED_BYTES)
            short = self._replicas.short(ids, wanted) > 0
            over = self._replicas.surplus(ids, wanted) > 0
            if cursor is None:
                self._next()
            else:
                self._cursor = cursor
            yield Amiss(table, group, rows[short], rows[over])
            return

    def _next(self) -> None:
        self._todo.pop()
        self._cursor, self._reading = BEGIN, False

    def _amiss(self, table: TableKey, group: Group) -> bool:
        """Whether a table is to be read; counts what its blocks lack."""
        counts = self._directory.sets_of(table)
        ids = np.fromiter(counts.keys(), dtype=np.uint32, count=len(counts))
        blocks = np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        wanted = self._rules.wanted(group.name, table.salt)
        short = self._replicas.short(ids, wanted)
        over = self._replicas.surplus(ids, wanted)
        self._wanting += int((short * blocks).sum())
        self._surplus += int((over * blocks).sum())
        worst = short + over
        if not worst.any():
            return False
        if group.hash_bytes == NAMED_BYTES:
            return True
        holder = self._replicas.sources(int(ids[int(np.argmax(worst * blocks))]))
        if holder and self.unnamed is None:
            self.unnamed = holder[0][0]
        return False

    def check(self) -> None:
        assert self._running or not self._todo
