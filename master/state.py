"""The master's state: what happened goes in, what to do comes out. No clock, no socket, no file.

``handle(event, now)`` returns commands; ``lookup`` and ``place`` answer at once. The owner calls all of
it under one lock and passes monotonic time in.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstrata.master import messages as m
from kvstrata.master.attachment import Attachment, Outcome
from kvstrata.master.chronicle import Chronicle, Line
from kvstrata.master.directory import Directory, Found, TableKey
from kvstrata.master.liveness import NodeState, Pulse
from kvstrata.master.namespaces import Namespaces, Opened
from kvstrata.master.nodes import Node, Nodes
from kvstrata.master.placement import Placed, Placement
from kvstrata.master.table import Keys, fold
from kvstrata.master.tombstones import Tombstones
from kvstrata.proto.errors import Busy, FingerprintMismatch
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState

#: Ticks further apart than this mean that the master itself stood still.
PAUSE_S: Final = 1.0
#: A miss report hides a replica for at most this many deltas to come, whatever it claims.
DELTA_LAG_MAX: Final = 4096
NODES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Saved:
    """What was durable when the master started."""

    nodes: tuple[m.SaveNode, ...] = ()
    groups: tuple[m.SaveGroup, ...] = ()
    tombstones: tuple[m.SaveTombstone, ...] = ()
    last_command: int = 0


@dataclass(frozen=True, slots=True)
class LookedUp:
    """``not_yet``: something is missing that a node which has not come back yet may hold."""

    found: Found
    not_yet: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """``removed`` blocks were known; ``awaited`` nodes are attached and have been told."""

    command: int
    removed: int
    awaited: frozenset[str]


class MasterState:
    """Directory, liveness, placement, namespaces, roster and removals, composed."""

    def __init__(self, now: float, rng: random.Random, saved: Saved = Saved(), grace_s: float = 5.0) -> None:
        self.directory = Directory()
        self.namespaces = Namespaces()
        self.nodes = Nodes()
        self.placement = Placement(rng)
        self.tombstones = Tombstones()
        self.chronicle = Chronicle()
        self.counts: Counter[str] = Counter()
        self.slot_facts: dict[int, m.NodeFacts] = {}
        self._out: list[m.Command] = []
        self._grace_ends = now + grace_s
        self._last_tick = now
        self._session = rng.getrandbits(31) << 32
        for node in saved.nodes:
            self.nodes.restore(node)
        for group in saved.groups:
            self.namespaces.restore(group.namespace, group.epoch)
        for stone in saved.tombstones:
            self.tombstones.restore(stone)
        self.tombstones.start_after(saved.last_command)
        self._awaited = {node.node_id for node in saved.nodes if not node.gone}
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Attach: self._attach,
            m.SnapshotPart: self._snapshot_part,
            m.DeltaBatch: self._delta,
            m.CommandDone: self._command_done,
            m.StatusReport: self._status,
            m.Detach: self._detach,
            m.LinkLost: self._link_lost,
            m.Heartbeat: self._heartbeat,
            m.MissReport: self._miss,
            m.Tick: self._tick,
        }

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take an event in; returns what to do, in order."""
        self._handlers[type(event)](event, now)
        return self._take_out()

    def _take_out(self) -> list[m.Command]:
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ attach and detach

    def _attach(self, event: m.Attach, now: float) -> None:
        facts = event.facts
        self._session += 1
        session = self._session
        if self.nodes.get(facts.node_id) is None and len(self.nodes) >= NODES_MAX:
            self._out.append(m.CloseSession(session, f"{NODES_MAX} nodes are known, which is the bound"))
            return
        node = self.nodes.get_or_add(facts.node_id)
        current = node.attachment
        if current is not None and facts.incarnation < current.facts.incarnation and node.linked:
            reason = f"incarnation {facts.incarnation} is older than {current.facts.incarnation}, which is attached"
            self._out.append(m.CloseSession(session, reason))
            return
        same = current is not None and current.facts.incarnation == facts.incarnation
        attachment = Attachment(session, facts, current if same else None)
        if current is not None:
            self._out.append(m.CloseSession(current.session, "the node attached again"))
            current.release(self.directory)
        self.nodes.bind(node, attachment)
        node.pulse = Pulse.starting(now)
        if not same:
            node.usage, node.active_since, node.placed_bytes = None, None, 0
        self._enroll(node, facts)
        epochs = tuple((group.name, group.epoch) for group in self.namespaces.groups if group.epoch)
        self._out.append(m.SendAttached(session, epochs))
        for stone in self.tombstones.waiting_for(node.node_id):
            self._out.append(m.SendRemove(session, stone.command, stone.namespace, stone.salt, stone.hashes))
        self.chronicle.note(now, "attached again" if same else "attached", node.node_id)
        self._judge(node, now)

    def _enroll(self, node: Node, facts: m.NodeFacts) -> None:
        before = node.saved()
        known = node.facts is not None
        node.facts, node.gone = facts, False
        node.dram_bytes, node.ssd_bytes = facts.dram_bytes, facts.ssd_bytes
        if not known or node.saved() != before:
            self._out.append(node.saved())

    def _detach(self, event: m.Detach, now: float) -> None:
        node = self.nodes.of_session(event.session)
        if node is None:
            return
        node.gone = True
        self._awaited.discard(node.node_id)
        self._out.append(node.saved())
        self._leave(node, now, f"detached: {event.reason}")

    def _link_lost(self, event: m.LinkLost, now: float) -> None:
        node = self.nodes.of_session(event.session)
        if node is not None and node.pulse is not None and node.pulse.link_lost_at is None:
            node.pulse.link_lost_at = now

    def _leave(self, node: Node, now: float, reason: str) -> None:
        """Its replicas leave the directory; whatever it says on its stream is ignored from now on."""
        assert node.attachment is not None
        attachment = node.attachment
        attachment.release(self.directory)
        self.nodes.unbind(node)
        node.pulse = node.usage = node.active_since = None
        self._out.append(m.CloseSession(attachment.session, reason))
        self.chronicle.note(now, f"offline: {reason}", node.node_id)
        self._enter(node, NodeState.OFFLINE, reason)

    # ------------------------------------------------------------------ inventory

    def _snapshot_part(self, event: m.SnapshotPart, now: float) -> None:
        node = self._speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            self._outcome(node, node.attachment.snapshot(event, self.directory, locate), now)

    def _delta(self, event: m.DeltaBatch, now: float) -> None:
        node = self._speaker(event.session, now)
        if node is not None and node.attachment is not None:
            locate = self._locator(node, now)
            self._outcome(node, node.attachment.delta(event, self.directory, locate), now)

    def _speaker(self, session: int, now: float) -> Node | None:
        node = self.nodes.of_session(session)
        if node is None or node.pulse is None:
            self.counts["events_of_ended_sessions"] += 1
            return None
        node.pulse.spoke(now)
        return node

    def _outcome(self, node: Node, outcome: Outcome, now: float) -> None:
        attachment = node.attachment
        assert attachment is not None
        self.counts[f"sync_{outcome.name.lower()}"] += 1
        if outcome is Outcome.GAP:
            self._out.append(m.SendResync(attachment.session, attachment.gap))
            self._report("node asked for a new snapshot", node_id=node.node_id, reason=attachment.gap)
        elif outcome is Outcome.SWAPPED:
            assert attachment.slot is not None
            for stone in self.tombstones.waiting_for(node.node_id):
                table, keys = self._where(stone.namespace, stone.salt, stone.hashes)
                self.directory.remove_slot_blocks(attachment.slot, table, keys)
            self._awaited.discard(node.node_id)
            self._judge(node, now)
            self._reroute()
        if outcome in (Outcome.SWAPPED, Outcome.APPLIED, Outcome.IGNORED) and not attachment.loading:
            self._out.append(m.SendAck(attachment.session, attachment.applied_seq))

    def _locator(self, node: Node, now: float) -> Callable[[m.Holding | m.Change], tuple[TableKey, Keys] | None]:
        def locate(part: m.Holding | m.Change) -> tuple[TableKey, Keys] | None:
            try:
                self._register(part.namespace)
            except (FingerprintMismatch, Busy) as error:
                self.counts["refused_holdings"] += 1
                self._report(
                    "node holds blocks of a namespace that is refused", node_id=node.node_id, reason=str(error)
                )
                return None
            table, keys = self._where(part.namespace, part.salt, part.hashes)
            what = ("added" if part.added else "removed") if isinstance(part, m.Change) else "in snapshot"
            self.chronicle.note(now, what, node.node_id, table, keys)
            return table, keys

        return locate

    def _where(self, namespace: Namespace, salt: str, hashes: bytes) -> tuple[TableKey, Keys]:
        group, _ = self.namespaces.register(namespace)
        return TableKey(group.number, namespace.shard, salt), fold(hashes, namespace.hash_bytes)

    def _register(self, namespace: Namespace) -> None:
        _, new = self.namespaces.register(namespace)
        if new:
            self._out.append(m.SaveGroup(namespace, epoch=0))

    # ------------------------------------------------------------------ life

    def _status(self, event: m.StatusReport, now: float) -> None:
        node = self._speaker(event.session, now)
        if node is not None:
            node.usage, node.placed_bytes = event.usage, 0
            self._judge(node, now)

    def _heartbeat(self, event: m.Heartbeat, now: float) -> None:
        node = self.nodes.get(event.node_id)
        if node is None or node.pulse is None or not self.knows(event.node_id, event.incarnation):
            return
        node.pulse.beat(now, event.progress_age_s, dying=event.dying)
        self._judge(node, now)

    def knows(self, node_id: str, incarnation: int) -> bool:
        """True while this incarnation of the node is attached."""
        node = self.nodes.get(node_id)
        return node is not None and node.attachment is not None and node.attachment.facts.incarnation == incarnation

    def _tick(self, event: m.Tick, now: float) -> None:
        pause = now - self._last_tick
        self._last_tick = now
        for node in self.nodes:
            if node.pulse is None:
                continue
            if pause > PAUSE_S:
                node.pulse.forgive(now, pause)
            self._judge(node, now)

    def _judge(self, node: Node, now: float) -> None:
        assert node.pulse is not None
        state = node.pulse.judge(now, synced=node.serving)
        if state is node.state:
            return
        if state is NodeState.OFFLINE:
            silence = f"silent for {node.pulse.silence_s(now):.1f} s"
            self._leave(node, now, "its process died" if node.pulse.dying else silence)
            return
        if state is NodeState.ACTIVE and node.active_since is None:
            node.active_since = now
        self.chronicle.note(now, state.value, node.node_id)
        self._enter(
            node,
            state,
            f"silent for {node.pulse.silence_s(now):.1f} s, no progress for {node.pulse.progress_age_s(now):.1f} s"
            if state is NodeState.SUSPECTED
            else "",
        )

    def _enter(self, node: Node, state: NodeState, reason: str) -> None:
        self._report("node state", node_id=node.node_id, state=state.value, was=node.state.value, reason=reason)
        node.state = state
        self._reroute()

    def _reroute(self) -> None:
        hosts: dict[int, str] = {}
        self.slot_facts = {}
        for node in self.nodes:
            attachment = node.attachment
            if node.state is NodeState.ACTIVE and attachment is not None and attachment.slot is not None:
                hosts[attachment.slot] = attachment.facts.boot_id
                self.slot_facts[attachment.slot] = attachment.facts
        self.directory.route(hosts)

    def _report(self, event: str, **fields: object) -> None:
        self._out.append(m.Report(event, fields))

    # ------------------------------------------------------------------ clients' questions

    def open_namespace(self, namespace: Namespace) -> tuple[Opened, list[m.Command]]:
        """Register and name a namespace. Raises :class:`FingerprintMismatch` or :class:`Busy`."""
        self._register(namespace)
        return self.namespaces.open(namespace), self._take_out()

    def lookup(self, namespace: Namespace, group: int, salt: str, keys: Keys, boot_id: str, now: float) -> LookedUp:
        """Where blocks are. Pins nothing, renews nothing."""
        found = self.directory.lookup(group, namespace.shard, namespace.shard_count, salt, keys, boot_id)
        return LookedUp(found, found.hit_blocks < len(keys) and self.recovering(now))

    def place(self, namespace: Namespace, group: int, salt: str, keys: Keys, boot_id: str, now: float) -> Placed:
        """Where to store blocks: there already, in flight, or a node."""
        present = self.directory.lookup(group, namespace.shard, 1, salt, keys, boot_id).codes
        active = {
            node.attachment.slot: node for node in self.nodes if node.state is NodeState.ACTIVE and node.attachment
        }
        candidates = [node.candidate(now) for node in active.values()]
        placed = self.placement.place(keys, _scope(group, namespace.shard, salt), present, candidates, boot_id, now)
        codes, blocks = np.unique(placed.codes[placed.states == PlaceState.NEW], return_counts=True)
        for code, count in zip(codes.tolist(), blocks.tolist(), strict=True):
            active[(code - 1) >> 2].placed_bytes += count * namespace.block_bytes
        return placed

    def recovering(self, now: float) -> bool:
        """True from the start until every rostered node is back, or the grace is over."""
        if self._awaited and now >= self._grace_ends:
            self._awaited.clear()
        return bool(self._awaited)

    def _miss(self, event: m.MissReport, now: float) -> None:
        opened = self.namespaces.by_handle(event.handle)
        node = self.nodes.get(event.node_id)
        if node is None or node.attachment is None or not self.knows(event.node_id, event.incarnation):
            return
        attachment = node.attachment
        if attachment.slot is None or event.delta_seq <= attachment.applied_seq:
            return
        table, keys = self._where(opened.namespace, event.salt, event.hashes)
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
            self._out.append(stone.saved())
        linked = [node for node in self.nodes if node.linked]
        for node in linked:
            assert node.attachment is not None
            self._out.append(m.SendRemove(node.attachment.session, stone.command, namespace, salt, hashes))
        return Removal(stone.command, removed, frozenset(node.node_id for node in linked)), self._take_out()

    def _command_done(self, event: m.CommandDone, now: float) -> None:
        node = self._speaker(event.session, now)
        if node is None:
            return
        if event.error:
            self.counts["failed_commands"] += 1
            self._report("node could not remove", node_id=node.node_id, command=event.command, reason=event.error)
            return
        stone = self.tombstones.confirm(event.command, node.node_id)
        if stone is not None:
            self._out.append(stone.saved())

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
        self.nodes.check()
        self.placement.check()
        self.tombstones.check()
        owned = sorted(_owned(self.nodes))
        assert owned == sorted(set(owned)), f"a slot with two owners: {owned}"
        assert set(self.slot_facts) <= set(owned)
        assert not self._out


def _owned(nodes: Iterable[Node]) -> list[int]:
    return [slot for node in nodes if node.attachment is not None for slot in node.attachment.slots]


def _scope(group: int, shard: int, salt: str) -> Keys:
    """What tells apart equal hashes of different tenants and shards: u64[1, 2]."""
    digest = hashlib.blake2b(f"{group}/{shard}/{salt}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").reshape(1, 2)
