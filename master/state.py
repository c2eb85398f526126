"""The master's state: what happened goes in, what to do comes out. No clock, no socket, no file.

``handle(event, now)`` returns commands; ``questions`` are answered at once. The owner calls all of it under one
lock and passes monotonic time in.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, get_args

from kvstrata.master import messages as m
from kvstrata.master.content.chronicle import Chronicle, Line
from kvstrata.master.content.clearing import Cleared, Clearing
from kvstrata.master.content.orphans import Orphans
from kvstrata.master.content.removals import Removal, Removals
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.index.log import IndexLog
from kvstrata.master.index.pool_log import NodeCleared, PoolLog, ScopeCleared
from kvstrata.master.intake import Intake
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.membership import Membership
from kvstrata.master.namespaces import Namespaces, Opened
from kvstrata.master.naming import Naming
from kvstrata.master.nodes import Nodes
from kvstrata.master.placement import Placement
from kvstrata.master.questions import Questions
from kvstrata.master.replication.replication import Replication
from kvstrata.master.saved import Saved
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace

#: Commands are numbered from the leader's epoch times two to this power.
COMMAND_BITS: Final = 32
#: What any master says to a node; the rest of what is sent, and all that is saved, is the leader's.
_ANYBODYS: Final = (m.SendAttached, m.SendResync, m.SendAck)
_LEADERS: Final = (*(set(get_args(m.Send)) - set(_ANYBODYS)), *get_args(m.Save))


_NOTHING: Final = Saved()


class MasterState:
    """The rooms, composed: what nodes say and clients ask is answered from the directory, orders are confirmed.

    Data walks from ``membership`` (who is here) and ``intake`` (what they have) into ``directory``, ``placement`` and
    ``replication``; ``questions`` reads them.
    """

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
        #: The directory's changes, for those who follow it.
        self.index = IndexLog(self.directory, self.namespaces, lambda: self.membership.slot_facts)
        self.membership.rerouted = self.index.rerouted
        #: What nodes say, for a publisher of KV events.
        self.pool_log = PoolLog()
        self.membership.lost = lambda node_id: self.pool_log.append(NodeCleared(node_id))
        self.clearing = Clearing(
            self.directory, self.namespaces, self.membership.nodes, self.tombstones, self.chronicle, self._emit
        )
        self.clearing.cleared = lambda group, salt: self.pool_log.append(ScopeCleared(group, salt))
        self.membership.attached = self.clearing.attached
        self.membership.resumable = lambda node_id: not self.clearing.scopes.held(node_id)
        naming = self._naming = Naming(self.namespaces, self.clearing, self._emit)
        self.removals = Removals(
            self.directory, naming, self.membership.nodes, self.tombstones, self.chronicle, self._emit
        )
        self.replication = Replication(
            self.directory,
            self.namespaces,
            self.membership,
            self.standing,
            naming.scope,
            self.tombstones.take_number,
            lambda node, reason, now: self._intake.start_over(node, reason, now),
            self._emit,
            now,
        )
        self._intake = Intake(
            self.directory,
            self.namespaces,
            naming,
            self.membership,
            self.clearing,
            self.removals,
            self.placement,
            self.replication,
            self.orphans,
            self.chronicle,
            self.counts,
            self.standing,
            self.pool_log,
            self._emit,
        )
        self.questions = Questions(
            self.directory,
            self.namespaces,
            naming,
            self.membership,
            self.placement,
            self.replication,
            self.chronicle,
            self.counts,
            self.standing,
        )
        self.membership.restore(saved.nodes, now, grace_s)
        self.replication.load(saved.replicas, saved.nodes)
        for group in saved.groups:
            self.namespaces.restore(group.namespace, group.epoch)
        if self.leading:
            self.restore_orders(saved, now)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Attach: self._attach,
            m.SnapshotPart: self._intake.snapshot_part,
            m.DeltaBatch: self._intake.delta,
            m.CommandDone: self._command_done,
            m.CopyDone: self._spoken(self.replication.copy_done),
            m.Offer: self._spoken(self.replication.offered),
            m.Leaving: self._spoken(self.replication.leavers.stopping),
            m.StatusReport: self.membership.status,
            m.Detach: self.membership.detach,
            m.LinkLost: self.membership.link_lost,
            m.Heartbeat: self.membership.heartbeat,
            m.MissReport: self.questions.miss,
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
        self.clearing.told(event.facts.node_id, event.epochs, now)
        self.membership.attach(event, now)

    def _tick(self, event: m.Tick, now: float) -> None:
        self.membership.tick(event, now)
        self.directory.turn(now)
        self.index.turn(now)
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

    # ------------------------------------------------------------------ what clients change

    def open_namespace(self, namespace: Namespace, by: str = "") -> tuple[Opened, list[m.Command]]:
        """Register and name a namespace. Raises as :meth:`Namespaces.register`."""
        self._naming.register(namespace, by)
        return self.namespaces.open(namespace, by), self._take_out()

    def remove(self, namespace: Namespace, salt: str, hashes: bytes, now: float) -> tuple[Removal, list[m.Command]]:
        """Remove blocks of one shard everywhere: see :meth:`Removals.order`."""
        return self.removals.order(namespace, salt, hashes, now), self._take_out()

    # ------------------------------------------------------------------ what operators order

    def bump(self, group: str, now: float) -> tuple[Cleared, list[m.Command]]:
        """Begin the next weight epoch of a group: see :meth:`Clearing.bump`."""
        return self.clearing.bump(group, now), self._take_out()

    def drop(self, group: str, salt: str | None, erase: bool, now: float) -> tuple[Cleared, list[m.Command]]:
        """Forget a tenant, a namespace, or both: see :meth:`Clearing.drop`."""
        return self.clearing.drop(group, salt, erase, now), self._take_out()

    def remove_node(self, node_id: str, force: bool, now: float) -> list[m.Command]:
        """Take a node off the roster: see :meth:`Leavers.remove`. Nothing waits for it any more."""
        self.replication.leavers.remove(node_id, now, force=force)
        self.removals.forget(node_id)
        self.clearing.forget(node_id)
        return self._take_out()

    # ------------------------------------------------------------------ what nodes confirm

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
        if self.clearing.done(node, event.command, event.error):
            self._intake.start_over(node, "what it said of a dropped scope was held back", now)
        if event.error:
            self.counts["failed_commands"] += 1
            fields = {"node_id": node.node_id, "command": event.command, "reason": event.error}
            self._emit(m.Report("node could not do as told", fields))
            return
        self.removals.confirmed(node.node_id, event.command)

    def _spoken(self, hear: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
        """What a node says counts while its session does."""

        def heard(event: Any, now: float) -> None:
            if self.membership.speaker(event.session, now) is not None:
                hear(event, now)

        return heard

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
        self.index.check()
        self.pool_log.check()
        self.namespaces.check()
        self.membership.check()
        self.placement.check()
        self.tombstones.check()
        self.questions.requests.check()
        self.clearing.scopes.check()
        self.orphans.check()
        self.quotas.check()
        self.replication.check()
        self.standing.check()
        assert not self._out
