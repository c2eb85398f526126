"""Nodes with real inventories over a network that loses, repeats and delays: the directory converges.

The nodes here are a model of the protocol's other end: numbered deltas, snapshots in parts with a cut,
restarts with a new incarnation, weight epochs and drops that they hear of late. After every step the state's
invariants hold, and nothing is found that is older than a bump or a drop; once a node's messages are through,
the directory says exactly what the node has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master import messages as m
from kvstrata.master.saved import Saved
from kvstrata.master.state import MasterState
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace

NS = Namespace("g", block_bytes=64, block_tokens=4)
SALTS = ("", "t")
NAMES = ("a", "b", "c")
BLOCKS = range(12)


def one(block: int) -> bytes:
    return block.to_bytes(16, "little")


@dataclass
class ModelNode:
    """What a storage node keeps, what it has sent that has not arrived, and what it has not yet obeyed."""

    node_id: str
    incarnation: int = 1
    seq: int = 0
    session: int = 0
    epoch: int = 0
    blocks: set[tuple[str, int]] = field(default_factory=set)
    wire: list[m.Event] = field(default_factory=list)
    inbox: list[m.SendEpoch | m.SendDrop] = field(default_factory=list)

    def change(self, added: bool, salt: str, block: int) -> None:
        if added:
            self.blocks.add((salt, block))
        else:
            self.blocks.discard((salt, block))
        self.seq += 1
        self.wire.append(m.DeltaBatch(self.session, self.seq, (m.Change(added, NS, salt, 0, one(block), self.epoch),)))

    def send_snapshot(self, parts: int) -> None:
        entries = sorted(self.blocks)
        for part in range(parts):
            holdings = tuple(m.Holding(NS, salt, 0, one(block), self.epoch) for salt, block in entries[part::parts])
            self.wire.append(m.SnapshotPart(self.session, self.seq, holdings, part == 0, part == parts - 1))

    def learn(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self.blocks.clear()

    def obey(self) -> None:
        """Do what was heard first, and confirm it after all that was said before."""
        order = self.inbox.pop(0)
        if isinstance(order, m.SendEpoch):
            self.learn(order.epoch)
        else:
            self.blocks = {key for key in self.blocks if order.salt not in (None, key[0])}
        if order.command:
            self.wire.append(m.CommandDone(self.session, order.command))


class Cluster(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.now = 0.0
        self.state = MasterState(self.now, random.Random(seed))
        self.saved: dict[str, m.SaveNode] = {}
        self.group = m.SaveGroup(NS, 0)
        self.scopes: dict[int, m.SaveScope] = {}
        #: Blocks of before a bump or a drop, as (salt, block): found again only once they are stored again.
        self.gone: set[tuple[str, int]] = set()
        self.nodes = {name: ModelNode(name) for name in NAMES}

    def tell(self, event: m.Event) -> None:
        self.carry_out(self.state.handle(event, self.now))

    def carry_out(self, commands: list[m.Command]) -> None:
        for command in commands:
            if isinstance(command, m.SaveNode):
                self.saved[command.node_id] = command
            elif isinstance(command, m.SaveGroup):
                self.group = command
            elif isinstance(command, m.SaveScope):
                self.scopes[command.command] = command
            elif isinstance(command, m.SendResync | m.SendEpoch | m.SendDrop):
                for node in self.nodes.values():
                    if node.session == command.session:
                        self.hear(node, command)

    @staticmethod
    def hear(node: ModelNode, command: m.SendResync | m.SendEpoch | m.SendDrop) -> None:
        if isinstance(command, m.SendResync):
            node.send_snapshot(2)
        else:
            node.inbox.append(command)

    def deliver(self, node: ModelNode) -> None:
        self.tell(node.wire.pop(0))

    def attach(self, node: ModelNode) -> None:
        node.wire.clear()
        node.inbox.clear()
        facts = m.NodeFacts(node.node_id, node.incarnation, channel="x:1", dram_bytes=1 << 20, ssd_bytes=1 << 20)
        epochs = ((NS.group, node.epoch),) if node.epoch else ()
        commands = self.state.handle(m.Attach(facts, epochs=epochs), self.now)
        attached = next(c for c in commands if isinstance(c, m.SendAttached))
        node.session = attached.session
        self.carry_out(commands)
        node.learn(dict(attached.epochs).get(NS.group, 0))
        node.send_snapshot(3)

    @rule()
    def bump(self) -> None:
        self.state.open_namespace(NS)
        cleared, commands = self.state.bump(NS.group, self.now)
        self.carry_out(commands)
        self.gone = {(salt, block) for salt in SALTS for block in BLOCKS}
        assert cleared.epoch == self.group.epoch

    @rule(salt=st.sampled_from([*SALTS, None]))
    def drop(self, salt: str | None) -> None:
        _, commands = self.state.drop("", salt, False, self.now)
        self.carry_out(commands)
        self.gone |= {(each, block) for each in SALTS for block in BLOCKS if salt in (None, each)}

    @rule(name=st.sampled_from(NAMES))
    def obey(self, name: str) -> None:
        if self.nodes[name].inbox:
            self.nodes[name].obey()

    @rule(name=st.sampled_from(NAMES), added=st.booleans(), salt=st.sampled_from(SALTS), block=st.sampled_from(BLOCKS))
    def change(self, name: str, added: bool, salt: str, block: int) -> None:
        node = self.nodes[name]
        node.change(added, salt, block)
        if added and not node.inbox and node.epoch == self.group.epoch:
            self.gone.discard((salt, block))

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6))
    def arrive(self, name: str, count: int) -> None:
        node = self.nodes[name]
        for _ in range(min(count, len(node.wire))):
            self.deliver(node)

    @rule(name=st.sampled_from(NAMES), data=st.data(), fault=st.sampled_from(["lose", "repeat", "swap"]))
    def disturb(self, name: str, data: Any, fault: str) -> None:
        wire = self.nodes[name].wire
        if not wire:
            return
        at = data.draw(st.integers(0, len(wire) - 1))
        if fault == "lose" and isinstance(wire[at], m.DeltaBatch):
            del wire[at]
        elif fault == "repeat" and isinstance(wire[at], m.DeltaBatch):
            wire.insert(at, wire[at])
        elif fault == "swap" and at + 1 < len(wire):
            wire[at], wire[at + 1] = wire[at + 1], wire[at]

    @rule(name=st.sampled_from(NAMES))
    def reconnect(self, name: str) -> None:
        node = self.nodes[name]
        self.tell(m.LinkLost(node.session))
        self.attach(node)

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        node = self.nodes[name]
        old = list(node.wire)
        self.nodes[name] = fresh = ModelNode(name, node.incarnation + 1, epoch=node.epoch)
        self.attach(fresh)
        for event in old:  # what the dead process had sent may still arrive
            self.tell(event)

    @rule(name=st.sampled_from(NAMES), block=st.sampled_from(BLOCKS), ahead=st.integers(0, 3))
    def report_miss(self, name: str, block: int, ahead: int) -> None:
        node = self.nodes[name]
        opened, _ = self.state.open_namespace(NS)
        seq, epoch = node.seq + ahead, opened.group.epoch
        self.tell(m.MissReport(opened.handle, "t", one(block), name, node.incarnation, seq, epoch))

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.tell(m.Heartbeat(name, self.nodes[name].incarnation, dying=True))

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(m.Tick())

    @rule()
    def master_restarts(self) -> None:
        scopes = tuple(scope for scope in self.scopes.values() if scope.waiting)
        last = max(self.scopes, default=0)
        saved = Saved(tuple(self.saved.values()), (self.group,), last_command=last, scopes=scopes)
        self.state = MasterState(self.now, random.Random(1), saved)

    @rule()
    def converge(self) -> None:
        """Everyone reconnects as it must, and speaks until it is heard."""
        for node in self.nodes.values():
            if not self.state.membership.knows(node.node_id, node.incarnation):
                self.attach(node)
            node.change(True, "t", 0)
            for _ in range(4):  # a resync may follow on what is delivered, and miss reports reach 3 ahead
                node.change(True, "", 0)
                while node.wire or node.inbox:
                    if node.inbox:
                        node.obey()
                    if node.wire:
                        self.deliver(node)
                self.tell(m.Heartbeat(node.node_id, node.incarnation))
        opened, _ = self.state.open_namespace(NS)
        for salt in SALTS:
            keys = fold(b"".join(map(one, BLOCKS)), 16)
            found = self.state.questions.lookup(NS, opened.group.number, salt, keys, "", self.now)
            expected = [any((salt, block) in node.blocks for node in self.nodes.values()) for block in BLOCKS]
            assert found.found.present.tolist() == expected
            assert not found.not_yet
        for node in self.nodes.values():
            known = self.state.nodes.get(node.node_id)
            assert known is not None and known.attachment is not None and known.attachment.slot is not None
            assert self.state.directory.blocks_of(known.attachment.slot) == len(node.blocks)
            assert known.attachment.applied_seq == node.seq
        assert not [scope for scope in self.scopes.values() if scope.waiting], "everyone has confirmed everything"
        self.gone.clear()

    @invariant()
    def sound(self) -> None:
        self.state.check()
        if not self.gone:
            return
        opened, _ = self.state.open_namespace(NS)
        for salt in SALTS:
            keys = fold(b"".join(map(one, BLOCKS)), 16)
            found = self.state.questions.lookup(NS, opened.group.number, salt, keys, "", self.now).found
            stale = [block for block in np.flatnonzero(found.present).tolist() if (salt, block) in self.gone]
            assert not stale, f"of before a bump or a drop, and found: {stale}"


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
