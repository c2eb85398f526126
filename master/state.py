"""The master's state: what happened goes in, what to do comes out. No clock, no socket, no file.

``handle(event, now)`` returns commands; ``lookup`` and ``place`` answer at once. The owner calls all of
it under one lock and passes monotonic time in.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.attachment import Outcome
from kvstrata.master.chronicle import Chronicle, Line
from kvstrata.master.directory import Directory, TableKey
from kvstrata.master.lookups import LookedUp, left, reasons_of
from kvstrata.master.membership import Membership
from kvstrata.master.misses import MissReason
from kvstrata.master.namespaces import Namespaces, Opened
from kvstrata.master.nodes import Node, Nodes
from kvstrata.master.placement import Placed, Placement
from kvstrata.master.probing import Keys
from kvstrata.master.table import fold
from kvstrata.master.tombstones import Tombstones
from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState

#: A miss report hides a replica for at most this many deltas to come, whatever it claims.
DELTA_LAG_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Saved:
    """What was durable when the master started."""

    nodes: tuple[m.SaveNode, ...] = ()
    groups: tuple[m.SaveGroup, ...] = ()
    tombstones: tuple[m.SaveTombstone, ...] = ()
    last_command: int = 0
    policies: tuple[m.TenantPolicy, ...] = ()
    fallback: m.SaveFallback | None = None
    grants: tuple[m.SaveGrants, ...] = ()
    scopes: tuple[m.SaveScope, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """``removed`` blocks were known; ``awaited`` nodes are attached and have been told."""

    command: int
    removed: int
    awaited: frozenset[str]


_NOTHING: Final = Saved()


class MasterState:
    """Directory, liveness, placement, namespaces, roster and removals, composed."""

    def __init__(self, now: float, rng: random.Random, saved: Saved = _NOTHING, grace_s: float = 5.0) -> None:
        self.directory = Directory()
        self.namespaces = Namespaces()
        self.placement = Placement(rng)
        self.tombstones = Tombstones()
        self.chronicle = Chronicle()
        self.counts: Counter[str] = Counter()
        self._out: list[m.Command] = []
        self.membership = Membership(
            self.directory, self.namespaces, self.tombstones, self.chronicle, self.counts, self._emit, rng
        )
        self.membership.restore(saved.nodes, now, grace_s)
        for group in saved.groups:
            self.namespaces.restore(group.namespace, group.epoch)
        for stone in saved.tombstones:
            self.tombstones.restore(stone)
        self.tombstones.start_after(saved.last_command)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Attach: self.membership.attach,
            m.SnapshotPart: self._snapshot_part,
            m.DeltaBatch: self._delta,
            m.CommandDone: self._command_done,
            m.StatusReport: self.membership.status,
            m.Detach: self.membership.detach,
            m.LinkLost: self.membership.link_lost,
            m.Heartbeat: self.membership.heartbeat,
            m.MissReport: self._miss,
            m.Tick: self._tick,
        }

    @property
    def nodes(self) -> Nodes:
        return self.membership.nodes

    def _emit(self, command: m.Command) -> None:
        self._out.append(command)

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take an event in; returns what to do, in order."""
        self._handlers[type(event)](event, now)
        return self._take_out()

    def _take_out(self) -> list[m.Command]:
        out, self._out = self._out, []
        return out

    def _tick(self, event: m.Tick, now: float) -> None:
        self.membership.tick(event, now)
        self.directory.turn(now)

    # ------------------------------------------------------------------ inventory

    def _snapshot_part(self, event: m.SnapshotPart, now: float) -> None:
        node = self.membership.speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            self._outcome(node, node.attachment.snapshot(event, self.directory, locate), now)

    def _delta(self, event: m.DeltaBatch, now: float) -> None:
        node = self.membership.speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            self._outcome(node, node.attachment.delta(event, self.directory, locate), now)

    def _outcome(self, node: Node, outcome: Outcome, now: float) -> None:
        attachment = node.attachment
        assert attachment is not None
        self.counts[f"sync_{outcome.name.lower()}"] += 1
        if outcome is Outcome.GAP:
            self._emit(m.SendResync(attachment.session, attachment.gap))
            self._emit(m.Report("snapshot asked for", {"node_id": node.node_id, "reason": attachment.gap}))
        elif outcome is Outcome.SWAPPED:
            assert attachment.slot is not None
            for stone in self.tombstones.waiting_for(node.node_id):
                table, keys = self._where(stone.namespace, stone.salt, stone.hashes)
                self.directory.remove_slot_blocks(attachment.slot, table, keys)
            self.membership.synced(node, now)
        if outcome in (Outcome.SWAPPED, Outcome.APPLIED, Outcome.IGNORED) and not attachment.loading:
            self._emit(m.SendAck(attachment.session, attachment.applied_seq))

    def _locator(self, node: Node, now: float) -> Callable[[m.Holding | m.Change], tuple[TableKey, Keys] | None]:
        def locate(part: m.Holding | m.Change) -> tuple[TableKey, Keys] | None:
            try:
                self._register(part.namespace)
            except (FingerprintMismatch, Busy) as error:
                self.counts["refused_holdings"] += 1
                fields = {"node_id": node.node_id, "reason": str(error)}
                self._emit(m.Report("node holds a namespace that is refused", fields))
                return None
            table, keys = self._where(part.namespace, part.salt, part.hashes)
            what = ("added" if part.added else "removed") if isinstance(part, m.Change) else "in snapshot"
            self.chronicle.note(now, what, node.node_id, table, keys)
            if what != "removed":
                # Else a block evicted soon after it was stored could not be stored again until the intent lapses.
                self.placement.fulfilled(keys, _scope(table.group, table.shard, table.salt))
            return table, keys

        return locate

    def _where(self, namespace: Namespace, salt: str, hashes: bytes) -> tuple[TableKey, Keys]:
        group, _ = self.namespaces.register(namespace)
        return TableKey(group.number, namespace.shard, salt), fold(hashes, namespace.hash_bytes)

    def _register(self, namespace: Namespace) -> None:
        _, new = self.namespaces.register(namespace)
        if new:
            self._emit(m.SaveGroup(namespace, epoch=0))

    # ------------------------------------------------------------------ clients' questions

    def open_namespace(self, namespace: Namespace) -> tuple[Opened, list[m.Command]]:
        """Register and name a namespace. Raises :class:`FingerprintMismatch` or :class:`Busy`."""
        self._register(namespace)
        return self.namespaces.open(namespace), self._take_out()

    def lookup(self, namespace: Namespace, group: int, salt: str, keys: Keys, boot_id: str, now: float) -> LookedUp:
        """Where blocks are. Pins nothing, renews nothing."""
        found = self.directory.lookup(group, namespace.shard, namespace.shard_count, salt, keys, boot_id)
        if found.present.all():
            return LookedUp(found, False, np.zeros(0, dtype=np.uint8))
        if found.hit_blocks < len(keys) and self.recovering(now):
            missing = len(keys) - int(np.count_nonzero(found.present))
            return LookedUp(found, True, np.full(missing, MissReason.NOT_YET, dtype=np.uint8))
        table = TableKey(group, namespace.shard, salt)
        reasons, missing_keys = reasons_of(self.directory, table, keys, found)
        gone = left(reasons)
        if gone.size:
            scope = _scope(group, namespace.shard, salt)
            coming = self.placement.in_flight(missing_keys[gone], scope, set(self.membership.slot_facts), now)
            reasons[gone[coming]] = MissReason.IN_FLIGHT
        return LookedUp(found, False, reasons)

    def place(self, namespace: Namespace, group: int, salt: str, keys: Keys, boot_id: str, now: float) -> Placed:
        """Where to store blocks: there already, in flight, or a node."""
        present = self.directory.lookup(group, namespace.shard, 1, salt, keys, boot_id).codes
        active = self.membership.active()
        candidates = [node.candidate(now) for node in active.values()]
        placed = self.placement.place(keys, _scope(group, namespace.shard, salt), present, candidates, boot_id, now)
        codes, blocks = np.unique(placed.codes[placed.states == PlaceState.NEW], return_counts=True)
        for code, count in zip(codes.tolist(), blocks.tolist(), strict=True):
            active[(code - 1) >> 2].placed_bytes += count * namespace.block_bytes
        return placed

    def recovering(self, now: float) -> bool:
        """True from the start until every rostered node is back, or the grace is over."""
        return self.membership.recovering(now)

    def knows(self, node_id: str, incarnation: int) -> bool:
        """True while this incarnation of the node is attached."""
        return self.membership.knows(node_id, incarnation)

    def _miss(self, event: m.MissReport, now: float) -> None:
        opened = self.namespaces.by_handle(event.handle)
        table, keys = self._where(opened.namespace, event.salt, event.hashes)
        # A writer whose node refused says so too, and nobody need wait for what is not coming.
        self.placement.fulfilled(keys, _scope(table.group, table.shard, table.salt))
        node = self.nodes.get(event.node_id)
        if node is None or node.attachment is None or not self.knows(event.node_id, event.incarnation):
            return
        attachment = node.attachment
        if attachment.slot is None or event.delta_seq <= attachment.applied_seq:
            return
        until = min(event.delta_seq, attachment.applied_seq + DELTA_LAG_MAX)
        hidden = self.directory.hide(attachment.slot, table, keys, until)
        self.counts["hidden_blocks"] += hidden
        self.chronicle.note(now, f"reported missing (delta {event.delta_seq})", node.node_id, table, keys)

    # ------------------------------------------------------------------ removal

    def remove(self, namespace: Namespace, salt: str, hashes: bytes, now: float) -> tuple[Removal, list[m.Command]]:
        """Remove blocks of one shard everywhere; nodes that are away learn of it when they attach.

        Raises :class:`Busy` when too many removals wait for absent nodes.
        """
        holders = [node.node_id for node in self.nodes if node.may_hold_blocks]
        stone = self.tombstones.add(namespace, salt, hashes, holders)
        table, keys = self._where(namespace, salt, hashes)
        removed = self.directory.remove_everywhere(table, keys)
        self.chronicle.note(now, "removed by a client", "", table, keys)
        if stone.waiting:
            self._emit(stone.saved())
        linked = [node for node in self.nodes if node.linked]
        for node in linked:
            assert node.attachment is not None
            self._emit(m.SendRemove(node.attachment.session, stone.command, namespace, salt, hashes))
        return Removal(stone.command, removed, frozenset(node.node_id for node in linked)), self._take_out()

    def _command_done(self, event: m.CommandDone, now: float) -> None:
        node = self.membership.speaker(event.session, now)
        if node is None:
            return
        if event.error:
            self.counts["failed_commands"] += 1
            fields = {"node_id": node.node_id, "command": event.command, "reason": event.error}
            self._emit(m.Report("node could not remove", fields))
            return
        stone = self.tombstones.confirm(event.command, node.node_id)
        if stone is not None:
            self._emit(stone.saved())

    # ------------------------------------------------------------------ for people and tests

    def story(self, namespace: Namespace, salt: str, block_hash: bytes) -> list[Line]:
        """What happened to one block lately, oldest first (bounded memory)."""
        group = self.namespaces.find(namespace)
        if group is None:
            return []
        return self.chronicle.story(
            TableKey(group.number, namespace.shard, salt), fold(block_hash, namespace.hash_bytes)
        )

    def check(self) -> None:
        """Assert every invariant. O(all blocks)."""
        self.directory.check()
        self.namespaces.check()
        self.membership.check()
        self.placement.check()
        self.tombstones.check()
        assert not self._out


def _scope(group: int, shard: int, salt: str) -> Keys:
    """What tells apart equal hashes of different tenants and shards: u64[1, 2]."""
    digest = hashlib.blake2b(f"{group}/{shard}/{salt}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").reshape(1, 2)
