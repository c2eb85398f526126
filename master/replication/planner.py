"""What is to be copied and what is to be let go, block by block: wanted against what stands.

Three ways lead here: blocks that nodes say they have just got, what was asked for lately once a node is lost, and a
scan of the directory, which reads a table only when its counts by holder set say that something in it is amiss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.namespaces import Group, Namespaces
from kvstrata.master.nodes import Node
from kvstrata.master.replication.copies import Copies, Copy, TakeNumber
from kvstrata.master.replication.replicas import Replicas
from kvstrata.master.replication.targets import Target, Targets
from kvstrata.master.replication.waiting import Piece, Rows
from kvstrata.proto.folding import fold
from kvstrata.proto.status import CopyReason, Tier


@dataclass(frozen=True, slots=True)
class Why:
    """What copies are ordered for. ``drains``: the node that is leaving; ``only``: the nodes that may take them."""

    reason: CopyReason
    pressing: bool
    drains: str = ""
    attempts: int = 0
    only: frozenset[str] | None = None


#: A block is copied so many times as often, within a minute or two, as it can need for all its replicas: what did not
#: last until then has no room, and would only push others out.
ROUNDS: Final = 2
#: What is to be done with blocks that got no copy: nothing can take them, or nothing can now.
NOWHERE: Final = "nowhere"
BUSY: Final = "busy"


class Planner:
    """Chooses sources and targets, and gives the orders to ``emit``."""

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        replicas: Replicas,
        copies: Copies,
        scope: Callable[[TableKey], Keys],
        take_number: TakeNumber,
        emit: Callable[[m.Command], None],
    ) -> None:
        #: Blocks for which there was no target, since the start.
        self.unplaced: Counter[str] = Counter()
        self._directory = directory
        self._namespaces = namespaces
        self._replicas = replicas
        self._copies = copies
        self._scope = scope
        self._take_number = take_number
        self._emit = emit

    def located(self, table: TableKey, rows: Rows) -> tuple[Group, Rows, Keys, Keys] | None:
        """The group, distinct rows, their keys, and those scoped to the table; None for a table of the past."""
        group = self._namespaces.by_number(table.group)
        if group is None or rows.shape[1] != group.hash_bytes:
            return None
        keys = fold(rows.tobytes(), group.hash_bytes)
        if len(np.unique(keys[:, 0])) < len(keys):  # half a key tells nearly all apart, and sorts much faster
            _, first = np.unique(keys, axis=0, return_index=True)
            first.sort()
            rows, keys = rows[first], keys[first]
        return group, rows, keys, keys ^ self._scope(table)

    def replicate(self, piece: Piece, wanted: int, targets: Targets, now: float) -> Rows:
        """Have what lacks a replica copied; returns the rows that must wait, as everybody is busy."""
        found = self.located(piece.table, piece.rows)
        if found is None:
            return piece.rows[:0]
        group, rows, keys, scoped = found
        ids = self._directory.living_ids(piece.table, keys)
        todo = (self._replicas.short(ids, wanted) > 0) & ~self._copies.moving(scoped)
        passing = todo & (self._copies.lately(scoped) >= ROUNDS * (wanted - 1))
        self.unplaced["did_not_last"] += int(np.count_nonzero(passing))
        todo &= ~passing
        why = Why(CopyReason.REPLICA, piece.pressing, attempts=piece.attempts)
        waits = np.zeros(len(rows), dtype=np.bool_)
        for set_id in np.unique(ids[todo]).tolist():
            where = np.flatnonzero(todo & (ids == set_id))
            left, verdict = self.copy(piece.table, group, set_id, rows[where], scoped[where], why, targets, now)
            if verdict == BUSY:
                waits[where[len(where) - left :]] = True
            else:
                self.unplaced[why.reason.name.lower()] += left
        return rows[waits]

    def copy(
        self,
        table: TableKey,
        group: Group,
        set_id: int,
        rows: Rows,
        scoped: Keys,
        why: Why,
        targets: Targets,
        now: float,
    ) -> tuple[int, str]:
        """Order copies of blocks that all have one holder set, from the first on.

        Returns how many got none, and why: :data:`NOWHERE` or :data:`BUSY`.
        """
        sources = [
            (node, tier)
            for node, tier in self._replicas.sources(set_id)
            if node.linked and not self._copies.paused(node.node_id, None, now)
        ]
        if not sources:
            return len(rows), BUSY
        best = min(tier for _, tier in sources)
        tier = Tier.SSD if best == Tier.SSD else Tier.DRAM
        slots = {slot for slot, _ in self._directory.holders_of(set_id)}
        here = [node for slot, node in self._replicas.by_slot.items() if slot in slots]
        holders = {node.node_id for node in here}
        hosts = {node.attachment.facts.boot_id for node in here if node.attachment is not None and not node.leaving}
        done = 0
        while done < len(rows):
            fit, tier_there = _fit(targets, table.salt, tier, group.block_bytes, holders, hosts, why)
            if why.only is not None:
                fit = [target for target in fit if target.node.node_id in why.only]
            if not fit:
                return len(rows) - done, BUSY if targets.held_up(holders) else NOWHERE
            pair = self._pair(sources, fit, group.block_bytes)
            if pair is None:
                return len(rows) - done, BUSY
            source, target, count = pair
            end = min(len(rows), done + count)
            self._order(table, group, rows[done:end], scoped[done:end], source, target, tier_there, why, now)
            done = end
        return 0, ""

    def _pair(
        self, sources: Sequence[tuple[Node, int]], fit: Sequence[Target], block_bytes: int
    ) -> tuple[Node, Target, int] | None:
        """The best target that is not busy, a source for it, and how many blocks may go; None when all are busy."""
        for target in fit:
            for source, _ in sorted(sources, key=lambda one: (one[0].leaving, self._copies.bytes_from(one[0].node_id))):
                count = self._copies.room(source.node_id, target.node.node_id) // block_bytes
                if count or self._copies.idle(source.node_id, target.node.node_id):
                    return source, target, max(1, min(count, target.fits(block_bytes)))
        return None

    def _order(
        self,
        table: TableKey,
        group: Group,
        rows: Rows,
        scoped: Keys,
        source: Node,
        target: Target,
        tier: Tier,
        why: Why,
        now: float,
    ) -> None:
        node = target.node
        assert node.attachment is not None and source.attachment is not None
        nbytes = len(rows) * group.block_bytes
        target.free -= nbytes
        if tier == Tier.DRAM:
            node.sent(nbytes)
        seconds = self._copies.deadline_s(source.node_id, node.node_id, nbytes)
        command = self._take_number()
        self._copies.order(
            Copy(
                command,
                node.attachment.session,
                source.node_id,
                node.node_id,
                table,
                rows.copy(),
                scoped.copy(),
                nbytes,
                why.reason,
                now + seconds,
                why.drains,
                why.attempts,
            )
        )
        self._emit(
            m.SendCopy(
                node.attachment.session,
                command,
                source.attachment.facts,
                group.namespace(table.shard),
                table.salt,
                rows.tobytes(),
                group.epoch,
                int(tier),
                int(why.reason),
                seconds,
            )
        )


def _fit(
    targets: Targets, salt: str, tier: Tier, nbytes: int, holders: set[str], hosts: set[str], why: Why
) -> tuple[list[Target], Tier]:
    """Targets, and the tier there: the one that the block is in, else the other if it has room to spare.

    What found no room at its target is tried in the other tier first.
    """
    other = Tier.DRAM if tier == Tier.SSD else Tier.SSD
    for where in (other, tier) if why.attempts else (tier, other):
        pressing = why.pressing and where == tier
        fit = targets.choose(salt, where, nbytes, holders, hosts, pressing=pressing)
        if fit:
            return fit, where
    return [], tier
