"""Nodes with real inventories over a network that loses, repeats and delays: the directory converges.

The nodes here are a model of the protocol's other end: numbered deltas, snapshots in parts with a cut,
restarts with a new incarnation. After every step the state's invariants hold; once a node's messages are
through, the directory says exactly what the node has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata.master import messages as m
from kvstrata.master.state import MasterState, Saved
from kvstrata.master.table import fold
from kvstrata.proto.keys import Namespace

NS = Namespace("g", block_bytes=64, block_tokens=4)
SALTS = ("", "t")
NAMES = ("a", "b", "c")
BLOCKS = range(12)


def one(block: int) -> bytes:
    return block.to_bytes(16, "little")


@dataclass
class ModelNode:
    """What a storage node keeps, and what it has sent that has not arrived."""

    node_id: str
    incarnation: int = 1
    seq: int = 0
    session: int = 0
    blocks: set[tuple[str, int]] = field(default_factory=set)
    wire: list[m.Event] = field(default_factory=list)

    def change(self, added: bool, salt: str, block: int) -> None:
        if added:
            self.blocks.add((salt, block))
        else:
            self.blocks.discard((salt, block))
        self.seq += 1
        self.wire.append(m.DeltaBatch(self.session, self.seq, (m.Change(added, NS, salt, 0, one(block)),)))

    def send_snapshot(self, parts: int) -> None:
        entries = sorted(self.blocks)
        for part in range(parts):
            holdings = tuple(m.Holding(NS, salt, 0, one(block)) for salt, block in entries[part::parts])
            self.wire.append(m.SnapshotPart(self.session, self.seq, holdings, part == 0, part == parts - 1))


class Cluster(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.now = 0.0
        self.state = MasterState(self.now, random.Random(seed))
        self.saved: dict[str, m.SaveNode] = {}
        self.nodes = {name: ModelNode(name) for name in NAMES}

    def tell(self, event: m.Event) -> None:
        for command in self.state.handle(event, self.now):
            if isinstance(command, m.SaveNode):
                self.saved[command.node_id] = command
            if isinstance(command, m.SendResync):
                for node in self.nodes.values():
                    if node.session == command.session:
                        node.send_snapshot(2)

    def deliver(self, node: ModelNode) -> None:
        self.tell(node.wire.pop(0))

    def attach(self, node: ModelNode) -> None:
        node.wire.clear()
        facts = m.NodeFacts(node.node_id, node.incarnation, channel="x:1", dram_bytes=1 << 20)
        commands = self.state.handle(m.Attach(facts), self.now)
        node.session = next(c.session for c in commands if isinstance(c, m.SendAttached))
        node.send_snapshot(3)

    @rule(name=st.sampled_from(NAMES), added=st.booleans(), salt=st.sampled_from(SALTS), block=st.sampled_from(BLOCKS))
    def change(self, name: str, added: bool, salt: str, block: int) -> None:
        self.nodes[name].change(added, salt, block)

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
        self.nodes[name] = fresh = ModelNode(name, node.incarnation + 1)
        self.attach(fresh)
        for event in old:  # what the dead process had sent may still arrive
            self.tell(event)

    @rule(name=st.sampled_from(NAMES), block=st.sampled_from(BLOCKS), ahead=st.integers(0, 3))
    def report_miss(self, name: str, block: int, ahead: int) -> None:
        node = self.nodes[name]
        opened, _ = self.state.open_namespace(NS)
        seq = node.seq + ahead
        self.tell(m.MissReport(opened.handle, "t", one(block), name, node.incarnation, seq))

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.tell(m.Heartbeat(name, self.nodes[name].incarnation, dying=True))

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(m.Tick())

    @rule()
    def master_restarts(self) -> None:
        saved = Saved(nodes=tuple(self.saved.values()), groups=(m.SaveGroup(NS, 0),))
        self.state = MasterState(self.now, random.Random(1), saved)

    @rule()
    def converge(self) -> None:
        """Everyone reconnects as it must, and speaks until it is heard."""
        for node in self.nodes.values():
            if not self.state.knows(node.node_id, node.incarnation):
                self.attach(node)
            node.change(True, "t", 0)
            for _ in range(4):  # a resync may follow on what is delivered, and miss reports reach 3 ahead
                node.change(True, "", 0)
                while node.wire:
                    self.deliver(node)
                self.tell(m.Heartbeat(node.node_id, node.incarnation))
        opened, _ = self.state.open_namespace(NS)
        for salt in SALTS:
            keys = fold(b"".join(map(one, BLOCKS)), 16)
            found = self.state.lookup(NS, opened.group.number, salt, keys, "", self.now)
            expected = [any((salt, block) in node.blocks for node in self.nodes.values()) for block in BLOCKS]
            assert found.found.present.tolist() == expected
            assert not found.not_yet
        for node in self.nodes.values():
            known = self.state.nodes.get(node.node_id)
            assert known is not None and known.attachment is not None and known.attachment.slot is not None
            assert self.state.directory.blocks_of(known.attachment.slot) == len(node.blocks)
            assert known.attachment.applied_seq == node.seq

    @invariant()
    def sound(self) -> None:
        self.state.check()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
