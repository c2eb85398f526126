"""Replicas and drains, as the leader sees to them: what it hears goes in, orders to nodes come out.

Work is done at ticks, some of it at a time, as lookups wait for the same lock. After a start, or when a node is lost
or still says what it has, copies of what is already there are held back: most of what seems lost is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.liveness import OFFLINE_S, NodeState
from kvstrata.master.membership import Membership
from kvstrata.master.namespaces import Namespaces
from kvstrata.master.nodes import Node
from kvstrata.master.replication.copies import LANDING_S, Copies, Copy, TakeNumber
from kvstrata.master.replication.drains import ATTEMPTS, Drains
from kvstrata.master.replication.hot import COPIED_AT_ONCE, Hot
from kvstrata.master.replication.leavers import Leavers
from kvstrata.master.replication.planner import Planner, Why
from kvstrata.master.replication.replicas import Replicas
from kvstrata.master.replication.rules import Rules
from kvstrata.master.replication.scan import NAMED_BYTES, SLOTS_A_STEP, Scan
from kvstrata.master.replication.targets import Targets
from kvstrata.master.replication.trims import Trims
from kvstrata.master.replication.waiting import Piece, Recent, Waiting
from kvstrata.proto.status import CopyReason

#: Blocks looked at in one tick, by each of what is new, what was asked for lately and what a scan has found.
LOOKED_AT: Final = 2048
#: What has just been stored waits so long: its writer may be storing it elsewhere too.
NEW_S: Final = 0.5
RETRY_S: Final = 1.0
#: A node that died may be back at once: what it had is copied so long after.
REPAIR_AFTER_S: Final = 5.0
#: Nodes that say what they have are waited for, for so long.
JOINING_S: Final = 60.0
#: Inventories are asked for (of hashes that the directory cannot name) at most this often.
INVENTORY_S: Final = 30.0
#: Hashes that a scan has found, of all lengths.
COLD_MAX: Final = 1 << 19


class Replication:
    """Part of the master's state; gives commands to ``emit``. Does nothing while another master leads.

    ``resync`` has a node say again what it has; ``scope`` tells apart equal hashes of different tables.
    """

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        membership: Membership,
        standing: Standing,
        scope: Callable[[TableKey], Keys],
        take_number: TakeNumber,
        resync: Callable[[Node, str, float], None],
        emit: Callable[[m.Command], None],
        now: float,
    ) -> None:
        self.rules = Rules(emit)
        self.copies = Copies()
        self.replicas = Replicas(directory, membership.nodes)
        self.planner = Planner(directory, namespaces, self.replicas, self.copies, scope, take_number, emit)
        self.drains = Drains(directory, self.replicas, self.copies, self.planner, self._table_of, take_number, emit)
        self.leavers = Leavers(membership, self.drains, standing, emit, now)
        self.hot = Hot()
        self.trims = Trims(directory, self.replicas, self.copies, emit, self.hot.kept)
        self.scan = Scan(directory, namespaces, self.rules, self.replicas)
        self.recent = Recent()
        self._directory = directory
        self._namespaces = namespaces
        self._membership = membership
        self._standing = standing
        self._resync = resync
        self._emit = emit
        self._fresh = Waiting()
        self._lost = Waiting()
        self._cold = Waiting(COLD_MAX)
        self._terms = standing.terms
        self._began_at = now
        self._repair_at: float | None = None
        self._joining_since: float | None = None
        self._asked_at = -INVENTORY_S
        self._asked: str | None = None

    def load(self, saved_rules: Iterable[m.SaveReplicas], roster: Iterable[m.SaveNode]) -> None:
        """What is durable, in place of what was known: rules, and which nodes are to leave."""
        self.rules.load(saved_rules)
        for row in roster:
            node = self._membership.nodes.get(row.node_id)
            if node is not None:
                self._membership.leaves(node, draining=row.draining)

    @property
    def waiting(self) -> int:
        """Blocks that wait to be looked at."""
        return len(self._fresh) + len(self._lost) + len(self._cold)

    @property
    def dropped(self) -> int:
        """Blocks that were too many to wait, since the start."""
        return self._fresh.dropped + self._lost.dropped + self._cold.dropped

    # ------------------------------------------------------------------ what operators ask

    def set_rule(self, group: str, salt: str | None, count: int) -> None:
        """See :meth:`Rules.set`. What there is follows, as there is room."""
        if group:
            self._namespaces.named(group)
        self.rules.set(group, salt, count)
        self.scan.again()

    # ------------------------------------------------------------------ what nodes and clients say

    def changed(self, changes: Iterable[m.Change], now: float) -> None:
        """Deltas of a node that the directory has taken in."""
        if not (self._standing.leading and self.rules.any):
            return
        for change in changes:
            if not change.added or self.rules.wanted(change.namespace.group, change.salt) < 2:
                continue
            group = self._namespaces.find(change.namespace)
            if group is None or group.epoch != change.epoch or not change.hashes:
                continue
            table = TableKey(group.number, change.namespace.shard, change.salt)
            rows = np.frombuffer(change.hashes, dtype=np.uint8).reshape(-1, group.hash_bytes)
            self._fresh.put(Piece(table, rows, pressing=True, due=now + NEW_S))

    def held(self, node: Node, part: m.Holding | m.Change, table: TableKey, keys: Keys) -> None:
        """A part of an inventory that was asked for, so that it names what the directory cannot."""
        if node.node_id != self._asked or not isinstance(part, m.Holding):
            return
        wanted = self.rules.wanted(part.namespace.group, part.salt)
        ids = self._directory.living_ids(table, keys)
        amiss = (self.replicas.short(ids, wanted) > 0) | (self.replicas.surplus(ids, wanted) > 0)
        rows = np.frombuffer(part.hashes, dtype=np.uint8).reshape(-1, part.namespace.hash_bytes)[amiss]
        if len(rows):
            self._cold.put(Piece(table, rows, pressing=False))

    def asked(self, table: TableKey, hash_bytes: int, hashes: bytes, now: float) -> None:
        """A lookup, in short. O(1)."""
        if not self._standing.leading:
            return
        self.hot.asked(table, hash_bytes, hashes, now)
        if self.rules.any:
            group = self._namespaces.by_number(table.group)
            if group is not None and self.rules.wanted(group.name, table.salt) > 1:
                self.recent.asked(table, hash_bytes, hashes, now)

    def copy_done(self, event: m.CopyDone, now: float) -> None:
        done = self.copies.done(event, now)
        if done is not None:
            self._ended(*done, now)

    def offered(self, event: m.Offer, now: float) -> None:
        node = self._membership.nodes.of_session(event.session)
        if node is not None:
            self.drains.offered(node, event, now)

    def _table_of(self, holding: m.Holding) -> TableKey | None:
        group = self._namespaces.find(holding.namespace)
        if group is None or group.epoch != holding.epoch:
            return None
        return TableKey(group.number, holding.namespace.shard, holding.salt)

    def _ended(self, copy: Copy, taken: np.ndarray[tuple[int], np.dtype[np.bool_]], now: float) -> None:
        """A copy is over, well or not: the rest is tried again, and what wants a third replica is looked at again."""
        if copy.drains:
            self.drains.copied(copy, taken)
            return
        if copy.reason is not CopyReason.REPLICA:
            return
        left = copy.rows[~taken]
        if len(left) and copy.attempts + 1 < ATTEMPTS:
            self._fresh.put(Piece(copy.table, left, True, now + RETRY_S, copy.attempts + 1))
        group = self._namespaces.by_number(copy.table.group)
        if taken.any() and group is not None and self.rules.wanted(group.name, copy.table.salt) > 2:
            self._fresh.put(Piece(copy.table, copy.rows[taken], True, now + LANDING_S + NEW_S))

    # ------------------------------------------------------------------ time

    def turn(self, now: float) -> None:
        """A tick: order what is due, within bounds."""
        if self._terms != self._standing.terms:
            self._new_term(now)
        if not self._standing.leading:
            return
        if self.replicas.refresh(now):
            self._repair_at = now + REPAIR_AFTER_S
            self.scan.again()
        self.leavers.turn(now)
        linked = {
            node.node_id: node.attachment.session
            for node in self._membership.nodes
            if node.linked and node.attachment is not None
        }
        for copy in self.copies.turn(linked, now):
            self._ended(copy, np.zeros(len(copy.rows), dtype=np.bool_), now)
        self.trims.turn(now)
        self.hot.turn(now)
        if not self._all_here(now):
            return
        targets = Targets(self.replicas.takers, self._membership.quotas, self.copies, now)
        self.drains.turn(self._membership.nodes.get, targets, LOOKED_AT, now)
        self._work_off(self._fresh, targets, now)
        self._relieve(targets, now)
        if not self._held_back(now):
            self._mend(targets, now)

    def _new_term(self, now: float) -> None:
        """This master begins to lead, or ceases to: what was ordered is no concern of it any more."""
        self._terms, self._began_at = self._standing.terms, now
        self.copies.forget()
        for waiting in (self._fresh, self._lost, self._cold):
            waiting.clear()
        self.scan.again()
        self.leavers.new_term(now)
        self._repair_at = self._asked = None

    def _all_here(self, now: float) -> bool:
        """Whether every node of the roster is here, or has had the time to come."""
        if now - self._began_at >= OFFLINE_S:
            return not self._membership.recovering(now)
        return all(node.serving or node.gone for node in self._membership.nodes)

    def _held_back(self, now: float) -> bool:
        """Whether copies of what is already there must wait."""
        if any(node.state is NodeState.JOINING for node in self._membership.nodes):
            if self._joining_since is None:
                self._joining_since = now
            if now - self._joining_since < JOINING_S:
                return True
        else:
            self._joining_since = None
        return self._repair_at is not None and now < self._repair_at

    def _mend(self, targets: Targets, now: float) -> None:
        """Replicas that were lost: what is asked for now first, then what a scan finds; and those too many."""
        if self._repair_at is not None:
            self._repair_at = None
            for piece in self.recent.newest_first(now):
                self._lost.put(piece)
        self._work_off(self._lost, targets, now)
        self._work_off(self._cold, targets, now)
        if self._cold.room < SLOTS_A_STEP:
            return
        for amiss in self.scan.step(now):
            if len(amiss.short):
                self._cold.put(Piece(amiss.table, amiss.short, pressing=False))
            if len(amiss.over):
                self._let_go(Piece(amiss.table, amiss.over, pressing=False))
        self._ask_for_names(now)

    def _relieve(self, targets: Targets, now: float) -> None:
        """Copy what a busy node alone has of the prefixes that are asked for most, to nodes that are less busy."""
        due = self.hot.due(self.replicas.takers, now)
        if due is None:
            return
        busy, prefixes = due
        why = Why(CopyReason.HOT, pressing=True, only=self.hot.rates.idle())
        budget = COPIED_AT_ONCE
        for table, prefix in prefixes:
            found = self.planner.located(table, prefix)
            if found is None or budget <= 0:
                continue
            group, rows, keys, scoped = found
            ids = self._directory.living_ids(table, keys)
            todo = (self.replicas.stands(ids) == 1) & ~self.copies.moving(scoped) & ~self.hot.kept(scoped)
            for set_id in np.unique(ids[todo]).tolist():
                if [node.node_id for node, _ in self.replicas.sources(set_id)] != [busy]:
                    continue
                where = np.flatnonzero(todo & (ids == set_id))[: max(0, budget)]
                left, _ = self.planner.copy(table, group, set_id, rows[where], scoped[where], why, targets, now)
                done = where[: len(where) - left]
                self.hot.copied(scoped[done])
                budget -= len(done)

    def _work_off(self, waiting: Waiting, targets: Targets, now: float) -> None:
        budget = LOOKED_AT
        while budget > 0 and (piece := waiting.take(budget, now)) is not None:
            budget -= len(piece)
            group = self._namespaces.by_number(piece.table.group)
            if group is None:
                continue
            wanted = self.rules.wanted(group.name, piece.table.salt)
            left = self.planner.replicate(piece, wanted, targets, now)
            if waiting is self._cold:
                self._let_go(piece)
            if len(left):  # others are next, when nodes have taken what is under way
                waiting.put(Piece(piece.table, left, piece.pressing, now + NEW_S, piece.attempts))
                return

    def _let_go(self, piece: Piece) -> None:
        found = self.planner.located(piece.table, piece.rows)
        if found is not None:
            group, rows, keys, scoped = found
            wanted = self.rules.wanted(group.name, piece.table.salt)
            self.trims.let_go(piece.table, group, rows, keys, scoped, wanted)

    def _ask_for_names(self, now: float) -> None:
        """Have a node list what it has, where hashes are longer than the directory keeps, and replicas are amiss."""
        node = self.scan.unnamed
        if node is None or not node.linked or len(self._cold) or len(self.copies) or now - self._asked_at < INVENTORY_S:
            return
        self._asked, self._asked_at, self.scan.unnamed = node.node_id, now, None
        self._resync(node, f"hashes longer than {NAMED_BYTES} bytes are to be copied, or let go of", now)

    def check(self) -> None:
        """Assert every invariant of replication."""
        self.rules.check()
        self.copies.check()
        self.replicas.check()
        self.drains.check()
        self.trims.check()
        self.scan.check()
        self.recent.check()
        self.hot.check()
        for waiting in (self._fresh, self._lost, self._cold):
            waiting.check()
        self.leavers.check()
