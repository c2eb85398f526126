"""Replicas that are too many: one of their nodes is told to let go, and nobody else until that shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.holders import Ids
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import Table
from kvstrata.master.namespaces import Group
from kvstrata.master.nodes import Node
from kvstrata.master.replication.copies import Copies
from kvstrata.master.replication.replicas import Replicas
from kvstrata.master.replication.waiting import Rows

#: Blocks of one order, and how long an order is given to show in the directory.
ORDER_BLOCKS: Final = 1024
SHOWS_S: Final = 10.0


class Trims:
    """Gives the orders to ``emit``. ``kept``: scoped keys of blocks that are to stay (copies of hot ones)."""

    def __init__(
        self,
        directory: Directory,
        replicas: Replicas,
        copies: Copies,
        emit: Callable[[m.Command], None],
        kept: Callable[[Keys], np.ndarray[tuple[int], np.dtype[np.bool_]]],
    ) -> None:
        self.blocks = 0  #: replicas that nodes were told to let go of, since the start
        self._directory = directory
        self._replicas = replicas
        self._copies = copies
        self._emit = emit
        self._kept = kept
        self._told = Table()
        self._older = Table()
        self._rotated_at = 0.0

    def let_go(self, table: TableKey, group: Group, rows: Rows, keys: Keys, scoped: Keys, wanted: int) -> None:
        """Of these blocks, those that have more than ``wanted`` sure replicas lose one."""
        ids = self._directory.living_ids(table, keys)
        over = self._replicas.surplus(ids, wanted) > 0
        if not over.any():
            return
        over &= ~self._copies.moving(scoped) & ~self._kept(scoped)
        over &= (self._told.find(scoped) == 0) & (self._older.find(scoped) == 0)
        for set_id in np.unique(ids[over]).tolist():
            self._tell(table, group, set_id, ids, over, rows, scoped, wanted)

    def _tell(
        self,
        table: TableKey,
        group: Group,
        set_id: int,
        ids: Ids,
        over: np.ndarray[tuple[int], np.dtype[np.bool_]],
        rows: Rows,
        scoped: Keys,
        wanted: int,
    ) -> None:
        holders = self._replicas.sure_of(set_id)
        assert len(holders) > wanted >= 1, "a replica that is needed"
        loser = _loser([node for node in holders if node.linked], holders)
        if loser is None or loser.attachment is None:
            return
        where = np.flatnonzero(over & (ids == set_id))
        for start in range(0, len(where), ORDER_BLOCKS):
            some = where[start : start + ORDER_BLOCKS]
            self._told.put(scoped[some], np.ones(len(some), dtype=np.uint32))
            self.blocks += len(some)
            namespace = group.namespace(table.shard)
            session = loser.attachment.session
            self._emit(m.SendSurplus(session, namespace, table.salt, rows[some].tobytes(), group.epoch))

    def turn(self, now: float) -> None:
        """Time passes: orders that did not show may be given again."""
        if now - self._rotated_at >= SHOWS_S:
            self._older, self._told, self._rotated_at = self._told, Table(), now

    def check(self) -> None:
        self._told.check()
        self._older.check()


def _loser(able: list[Node], holders: list[Node]) -> Node | None:
    """The node that lets go: one that shares its host with another holder, else the fullest."""
    hosts = [_host(node) for node in holders]
    ranked = sorted(able, key=lambda node: (-hosts.count(_host(node)), _free_share(node), node.node_id))
    return ranked[0] if ranked else None


def _host(node: Node) -> str:
    return "" if node.attachment is None else node.attachment.facts.boot_id


def _free_share(node: Node) -> float:
    return node.usage.dram_bytes_free / node.dram_bytes if node.usage is not None and node.dram_bytes else 0.0
