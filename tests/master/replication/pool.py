"""A master's state and model nodes that obey it: they copy, let go, and offer what they have, over ordered streams."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.replication.drains import Drain
from kvstrata.master.saved import Saved
from kvstrata.master.state import MasterState
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, CopyReason, Departure, Tier

BLOCK = 1 << 10
NS = Namespace("model", block_bytes=BLOCK, block_tokens=4)
LONG = Namespace("long", block_bytes=BLOCK, block_tokens=4, hash_bytes=32)
SALT = "tenant"


def one(number: int, namespace: Namespace = NS) -> bytes:
    """A hash; of longer ones the ends differ too, so that a fold cannot stand for them."""
    rng = random.Random(number)
    return number.to_bytes(8, "big") + rng.randbytes(namespace.hash_bytes - 8)


@dataclass(eq=False)
class ModelNode:
    """Blocks by (namespace, salt, hash), least recently stored first; ``blocks_max`` of them in each tier."""

    node_id: str
    blocks_max: int = 64
    ssd_max: int = 0
    boot_id: str = ""
    incarnation: int = 1
    seq: int = 0
    session: int = 0
    alive: bool = False
    draining: int = 0  #: the drain's command
    drained: str | None = None
    fails: bool = False  #: every copy comes to nothing
    status: BlockStatus = BlockStatus.NODE_LOST  #: what failed copies end in
    deaf: bool = False  #: it lets go of nothing
    mute: bool = False  #: copies are not answered
    dram: OrderedDict[tuple[Namespace, str, bytes], int] = field(default_factory=OrderedDict)
    ssd: OrderedDict[tuple[Namespace, str, bytes], int] = field(default_factory=OrderedDict)
    wire: list[m.Event] = field(default_factory=list)
    inbox: list[m.Command] = field(default_factory=list)
    copied: int = 0
    bytes_out: int = 0

    def tier(self, tier: int) -> OrderedDict[tuple[Namespace, str, bytes], int]:
        return self.ssd if tier == Tier.SSD else self.dram

    def say(self, added: bool, key: tuple[Namespace, str, bytes], tier: int, epoch: int, why: int = 0) -> None:
        self.seq += 1
        change = m.Change(added, key[0], key[1], tier, key[2], epoch, why)
        self.wire.append(m.DeltaBatch(self.session, self.seq, (change,)))

    def store(self, key: tuple[Namespace, str, bytes], tier: int = Tier.DRAM, epoch: int = 0) -> None:
        held, most = self.tier(tier), self.ssd_max if tier == Tier.SSD else self.blocks_max
        if key in held or not most:
            return
        while len(held) >= most:
            old, of = held.popitem(last=False)
            self.say(False, old, tier, of, Departure.ROOM)
        held[key] = epoch
        self.say(True, key, tier, epoch)

    def lose(self, key: tuple[Namespace, str, bytes], why: Departure = Departure.ROOM) -> None:
        for tier in (Tier.DRAM, Tier.SSD):
            if key in self.tier(tier):
                self.say(False, key, tier, self.tier(tier).pop(key), why)

    def snapshot(self) -> None:
        parts = [
            m.Holding(namespace, salt, int(tier), digest, epoch)
            for tier in (Tier.DRAM, Tier.SSD)
            for (namespace, salt, digest), epoch in self.tier(tier).items()
        ]
        self.wire.append(m.SnapshotPart(self.session, self.seq, tuple(parts), True, True))

    def usage(self) -> m.NodeUsage:
        return m.NodeUsage(
            dram_bytes_used=len(self.dram) * BLOCK,
            dram_bytes_free=(self.blocks_max - len(self.dram)) * BLOCK,
            ssd_bytes_free=(self.ssd_max - len(self.ssd)) * BLOCK,
            bytes_out=self.bytes_out,
        )


class Pool:
    """Everything that the master orders is checked as it is ordered."""

    def __init__(self, saved: Saved = Saved(), seed: int = 1) -> None:  # noqa: B008
        self.now = 100.0
        self.state = MasterState(self.now, random.Random(seed), saved)
        self.nodes: dict[str, ModelNode] = {}
        self.commands: list[m.Command] = []
        self.rows: dict[object, m.Save] = {}

    # ------------------------------------------------------------------ events

    def tell(self, event: m.Event) -> None:
        self.take(self.state.handle(event, self.now))

    def take(self, commands: list[m.Command]) -> None:
        for command in commands:
            self.commands.append(command)
            if isinstance(command, m.SaveNode):
                self.rows[command.node_id] = command
            elif isinstance(command, m.SaveReplicas):
                self.rows[command.group, command.salt] = command
            elif isinstance(command, m.SaveGroup):
                self.rows[command.namespace.group, "group"] = command
            session = getattr(command, "session", 0)
            for node in self.nodes.values():
                if node.session == session and node.alive:
                    node.inbox.append(command)
            if isinstance(command, m.SendCopy):
                self.on_copy(command)
            elif isinstance(command, m.SendSurplus):
                self.on_surplus(command)

    def on_copy(self, order: m.SendCopy) -> None:
        """No copy onto a holder, as the directory knows it, nor onto a node that is to leave, nor from nowhere."""
        target = self.node_of(order.session)
        assert target is not None, "a copy for nobody"
        known = self.state.nodes.get(target.node_id)
        assert known is not None and not known.leaving
        assert order.source.node_id != target.node_id
        for digest in self.digests(order.namespace, order.hashes):
            holders = self.holders((order.namespace, order.salt, digest))
            assert target.node_id not in holders, "a copy onto a holder"
            assert order.source.node_id in holders, "a copy from a node that has none"
        assert len(self.open_copies(target.node_id)) <= 8

    def on_surplus(self, order: m.SendSurplus) -> None:
        """Never below what is wanted, on nodes that are active and stay."""
        loser = self.node_of(order.session)
        assert loser is not None
        wanted = self.state.replication.rules.wanted(order.namespace.group, order.salt)
        for digest in self.digests(order.namespace, order.hashes):
            stay = [
                name
                for name in self.holders((order.namespace, order.salt, digest)) - {loser.node_id}
                if (known := self.state.nodes.get(name)) is not None
                and known.state.value == "active"
                and not known.leaving
            ]
            assert len(stay) >= wanted, "the last replicas are let go"

    def node_of(self, session: int) -> ModelNode | None:
        return next((node for node in self.nodes.values() if node.session == session), None)

    @staticmethod
    def digests(namespace: Namespace, packed: bytes) -> list[bytes]:
        width = namespace.hash_bytes
        return [packed[start : start + width] for start in range(0, len(packed), width)]

    def open_copies(self, node_id: str) -> range:
        return range(self.state.replication.copies.commands_to(node_id))

    def holders(self, key: tuple[Namespace, str, bytes]) -> set[str]:
        """As the directory knows it."""
        namespace, salt, digest = key
        group = self.state.namespaces.find(namespace)
        if group is None:
            return set()
        keys = fold(digest, namespace.hash_bytes)
        set_id = int(self.state.directory.living_ids(TableKey(group.number, namespace.shard, salt), keys)[0])
        names = (self.state.membership.name_of(slot) for slot, _ in self.state.directory.holders_of(set_id))
        return {name for name in names if name}

    # ------------------------------------------------------------------ nodes

    def up(self, node_id: str, blocks_max: int = 64, ssd_max: int = 0, boot_id: str = "") -> ModelNode:
        node = self.nodes.get(node_id)
        if node is None:
            node = self.nodes[node_id] = ModelNode(node_id, blocks_max, ssd_max, boot_id or node_id)
        self.attach(node)
        return node

    def attach(self, node: ModelNode) -> None:
        """A new stream of the node, with a snapshot."""
        node.wire.clear()
        node.inbox.clear()
        facts = m.NodeFacts(
            node.node_id,
            node.incarnation,
            channel="x:1",
            boot_id=node.boot_id,
            dram_bytes=node.blocks_max * BLOCK,
            ssd_bytes=node.ssd_max * BLOCK,
        )
        commands = self.state.handle(m.Attach(facts), self.now)
        attached = [command for command in commands if isinstance(command, m.SendAttached)]
        node.session, node.alive, node.draining = attached[0].session if attached else 0, bool(attached), 0
        self.take(commands)
        self.state.check()
        if node.alive:
            node.snapshot()
            self.deliver(node)
            self.tell(m.StatusReport(node.session, node.usage()))

    def kill(self, node: ModelNode, *, ssd_too: bool = False) -> None:
        """Its process dies, and its sidecar says so: memory is lost, SSD is not."""
        node.alive = False
        node.wire.clear()
        node.inbox.clear()
        node.dram.clear()
        if ssd_too:
            node.ssd.clear()
        self.tell(m.LinkLost(node.session))
        self.tell(m.Heartbeat(node.node_id, node.incarnation, dying=True))

    def restart(self, node: ModelNode) -> None:
        node.incarnation += 1
        node.seq = 0
        self.attach(node)

    def deliver(self, node: ModelNode, most: int = 1 << 30) -> None:
        for _ in range(min(most, len(node.wire))):
            self.tell(node.wire.pop(0))

    def obey(self, node: ModelNode) -> None:
        """Do all that was heard."""
        while node.inbox and node.alive:
            order = node.inbox.pop(0)
            if isinstance(order, m.SendCopy) and not node.mute:
                self.copy(node, order)
            elif isinstance(order, m.SendSurplus) and not node.deaf:
                for digest in self.digests(order.namespace, order.hashes):
                    node.lose((order.namespace, order.salt, digest), Departure.SURPLUS)
            elif isinstance(order, m.SendDrain):
                node.draining = 0 if order.cancel else order.command
                if not order.cancel:
                    self.offer(node)
            elif isinstance(order, m.SendDrained) and order.command == node.draining:
                node.drained = order.problem
            elif isinstance(order, m.SendResync):
                node.snapshot()
            elif isinstance(order, m.SendEpoch | m.SendDrop) and order.command:
                node.wire.append(m.CommandDone(node.session, order.command))

    def copy(self, node: ModelNode, order: m.SendCopy) -> None:
        source = self.nodes[order.source.node_id]
        status = []
        for digest in self.digests(order.namespace, order.hashes):
            key = (order.namespace, order.salt, digest)
            if node.fails or not source.alive:
                status.append(node.status)
            elif node.draining:
                status.append(BlockStatus.REFUSED)
            elif not (key in source.dram or key in source.ssd):
                status.append(BlockStatus.MISSING)
            else:
                node.store(key, order.tier, order.epoch)
                node.copied += 1
                status.append(BlockStatus.STORED)
        node.wire.append(m.CopyDone(node.session, order.command, bytes(status), len(status) * BLOCK))

    def offer(self, node: ModelNode) -> None:
        """Most recently stored first, memory before SSD."""
        held = [
            (tier, key, epoch) for tier in (Tier.DRAM, Tier.SSD) for key, epoch in reversed(node.tier(tier).items())
        ]
        total = len(held) * BLOCK
        for tier, key, epoch in held:
            holding = m.Holding(key[0], key[1], int(tier), key[2], epoch)
            node.wire.append(m.Offer(node.session, node.draining, (holding,), False, total))
        node.wire.append(m.Offer(node.session, node.draining, (), True, total))

    # ------------------------------------------------------------------ time

    def step(self, seconds: float = 0.25) -> None:
        """A tick; nodes that live say so, do what they were told, and are heard."""
        self.now += seconds
        for node in self.nodes.values():
            if node.alive:
                self.tell(m.Heartbeat(node.node_id, node.incarnation))
                self.tell(m.StatusReport(node.session, node.usage()))
        self.tell(m.Tick())
        for node in list(self.nodes.values()):
            self.obey(node)
            if node.alive:
                self.deliver(node)
        self.state.check()

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.step()

    def until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        """Step until ``done()``; fails after so much time."""
        for _ in range(int(seconds * 4)):
            if done():
                return
            self.step()
        assert done(), f"not within {seconds} s"

    # ------------------------------------------------------------------ asking

    def replicas(self, count: int, group: str = "", salt: str | None = None) -> None:
        self.state.replication.set_rule(group, salt, count)
        self.take(self.state.taken())

    def drain(self, node_id: str, budget_s: float = 0.0) -> None:
        self.state.replication.leavers.drain(node_id, budget_s, self.now)
        self.take(self.state.taken())

    def drain_of(self, node_id: str) -> Drain:
        found = self.state.replication.drains.of(node_id)
        assert found is not None
        return found

    def ask(self, *numbers: int, namespace: Namespace = NS) -> None:
        opened, commands = self.state.open_namespace(namespace)
        self.take(commands)
        self.state.questions.asked(opened, SALT, b"".join(one(number, namespace) for number in numbers), self.now)

    def have(self, number: int, namespace: Namespace = NS) -> int:
        """Nodes that live and really have a block."""
        key = (namespace, SALT, one(number, namespace))
        return sum(node.alive and (key in node.dram or key in node.ssd) for node in self.nodes.values())

    def store(self, node_id: str, *numbers: int, namespace: Namespace = NS, tier: int = Tier.DRAM) -> None:
        epoch = self.epoch(namespace)
        for number in numbers:
            self.nodes[node_id].store((namespace, SALT, one(number, namespace)), tier, epoch)

    def epoch(self, namespace: Namespace) -> int:
        """The weight epoch that stores are of now."""
        group = self.state.namespaces.find(namespace)
        return 0 if group is None else group.epoch

    def saved(self) -> Saved:
        """What a store would have kept."""
        rows = list(self.rows.values())
        return Saved(
            nodes=tuple(row for row in rows if isinstance(row, m.SaveNode) and not row.removed),
            groups=tuple(row for row in rows if isinstance(row, m.SaveGroup)),
            replicas=tuple(row for row in rows if isinstance(row, m.SaveReplicas) and row.count),
        )

    def ordered(self, kind: type) -> list[m.Command]:
        return [command for command in self.commands if isinstance(command, kind)]

    def reasons(self) -> set[CopyReason]:
        return {CopyReason(order.reason) for order in self.ordered(m.SendCopy)}
