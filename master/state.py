"""The master's state: what happened goes in, what to do comes out. No clock, no socket, no file.

``handle(event, now)`` returns commands; ``lookup`` and ``place`` answer at once. The owner calls all of
it under one lock and passes monotonic time in.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from kvstrata.master import messages as m
from kvstrata.master.attachment import Outcome
from kvstrata.master.content.chronicle import Chronicle, Line, Scope
from kvstrata.master.content.clearing import Cleared, Clearing
from kvstrata.master.content.lookups import (
    REQUEST_CHARACTERS_MAX,
    Asked,
    LookedUp,
    RequestLog,
    left,
    nothing_found,
    reasons_of,
)
from kvstrata.master.content.misses import MissReason, departed
from kvstrata.master.content.orphans import Orphans
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys
from kvstrata.master.directory.table import fold
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.membership import Membership
from kvstrata.master.namespaces import Group, Namespaces, Opened
from kvstrata.master.nodes import Node, Nodes
from kvstrata.master.placement import Placed, Placement
from kvstrata.master.replication.replication import Replication
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, PlaceState, Tier

#: Commands are numbered from the leader's epoch times two to this power.
COMMAND_BITS: Final = 32
#: What any master says to a node; the rest of what is sent, and all that is saved, is the leader's.
_ANYBODYS: Final = (m.SendAttached, m.SendResync, m.SendAck)
_LEADERS: Final = (*(set(get_args(m.Send)) - set(_ANYBODYS)), *get_args(m.Save))
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
    replicas: tuple[m.SaveReplicas, ...] = ()
    revision: int = 0
    leader_epoch: int = 0  #: the greatest that the store has seen


@dataclass(frozen=True, slots=True)
class Removal:
    """``removed`` blocks were known; ``awaited`` nodes are attached and have been told."""

    command: int
    removed: int
    awaited: frozenset[str]


_NOTHING: Final = Saved()
#: What hides a replica: its node has it no more, or cannot read it (UNKNOWN: from a client that does not say).
_GONE: Final = frozenset({BlockStatus.UNKNOWN, BlockStatus.MISSING, BlockStatus.EVICTED, BlockStatus.READ_ERROR})


class MasterState:
    """Directory, liveness, placement, namespaces, roster and removals, composed."""

    def __init__(
        self,
        now: float,
        rng: random.Random,
        saved: Saved = _NOTHING,
        grace_s: float = 5.0,
        standing: Standing | None = None,
    ) -> None:
        self.standing = Standing() if standing is None else standing
        self.directory = Directory()
        self.namespaces = Namespaces()
        self.orphans = Orphans(self.directory, self.namespaces)
        self.placement = Placement(rng)
        self.tombstones = Tombstones()
        self.chronicle = Chronicle()
        self.requests = RequestLog()
        self.counts: Counter[str] = Counter()
        self._out: list[m.Command] = []
        self._rng = rng
        self._first_command = 0
        self.quotas = self.new_quotas()
        self.membership = Membership(
            self.directory,
            self.namespaces,
            self.tombstones,
            self.chronicle,
            self.counts,
            self._emit,
            rng,
            self.quotas,
            self.standing,
        )
        self.clearing = Clearing(
            self.directory, self.namespaces, self.membership.nodes, self.tombstones, self.chronicle, self._emit
        )
        self.membership.attached = self.clearing.attached
        self.membership.resumable = lambda node_id: not self.clearing.scopes.held(node_id)
        self.replication = Replication(
            self.directory,
            self.namespaces,
            self.membership,
            self.standing,
            self._scope,
            self.tombstones.take_number,
            self._start_over,
            self._emit,
            now,
        )
        self.membership.restore(saved.nodes, now, grace_s)
        self.replication.load(saved.replicas, saved.nodes)
        for group in saved.groups:
            self.namespaces.restore(group.namespace, group.epoch)
        if self.leading:
            self.restore_orders(saved, now)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Attach: self._attach,
            m.SnapshotPart: self._snapshot_part,
            m.DeltaBatch: self._delta,
            m.CommandDone: self._command_done,
            m.CopyDone: self._spoken(self.replication.copy_done),
            m.Offer: self._spoken(self.replication.offered),
            m.Leaving: self._spoken(self.replication.stopping),
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

    @property
    def leading(self) -> bool:
        """Whether nodes take orders of this master, and the store what it writes."""
        return self.standing.leading

    def new_quotas(self) -> Quotas:
        """Without a policy. Nodes report revisions of their shares: none of two leaders are alike."""
        first = self._rng.getrandbits(15) << 40 | (self.standing.epoch & 0xFFFF) << 24
        return Quotas(self._emit, first)

    def restore_orders(self, saved: Saved, now: float) -> None:
        """What a leader works by: policies and grants, and orders that nodes have not confirmed."""
        self.quotas = self.membership.quotas = self.new_quotas()
        self.quotas.restore(saved.policies, saved.fallback, saved.grants, now)
        for stone in saved.tombstones:
            self.tombstones.restore(stone)
        for scope in saved.scopes:
            self.clearing.scopes.restore(scope)
        last = max([saved.last_command, *(scope.command for scope in saved.scopes)])
        # What an earlier leader could not save was numbered too, and nodes may confirm it yet.
        self.tombstones.start_after(max(last, self.standing.epoch << COMMAND_BITS))
        self._first_command = self.tombstones.next_number

    def forget_orders(self) -> None:
        """Another master leads: what was ordered here is its business now."""
        self.quotas = self.membership.quotas = self.new_quotas()
        self.tombstones.clear()
        self.clearing.scopes.clear()

    def emit(self, command: m.Command) -> None:
        """For rooms that work on the whole state."""
        self._emit(command)

    def _emit(self, command: m.Command) -> None:
        if self.leading or not isinstance(command, _LEADERS):
            self._out.append(command)

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take an event in; returns what to do, in order."""
        self._handlers[type(event)](event, now)
        return self._take_out()

    def taken(self) -> list[m.Command]:
        """What a question led to: a tenant that asks where to store for the first time gets its shares."""
        return self._take_out()

    def _take_out(self) -> list[m.Command]:
        out, self._out = self._out, []
        return out

    def _attach(self, event: m.Attach, now: float) -> None:
        self.standing.told(event.leader_epoch, event.leader_id)
        self.clearing.learn(event, now)
        self.membership.attach(event, now)

    def _tick(self, event: m.Tick, now: float) -> None:
        self.membership.tick(event, now)
        self.directory.turn(now)
        self.replication.turn(now)
        if not self.leading:
            return
        self.quotas.tick(now)
        if self.orphans:
            links = [node.attachment for node in self.nodes if node.linked and node.attachment is not None]
            for hint in self.orphans.turn({link.slot: link.session for link in links if link.slot is not None}):
                self._emit(hint)

    # ------------------------------------------------------------------ tenants

    def set_tenant(self, policy: m.TenantPolicy, now: float) -> list[m.Command]:
        """One tenant's limits and floors, from now on."""
        self.quotas.set_policy(policy, now)
        return self._take_out()

    def remove_tenant(self, salt: str, now: float) -> list[m.Command]:
        """The default applies to this salt, from now on."""
        self.quotas.remove_policy(salt, now)
        return self._take_out()

    def set_default(self, policy: m.TenantPolicy, deny: bool, now: float) -> list[m.Command]:
        """What each salt without a policy may use, from now on."""
        self.quotas.set_fallback(policy, deny, now)
        return self._take_out()

    def rebalance(self, now: float) -> list[m.Command] | None:
        """Another step of sharing limits out; None when nothing is due."""
        if not self.leading or not self.quotas.behind(now):
            return None
        self.quotas.step(now)
        return self._take_out()

    def grants_saved(self, serial: int, now: float) -> list[m.Command]:
        """Grants up to ``serial`` are in the store: what waited for that may go out."""
        self.quotas.durable(serial, now)
        return self._take_out()

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
            outcome = node.attachment.delta(event, self.directory, locate)
            if outcome is Outcome.APPLIED:
                self.orphans.left(event.changes)
                self.replication.changed(event.changes, now)
            self._outcome(node, outcome, now)

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
                group = self._register(part.namespace)
            except (FingerprintMismatch, Busy) as error:
                self.counts["refused_holdings"] += 1
                fields = {"node_id": node.node_id, "reason": str(error)}
                self._emit(m.Report("node holds a namespace that is refused", fields))
                return None
            if part.epoch > group.epoch and not self.leading:
                self.clearing.learned([(group.name, part.epoch)], now)  # the leader has begun it
                group = self.namespaces.named(group.name)
            if part.epoch != group.epoch:
                self.counts["holdings_of_other_epochs"] += 1
                return None
            if _is_there(part) and self.clearing.scopes.hold_back(node.node_id, group.name, part.salt):
                self.counts["holdings_held_back"] += 1
                return None
            table, keys = self._where(part.namespace, part.salt, part.hashes)
            self._note_part(node, group, part, table, keys, now)
            self.replication.held(node, part, table, keys)
            if _is_there(part):
                # Else a block evicted soon after it was stored could not be stored again until the intent lapses.
                self.placement.fulfilled(keys, self._scope(table))
            return table, keys

        return locate

    def _note_part(
        self, node: Node, group: Group, part: m.Holding | m.Change, table: TableKey, keys: Keys, now: float
    ) -> None:
        tier = Tier(part.tier).name.lower()
        about = Scope(group.first, table.shard, table.salt)
        if isinstance(part, m.Holding):
            self.chronicle.note(now, f"in snapshot ({tier})", node.node_id, about, keys)
        elif part.added:
            self.chronicle.note(now, f"added ({tier})", node.node_id, about, keys)
        else:
            self.chronicle.note(now, f"removed ({tier})", node.node_id, about, keys, departed(part.reason), part.cause)

    def _where(self, namespace: Namespace, salt: str, hashes: bytes) -> tuple[TableKey, Keys]:
        group, _ = self.namespaces.register(namespace)
        return TableKey(group.number, namespace.shard, salt), fold(hashes, namespace.hash_bytes)

    def _about(self, table: TableKey) -> Scope:
        group = self.namespaces.by_number(table.group)
        assert group is not None
        return Scope(group.first, table.shard, table.salt)

    def _scope(self, table: TableKey) -> Keys:
        """What tells apart equal hashes of different tenants and shards, and of before a drop: u64[1, 2]."""
        text = f"{self.clearing.drops}/{table.group}/{table.shard}/{table.salt}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return np.frombuffer(digest, dtype="<u8").reshape(1, 2)

    def _register(self, namespace: Namespace) -> Group:
        group, new = self.namespaces.register(namespace)
        if new:
            self._emit(m.SaveGroup(namespace, group.epoch))
        return group

    # ------------------------------------------------------------------ clients' questions

    def open_namespace(self, namespace: Namespace) -> tuple[Opened, list[m.Command]]:
        """Register and name a namespace. Raises :class:`FingerprintMismatch` or :class:`Busy`."""
        self._register(namespace)
        return self.namespaces.open(namespace), self._take_out()

    def lookup(
        self,
        namespace: Namespace,
        group: int,
        salt: str,
        keys: Keys,
        boot_id: str,
        now: float,
        epoch: int | None = None,
        avoid: Collection[m.Process] = (),
    ) -> LookedUp:
        """Where blocks are. Pins nothing, renews nothing.

        ``group`` is a group's number, ``epoch`` the weight epoch of the asker's handle: of another epoch than
        the current one nothing is found. Nodes in ``avoid`` are named only for blocks that no other has.
        """
        if self._past(group, epoch):
            return nothing_found(len(keys), MissReason.EPOCH)
        shunned = self.membership.slots_of(avoid)
        found = self.directory.lookup(group, namespace.shard, namespace.shard_count, salt, keys, boot_id, shunned)
        if found.present.all():
            return LookedUp(found, False, np.zeros(0, dtype=np.uint8))
        if found.hit_blocks < len(keys) and self.recovering(now):
            missing = len(keys) - int(np.count_nonzero(found.present))
            return LookedUp(found, True, np.full(missing, MissReason.NOT_YET, dtype=np.uint8))
        table = TableKey(group, namespace.shard, salt)
        reasons, missing_keys = reasons_of(self.directory, table, keys, found)
        gone, gone_keys = left(reasons, missing_keys)
        if gone.size:
            coming = self._coming(table, gone_keys, now)
            reasons[gone[coming]] = MissReason.IN_FLIGHT
        return LookedUp(found, False, reasons)

    def asked(self, opened: Opened, salt: str, hashes: bytes, now: float) -> None:
        """What a lookup was about: worth being copied first when a node is lost. O(1)."""
        table = TableKey(opened.group.number, opened.namespace.shard, salt)
        self.replication.asked(table, opened.namespace.hash_bytes, hashes, now)

    def note_lookup(self, request: str, opened: Opened, salt: str, keys: Keys, answer: LookedUp, now: float) -> None:
        """Remember a lookup by the name of the request that it was for."""
        name = request[:REQUEST_CHARACTERS_MAX]
        table = TableKey(opened.group.number, opened.namespace.shard, salt)
        hit = answer.found.hit_blocks
        reason = MissReason(int(answer.reasons[0])) if len(answer.reasons) else None
        self.requests.note(Asked(name, opened.group.name, table, keys, hit, reason, now))

    def in_flight(self, table: TableKey, key: Keys, now: float) -> bool:
        """Whether a writer was sent off with a block (u64[1, 2]) that has not arrived."""
        return bool(self._coming(table, key, now)[0])

    def _coming(self, table: TableKey, keys: Keys, now: float) -> npt.NDArray[np.bool_]:
        return self.placement.in_flight(keys, self._scope(table), set(self.membership.slot_facts), now)

    def _past(self, group: int, epoch: int | None) -> bool:
        """Whether a handle is of another weight epoch than its group."""
        known = self.namespaces.by_number(group)
        return known is None or epoch not in (None, known.epoch)

    def place(
        self,
        namespace: Namespace,
        group: int,
        salt: str,
        keys: Keys,
        boot_id: str,
        now: float,
        epoch: int | None = None,
        avoid: Collection[m.Process] = (),
    ) -> Placed:
        """Where to store blocks: there already, in flight, or a node; one in ``avoid`` when there is no other.

        Raises :class:`FingerprintMismatch` for a handle of another weight epoch than the current one.
        """
        if self._past(group, epoch):
            current = self.namespaces.named(namespace.group).epoch
            raise FingerprintMismatch(
                f"group {namespace.group!r} is at weight epoch {current}, and this handle is of another: "
                "open the namespace again"
            )
        shunned = self.membership.slots_of(avoid)
        present = self.directory.lookup(group, namespace.shard, 1, salt, keys, boot_id, shunned).codes
        active = self.membership.active()
        if self.leading:
            self.quotas.seen(salt, namespace.block_bytes, now)
        rooms = self.quotas.rooms(salt)
        candidates = [node.candidate(now, rooms.get(node.node_id)) for node in active.values() if not node.leaving]
        if any(candidate.capacity for candidate in candidates):
            candidates = [candidate for candidate in candidates if candidate.capacity]
        if shunned and any(candidate.slot not in shunned for candidate in candidates):
            candidates = [candidate for candidate in candidates if candidate.slot not in shunned]
        scope = self._scope(TableKey(group, namespace.shard, salt))
        placed = self.placement.place(keys, scope, present, candidates, boot_id, now)
        codes, blocks = np.unique(placed.codes[placed.states == PlaceState.NEW], return_counts=True)
        for code, count in zip(codes.tolist(), blocks.tolist(), strict=True):
            node, nbytes = active[(code - 1) >> 2], count * namespace.block_bytes
            node.placed_bytes += nbytes
            self.quotas.placed(salt, node.node_id, nbytes)
        return placed

    def recovering(self, now: float) -> bool:
        """True from the start until every rostered node is back, or the grace is over."""
        return self.membership.recovering(now)

    def knows(self, node_id: str, incarnation: int) -> bool:
        """True while this incarnation of the node is attached."""
        return self.membership.knows(node_id, incarnation)

    def _miss(self, event: m.MissReport, now: float) -> None:
        opened = self.namespaces.by_handle(event.handle)
        if event.epoch != opened.group.epoch:
            self.counts["miss_reports_of_other_epochs"] += 1
            return
        table, keys = self._where(opened.namespace, event.salt, event.hashes)
        node = self.nodes.get(event.node_id)
        if node is not None:
            self._note_miss(event, table, keys, now)
        gone = event.status in _GONE
        if gone or event.at_store:
            # A writer whose node refused says so too, and nobody need wait for what is not coming.
            self.placement.fulfilled(keys, self._scope(table))
        if not gone or event.at_store or node is None or node.attachment is None:
            return
        attachment = node.attachment
        if attachment.slot is None or not self.knows(event.node_id, event.incarnation):
            return
        if event.delta_seq > attachment.applied_seq:
            until = min(event.delta_seq, attachment.applied_seq + DELTA_LAG_MAX)
            self.counts["hidden_blocks"] += self.directory.hide(attachment.slot, table, keys, until)

    def _note_miss(self, event: m.MissReport, table: TableKey, keys: Keys, now: float) -> None:
        seen = event.status if event.status is not BlockStatus.UNKNOWN else None
        told = "" if seen is None else f": {seen.name.lower()}"
        if event.at_store or (seen is None and event.delta_seq == 0):
            what, why = f"not stored{told}", MissReason.REFUSED_AT_STORE
        else:
            what, why = f"not loaded{told} (delta {event.delta_seq})", MissReason.LOAD_FAILED
        self.chronicle.note(now, what, event.node_id, self._about(table), keys, why, status=seen)

    # ------------------------------------------------------------------ removal

    def remove(self, namespace: Namespace, salt: str, hashes: bytes, now: float) -> tuple[Removal, list[m.Command]]:
        """Remove blocks of one shard everywhere; nodes that are away learn of it when they attach.

        Raises :class:`Busy` when too many removals wait for absent nodes.
        """
        holders = [node.node_id for node in self.nodes if node.may_hold_blocks]
        stone = self.tombstones.add(namespace, salt, hashes, holders)
        table, keys = self._where(namespace, salt, hashes)
        removed = self.directory.remove_everywhere(table, keys)
        self.chronicle.note(now, "removed by a client", "", self._about(table), keys, MissReason.REMOVED)
        if stone.waiting:
            self._emit(stone.saved())
        linked = [node for node in self.nodes if node.linked]
        for node in linked:
            assert node.attachment is not None
            self._emit(m.SendRemove(node.attachment.session, stone.command, namespace, salt, hashes))
        return Removal(stone.command, removed, frozenset(node.node_id for node in linked)), self._take_out()

    def remove_from(self, node_id: str, stone: m.SaveTombstone) -> None:
        """A node has yet to remove blocks: they are not found there any more."""
        node = self.nodes.get(node_id)
        if node is not None and node.attachment is not None and node.attachment.slot is not None:
            table, keys = self._where(stone.namespace, stone.salt, stone.hashes)
            self.directory.remove_slot_blocks(node.attachment.slot, table, keys)

    def bump(self, group: str, now: float) -> tuple[Cleared, list[m.Command]]:
        """Begin the next weight epoch of a group: see :meth:`Clearing.bump`."""
        return self.clearing.bump(group, now), self._take_out()

    def drop(self, group: str, salt: str | None, erase: bool, now: float) -> tuple[Cleared, list[m.Command]]:
        """Forget a tenant, a namespace, or both: see :meth:`Clearing.drop`."""
        return self.clearing.drop(group, salt, erase, now), self._take_out()

    def attached(self, node_ids: Iterable[str]) -> list[str]:
        """Those of the nodes that are attached now."""
        known = [self.nodes.get(node_id) for node_id in node_ids]
        return [node.node_id for node in known if node is not None and node.attachment is not None]

    def unconfirmed(self, command: int) -> list[str]:
        """Nodes that have not confirmed a removal, a drop or a bump; empty when it is done."""
        return self.tombstones.unconfirmed(command) or self.clearing.scopes.unconfirmed(command)

    def ordered(self, command: int) -> bool:
        """Whether this master has given this command since it leads, and still leads."""
        return self.leading and command >= self._first_command

    def _command_done(self, event: m.CommandDone, now: float) -> None:
        node = self.membership.speaker(event.session, now)
        if node is None:
            return
        if self.clearing.done(node, event.command, event.error) and node.attachment is not None:
            reason = "what it said of a dropped scope was held back"
            self._outcome(node, node.attachment.start_over(self.directory, reason), now)
        if event.error:
            self.counts["failed_commands"] += 1
            fields = {"node_id": node.node_id, "command": event.command, "reason": event.error}
            self._emit(m.Report("node could not do as told", fields))
            return
        stone = self.tombstones.confirm(event.command, node.node_id)
        if stone is not None:
            self._emit(stone.saved())

    def _spoken(self, hear: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
        """What a node says counts while its session does."""

        def heard(event: Any, now: float) -> None:
            if self.membership.speaker(event.session, now) is not None:
                hear(event, now)

        return heard

    def _start_over(self, node: Node, reason: str, now: float) -> None:
        """Have a node say again what it has."""
        if node.attachment is not None:
            self._outcome(node, node.attachment.start_over(self.directory, reason), now)

    def remove_node(self, node_id: str, force: bool, now: float) -> list[m.Command]:
        """Take a node off the roster: see :meth:`Replication.remove`. Nothing waits for it any more."""
        self.replication.remove(node_id, now, force=force)
        for stone in self.tombstones.waiting_for(node_id):
            if (confirmed := self.tombstones.confirm(stone.command, node_id)) is not None:
                self._emit(confirmed.saved())
        for scope in self.clearing.scopes.waiting_for(node_id):
            if (done := self.clearing.scopes.confirm(scope.command, node_id)) is not None:
                self._emit(done.saved())
        return self._take_out()

    # ------------------------------------------------------------------ for people and tests

    def story(self, namespace: Namespace, salt: str, block_hash: bytes) -> list[Line]:
        """What happened to one block lately, oldest first (bounded memory)."""
        group = self.namespaces.find(namespace)
        if group is None:
            return []
        return self.chronicle.story(
            TableKey(group.first, namespace.shard, salt), fold(block_hash, namespace.hash_bytes)
        )

    def check(self) -> None:
        """Assert every invariant. O(all blocks)."""
        self.directory.check()
        self.namespaces.check()
        self.membership.check()
        self.placement.check()
        self.tombstones.check()
        self.requests.check()
        self.clearing.scopes.check()
        self.orphans.check()
        self.quotas.check()
        self.replication.check()
        self.standing.check()
        assert not self._out


def _is_there(part: m.Holding | m.Change) -> bool:
    return isinstance(part, m.Holding) or part.added
