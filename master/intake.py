"""What nodes say that they have: snapshots and deltas into the directory, and to whom else it matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvstrata.master import messages as m
from kvstrata.master.attachment import Outcome
from kvstrata.master.content.chronicle import Chronicle
from kvstrata.master.content.clearing import Clearing
from kvstrata.master.content.misses import departed
from kvstrata.master.content.orphans import Orphans
from kvstrata.master.content.removals import Removals
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.index.pool_log import Blocks, NodeCleared, PoolLog
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.membership import Membership
from kvstrata.master.namespaces import Namespaces
from kvstrata.master.naming import Naming
from kvstrata.master.nodes import Node
from kvstrata.master.placement import Placement
from kvstrata.master.replication.replication import Replication
from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.status import Tier


class Intake:
    """Part of the master's state; gives commands to ``emit``.

    What is of another weight epoch, or of a scope that its node has yet to drop, is not taken in.
    """

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        naming: Naming,
        membership: Membership,
        clearing: Clearing,
        removals: Removals,
        placement: Placement,
        replication: Replication,
        orphans: Orphans,
        chronicle: Chronicle,
        counts: Counter[str],
        standing: Standing,
        pool_log: PoolLog,
        emit: Callable[[m.Command], None],
    ) -> None:
        self._directory = directory
        self._namespaces = namespaces
        self._naming = naming
        self._membership = membership
        self._clearing = clearing
        self._removals = removals
        self._placement = placement
        self._replication = replication
        self._orphans = orphans
        self._chronicle = chronicle
        self._counts = counts
        self._standing = standing
        self._pool_log = pool_log
        self._emit = emit

    def snapshot_part(self, event: m.SnapshotPart, now: float) -> None:
        """A part of a whole inventory; the last one takes it into service."""
        node = self._membership.speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            if event.first:
                self._pool_log.append(NodeCleared(node.node_id))
            self._outcome(node, node.attachment.snapshot(event, self._directory, locate), now)

    def delta(self, event: m.DeltaBatch, now: float) -> None:
        """What came and went since; with a gap before it, a snapshot is asked for."""
        node = self._membership.speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            outcome = node.attachment.delta(event, self._directory, locate)
            if outcome is Outcome.APPLIED:
                self._orphans.left(event.changes)
                self._replication.changed(event.changes, now)
            self._outcome(node, outcome, now)

    def start_over(self, node: Node, reason: str, now: float) -> None:
        """Have a node say again what it has."""
        if node.attachment is not None:
            self._outcome(node, node.attachment.start_over(self._directory, reason), now)

    def _outcome(self, node: Node, outcome: Outcome, now: float) -> None:
        attachment = node.attachment
        assert attachment is not None
        self._counts[f"sync_{outcome.name.lower()}"] += 1
        if outcome is Outcome.GAP:
            self._emit(m.SendResync(attachment.session, attachment.gap))
            self._emit(m.Report("snapshot asked for", {"node_id": node.node_id, "reason": attachment.gap}))
        elif outcome is Outcome.SWAPPED:
            assert attachment.slot is not None
            self._removals.keep_out(node)
            self._membership.synced(node, now)
        if outcome in (Outcome.SWAPPED, Outcome.APPLIED, Outcome.IGNORED) and not attachment.loading:
            self._emit(m.SendAck(attachment.session, attachment.applied_seq))

    def _locator(self, node: Node, now: float) -> Callable[[m.Holding | m.Change], tuple[TableKey, Keys] | None]:
        def locate(part: m.Holding | m.Change) -> tuple[TableKey, Keys] | None:
            try:
                group = self._naming.register(part.namespace)
            except (FingerprintMismatch, Busy) as error:
                self._counts["refused_holdings"] += 1
                fields = {"node_id": node.node_id, "reason": str(error)}
                self._emit(m.Report("node holds a namespace that is refused", fields))
                return None
            if part.epoch > group.epoch:  # passed over, its blocks would be unknown here for as long as they stay
                begun = [(group.name, part.epoch)]
                if self._standing.leading:
                    self._clearing.told(node.node_id, begun, now)
                else:
                    self._clearing.learned(begun, now)
                group = self._namespaces.named(group.name)
            if part.epoch != group.epoch:
                self._counts["holdings_of_other_epochs"] += 1
                return None
            if _is_there(part) and self._clearing.scopes.hold_back(node.node_id, group.name, part.salt):
                self._counts["holdings_held_back"] += 1
                return None
            table, keys = self._naming.where(part.namespace, part.salt, part.hashes)
            self._note_part(node, part, table, keys, now)
            self._replication.held(node, part, table, keys)
            if self._pool_log.on:
                self._pool_log.append(
                    Blocks(_is_there(part), node.node_id, part.namespace, part.salt, part.tier, part.hashes)
                )
            if _is_there(part):
                # Else a block evicted soon after it was stored could not be stored again until the intent lapses.
                self._placement.fulfilled(keys, self._naming.scope(table))
            return table, keys

        return locate

    def _note_part(self, node: Node, part: m.Holding | m.Change, table: TableKey, keys: Keys, now: float) -> None:
        tier = Tier(part.tier).name.lower()
        about = self._naming.about(table)
        if isinstance(part, m.Holding):
            self._chronicle.note(now, f"in snapshot ({tier})", node.node_id, about, keys)
        elif part.added:
            self._chronicle.note(now, f"added ({tier})", node.node_id, about, keys)
        else:
            self._chronicle.note(now, f"removed ({tier})", node.node_id, about, keys, departed(part.reason), part.cause)


def _is_there(part: m.Holding | m.Change) -> bool:
    return isinstance(part, m.Holding) or part.added
