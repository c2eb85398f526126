"""Who is here: attach and detach, signs of life, the roster, and which inventories are routed to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.attachment import Attachment
from kvstrata.master.candidates import slot_mask
from kvstrata.master.content.chronicle import Chronicle
from kvstrata.master.content.tombstones import Tombstones
from kvstrata.master.directory.directory import Directory
from kvstrata.master.leadership.standing import Standing
from kvstrata.master.liveness import NodeState, Pulse
from kvstrata.master.namespaces import Namespaces
from kvstrata.master.nodes import Node, Nodes
from kvstrata.master.takers import Takers
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.master.traffic import weights_of
from kvstrata.proto.status import Tier

#: Ticks further apart than this mean that the master itself stood still.
PAUSE_S: Final = 1.0
NODES_MAX: Final = 4096
#: How often it is worked out how much each replica is to be read beside its equals.
WEIGH_S: Final = 1.0


class Membership:
    """Part of the master's state: takes the events that concern a node as a whole, gives commands to ``emit``."""

    def __init__(
        self,
        directory: Directory,
        namespaces: Namespaces,
        tombstones: Tombstones,
        chronicle: Chronicle,
        counts: Counter[str],
        emit: Callable[[m.Command], None],
        rng: random.Random,
        quotas: Quotas,
        standing: Standing,
    ) -> None:
        self.nodes = Nodes()
        #: Those that take new blocks.
        self.takers = Takers(self.nodes)
        #: Facts of the nodes that may be routed to, by directory slot, and the slots. Replaced whole, never changed.
        self.slot_facts: dict[int, m.NodeFacts] = {}
        self.routable = slot_mask(())
        #: Called when a node has attached and been told what every node is told first.
        self.attached: Callable[[Node], None] = lambda node: None
        #: Called when the nodes that may be routed to may have changed.
        self.rerouted: Callable[[], None] = lambda: None
        #: Called when what a node was known to have is forgotten.
        self.lost: Callable[[str], None] = lambda node_id: None
        #: Whether what a node said before is all there is to know, so that it may go on from there.
        self.resumable: Callable[[str], bool] = lambda node_id: True
        self._directory = directory
        self._namespaces = namespaces
        self._tombstones = tombstones
        self._chronicle = chronicle
        self._counts = counts
        self._emit = emit
        self.quotas = quotas  #: another one for each term as leader
        self._standing = standing
        self._session = rng.getrandbits(31) << 32
        self._awaited: set[str] = set()
        self._grace_ends = 0.0
        self._last_tick = 0.0
        self._weighed_at = 0.0

    def restore(self, roster: Iterable[m.SaveNode], now: float, grace_s: float) -> None:
        """Load the durable roster at start; its nodes are awaited for ``grace_s``."""
        for saved in roster:
            self.nodes.restore(saved)
            if not saved.gone:
                self._awaited.add(saved.node_id)
        self._grace_ends = now + grace_s
        self._last_tick = now

    def recovering(self, now: float) -> bool:
        """True from the start until every rostered node is back, or the grace is over."""
        if self._awaited and now >= self._grace_ends:
            self._awaited.clear()
        return bool(self._awaited)

    def speaker(self, session: int, now: float) -> Node | None:
        """The node whose stream says something; None when that session is over."""
        node = self.nodes.of_session(session)
        if node is None or node.pulse is None:
            self._counts["events_of_ended_sessions"] += 1
            return None
        node.pulse.spoke(now)
        return node

    def synced(self, node: Node, now: float) -> None:
        """A snapshot of the node has just been taken into service."""
        self._awaited.discard(node.node_id)
        self._judge(node, now)
        self._reroute()

    def name_of(self, slot: int) -> str:
        """The node whose inventory in service this directory slot is; "" for another slot."""
        names = (n.node_id for n in self.nodes if n.attachment is not None and n.attachment.slot == slot)
        return next(names, "")

    def slots_of(self, processes: Collection[m.Process]) -> frozenset[int]:
        """Directory slots of those of the nodes, in this very incarnation, that readers may be sent to."""
        if not processes:
            return frozenset()
        facts = self.slot_facts.items()
        return frozenset(slot for slot, fact in facts if (fact.node_id, fact.incarnation) in processes)

    def sole(self) -> int | None:
        """The directory slot of the node that takes new blocks, where the pool has no other, not even one that is away;
        else None."""
        slots = self.takers.lineup.slots
        if slots.size != 1 or (len(self.nodes) > 1 and sum(node.may_hold_blocks for node in self.nodes) > 1):
            return None
        only: int = slots.item(0)
        return only

    def active(self) -> dict[int, Node]:
        """Nodes that may be read from and written to, by directory slot."""
        return {
            node.attachment.slot: node
            for node in self.nodes
            if node.state is NodeState.ACTIVE and node.attachment is not None and node.attachment.slot is not None
        }

    # ------------------------------------------------------------------ attach and detach

    def attach(self, event: m.Attach, now: float) -> None:
        facts = event.facts
        self._session += 1
        session = self._session
        if self.nodes.get(facts.node_id) is None and len(self.nodes) >= NODES_MAX:
            self._emit(m.CloseSession(session, f"{NODES_MAX} nodes are known, which is the bound"))
            return
        node = self.nodes.get_or_add(facts.node_id)
        current = node.attachment
        if current is not None and facts.incarnation < current.facts.incarnation and node.linked:
            reason = f"incarnation {facts.incarnation} is older than {current.facts.incarnation}, which is attached"
            self._emit(m.CloseSession(session, reason))
            return
        same = current is not None and current.facts.incarnation == facts.incarnation
        resume = same and self.resumable(node.node_id)
        attachment = Attachment(session, facts, current if same else None, resume=resume)
        if current is not None:
            self._emit(m.CloseSession(current.session, "the node attached again"))
            current.release(self._directory)
        self.nodes.bind(node, attachment)
        node.pulse = Pulse.starting(now)
        if not same:
            node.usage, node.active_since, node.placed_bytes = None, None, 0
        self._enroll(node, facts)
        capacity = {Tier.DRAM: facts.dram_bytes, Tier.SSD: facts.ssd_bytes}
        leading = self._standing.leading
        shares = self.quotas.attached(node.node_id, session, capacity, event.shares, now) if leading else None
        epoch = self._standing.epoch if leading else self._standing.heard
        self._emit(m.SendAttached(session, self._namespaces.epochs, shares, leading, epoch, attachment.resume_seq))
        for stone in self._tombstones.waiting_for(node.node_id):
            self._emit(m.SendRemove(session, stone.command, stone.namespace, stone.salt, stone.hashes))
        self.attached(node)
        self._chronicle.note(now, "attached again" if same else "attached", node.node_id)
        self._judge(node, now)
        self._reroute()

    def _enroll(self, node: Node, facts: m.NodeFacts) -> None:
        before = node.saved()
        known = node.facts is not None
        node.facts, node.gone = facts, False
        node.dram_bytes, node.ssd_bytes = facts.dram_bytes, facts.ssd_bytes
        if not known or node.saved() != before:
            self._emit(node.saved())

    def detach(self, event: m.Detach, now: float) -> None:
        node = self.nodes.of_session(event.session)
        if node is None:
            return
        node.gone = True
        self._awaited.discard(node.node_id)
        self._emit(node.saved())
        self._leave(node, now, f"detached: {event.reason}")
        self.quotas.stopped(node.node_id, now)

    def link_lost(self, event: m.LinkLost, now: float) -> None:
        node = self.nodes.of_session(event.session)
        if node is not None and node.pulse is not None and node.pulse.link_lost_at is None:
            node.pulse.link_lost_at = now
            self.quotas.unlinked(node.node_id, now)

    def close_all(self, reason: str, now: float) -> None:
        """Every node is to attach again, and is told nothing until it has."""
        for node in self.nodes:
            if node.linked and node.attachment is not None:
                self._emit(m.CloseSession(node.attachment.session, reason))
                self.link_lost(m.LinkLost(node.attachment.session), now)

    def forget(self, node: Node, now: float) -> None:
        """What is known of an attached node's inventory may be wrong: it answers no more until a snapshot is here."""
        assert node.attachment is not None
        node.attachment.release(self._directory)
        self.lost(node.node_id)
        self._judge(node, now)
        self._reroute()

    def remove(self, node: Node, now: float) -> None:
        """Off the roster: what it was granted is free, and if it is here, its stream ends."""
        if node.attachment is not None:
            self._leave(node, now, "an operator took it off the roster")
        self._awaited.discard(node.node_id)
        self.nodes.remove(node)
        self.quotas.removed(node.node_id)
        self._emit(replace(node.saved(), removed=True))
        self._report("node removed", node_id=node.node_id)

    def _leave(self, node: Node, now: float, reason: str) -> None:
        """Its replicas leave the directory; whatever it says on its stream is ignored from now on."""
        assert node.attachment is not None
        attachment = node.attachment
        attachment.release(self._directory)
        self.lost(node.node_id)
        self.nodes.unbind(node)
        node.pulse = node.usage = node.active_since = None
        self.quotas.unlinked(node.node_id, now)
        self._emit(m.CloseSession(attachment.session, reason))
        self._chronicle.note(now, f"offline: {reason}", node.node_id)
        self._enter(node, NodeState.OFFLINE, reason)

    def leaves(self, node: Node, *, draining: bool | None = None, stopping: bool | None = None) -> None:
        """Whether an operator wants a node empty, and whether it has said that it will stop; None: as before."""
        node.draining = node.draining if draining is None else draining
        node.stopping = node.stopping if stopping is None else stopping
        self.takers.moved()

    # ------------------------------------------------------------------ life

    def status(self, event: m.StatusReport, now: float) -> None:
        node = self.speaker(event.session, now)
        if node is not None:
            self._standing.told(event.usage.leader_epoch, event.usage.leader_id)
            node.reported(event.usage)
            node.traffic.reported(event.usage.bytes_out, now)
            self.quotas.reported(node.node_id, event.session, event.usage, now)
            self._judge(node, now)

    def heartbeat(self, event: m.Heartbeat, now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is None or node.pulse is None or not self.knows(event.node_id, event.incarnation):
            return
        node.pulse.beat(now, event.progress_age_s, dying=event.dying)
        self._judge(node, now)

    def knows(self, node_id: str, incarnation: int) -> bool:
        """True while this incarnation of the node is attached."""
        node = self.nodes.get(node_id)
        return node is not None and node.attachment is not None and node.attachment.facts.incarnation == incarnation

    def tick(self, event: m.Tick, now: float) -> None:
        pause = now - self._last_tick
        self._last_tick = now
        for node in self.nodes:
            if node.pulse is None:
                continue
            if pause > PAUSE_S:
                node.pulse.forgive(now, pause)
            self._judge(node, now)
        if now - self._weighed_at >= WEIGH_S:
            self._weighed_at = now
            self._directory.weigh(weights_of({slot: node.traffic.rate(now) for slot, node in self.active().items()}))

    def _judge(self, node: Node, now: float) -> None:
        assert node.pulse is not None
        state = node.pulse.judge(now, synced=node.serving)
        if state is node.state:
            return
        if state is NodeState.OFFLINE:
            self._leave(node, now, node.pulse.doubt(now))
            return
        if state is NodeState.ACTIVE and node.active_since is None:
            node.active_since = now
        self._chronicle.note(now, state.value, node.node_id)
        self._enter(node, state, node.pulse.doubt(now))

    def _enter(self, node: Node, state: NodeState, reason: str) -> None:
        self._report("node state", node_id=node.node_id, state=state.value, was=node.state.value, reason=reason)
        node.state = state
        self._reroute()

    def _reroute(self) -> None:
        active = self.active()
        self.slot_facts = {slot: node.attachment.facts for slot, node in active.items() if node.attachment is not None}
        self.routable = slot_mask(self.slot_facts)
        self.takers.moved()
        self._directory.route({slot: facts.boot_id for slot, facts in self.slot_facts.items()})
        self.rerouted()

    def _report(self, event: str, **fields: object) -> None:
        self._emit(m.Report(event, fields))

    def check(self) -> None:
        """Assert that every slot has one owner and only live ones are routed to."""
        self.nodes.check()
        owned = [slot for node in self.nodes if node.attachment is not None for slot in node.attachment.slots]
        assert len(owned) == len(set(owned)), f"a slot with two owners: {sorted(owned)}"
        assert self.slot_facts == {slot: n.attachment.facts for slot, n in self.active().items() if n.attachment}
        assert np.flatnonzero(self.routable).tolist() == sorted(self.slot_facts)
        self.takers.check()
