"""Nodes come, go, lose blocks, fail copies, are drained, in any order: nothing is done that should not be.

Once nodes behave it settles, with as many replicas as are wanted.
What each order must keep is asserted where the pool hears it (:meth:`Pool.on_copy`, :meth:`Pool.on_surplus`).
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstrata.proto.status import BlockStatus, Tier
from tests.master.replication.pool import LONG, NS, SALT, Pool, one

NAMES = ("a", "b", "c", "d")
BLOCKS = range(12)


class Replicated(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), count=st.integers(1, 3))
    def begin(self, seed: int, count: int) -> None:
        self.pool = Pool(seed=seed)
        for name in NAMES[:3]:
            self.pool.up(name, blocks_max=64, ssd_max=64 if name != "c" else 0, boot_id="one" if name < "c" else name)
        self.pool.replicas(count)

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
        blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6),
        ssd=st.booleans(),
        long=st.booleans(),
    )
    def store(self, names: list[str], blocks: list[int], ssd: bool, long: bool) -> None:
        for name in names:
            node = self.pool.nodes.get(name)
            if node is not None and node.alive and not node.draining:
                tier = Tier.SSD if ssd else Tier.DRAM
                self.pool.store(name, *blocks, namespace=LONG if long else NS, tier=tier)
                self.pool.deliver(node)

    @rule(name=st.sampled_from(NAMES), block=st.sampled_from(BLOCKS), long=st.booleans())
    def evict(self, name: str, block: int, long: bool) -> None:
        namespace = LONG if long else NS
        node = self.pool.nodes.get(name)
        if node is not None and node.alive:
            node.lose((namespace, SALT, one(block, namespace)))

    @rule(name=st.sampled_from(NAMES), ssd_too=st.booleans())
    def kill(self, name: str, ssd_too: bool) -> None:
        node = self.pool.nodes.get(name)
        if node is not None and node.alive:
            self.pool.kill(node, ssd_too=ssd_too)

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        node = self.pool.nodes.get(name)
        if node is None:
            self.pool.up(name, ssd_max=64)
        elif not node.alive:
            self.pool.restart(node)

    @rule(name=st.sampled_from(NAMES))
    def stream_breaks(self, name: str) -> None:
        node = self.pool.nodes.get(name)
        if node is not None and node.alive:
            self.pool.attach(node)

    @rule(name=st.sampled_from(NAMES), fails=st.booleans(), mute=st.booleans(), status=st.sampled_from(BlockStatus))
    def behave(self, name: str, fails: bool, mute: bool, status: BlockStatus) -> None:
        node = self.pool.nodes.get(name)
        if node is not None:
            bad = BlockStatus.UNKNOWN if status in (BlockStatus.STORED, BlockStatus.ALREADY_PRESENT) else status
            node.fails, node.mute, node.status = fails, mute, bad

    @rule(name=st.sampled_from(NAMES), budget_s=st.sampled_from((0.0, 1.0, 20.0)))
    def drain(self, name: str, budget_s: float) -> None:
        if name in self.pool.nodes and self.pool.state.nodes.get(name) is not None:
            self.pool.drain(name, budget_s)

    @rule(name=st.sampled_from(NAMES))
    def undrain(self, name: str) -> None:
        if self.pool.state.nodes.get(name) is not None:
            self.pool.state.replication.leavers.undrain(name)
            self.pool.take(self.pool.state.taken())

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        node = self.pool.state.nodes.get(name)
        if node is not None and node.attachment is None:
            self.pool.take(self.pool.state.remove_node(name, False, self.pool.now))
            self.pool.nodes.pop(name)

    @rule(count=st.integers(1, 4), tenant=st.booleans())
    def want(self, count: int, tenant: bool) -> None:
        self.pool.replicas(count, salt=SALT if tenant else None)

    @rule()
    def bump(self) -> None:
        if self.pool.state.namespaces.find(NS) is not None:
            cleared, commands = self.pool.state.bump(NS.group, self.pool.now)
            assert cleared.epoch
            self.pool.take(commands)
            for node in self.pool.nodes.values():
                for held in (node.dram, node.ssd):
                    for key in [key for key in held if key[0] == NS]:
                        del held[key]
                node.wire.clear()
                if node.alive:
                    self.pool.attach(node)
            self.epoch = cleared.epoch

    @rule(ticks=st.sampled_from((1, 4, 4, 20, 160)))
    def wait(self, ticks: int) -> None:
        for _ in range(ticks):
            self.pool.step()

    @rule(long=st.booleans(), blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4))
    def ask(self, long: bool, blocks: list[int]) -> None:
        self.pool.ask(*blocks, namespace=LONG if long else NS)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule()
    def settle(self) -> None:
        """Once nodes behave: every block has as many replicas as are wanted and possible, and drains are over."""
        pool = self.pool
        for node in pool.nodes.values():
            node.fails = node.mute = False
        pool.until(self.settled, 400)

    def settled(self) -> bool:
        pool = self.pool
        replication = pool.state.replication
        alive = [node for node in pool.nodes.values() if node.alive]
        stay = {node.node_id for node in alive if not self.leaving(node.node_id)}
        keys = {key for node in alive for key in (*node.dram, *node.ssd)}
        for key in keys:
            holders = {node.node_id for node in alive if key in node.dram or key in node.ssd}
            wanted = min(replication.rules.wanted(key[0].group, key[1]), len(stay))
            if len(holders & stay) < (wanted if holders & stay else min(wanted, 1)):
                if not holders & stay:
                    drains = [replication.drains.of(name) for name in holders]
                    if any(drain is not None and drain.ended_at is not None for drain in drains):
                        continue  # out of time, or its tries were used up: left behind, and said so
                return False
            if len(holders & stay) > replication.rules.wanted(key[0].group, key[1]):
                return False
        drains = [replication.drains.of(node.node_id) for node in alive]
        return not len(replication.copies) and all(drain is None or drain.ended_at is not None for drain in drains)

    def leaving(self, name: str) -> bool:
        node = self.pool.state.nodes.get(name)
        return node is None or node.leaving


Replicated.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestReplicated = Replicated.TestCase


def storm(seed: int, steps: int) -> Pool:
    """The same rules by weight, so that there is always something to copy and to let go; ends settled."""
    rng = random.Random(seed)
    world = Replicated()
    world.begin(seed, rng.randint(1, 3))

    def name() -> str:
        return rng.choice(NAMES)

    actions = {
        lambda: world.store([name()], rng.choices(BLOCKS, k=6), rng.random() < 0.4, rng.random() < 0.3): 30,
        lambda: world.store([name(), name()], rng.choices(BLOCKS, k=4), False, False): 6,
        lambda: world.evict(name(), rng.choice(BLOCKS), rng.random() < 0.3): 12,
        lambda: world.kill(name(), rng.random() < 0.3): 4,
        lambda: world.start(name()): 8,
        lambda: world.stream_breaks(name()): 3,
        lambda: world.behave(name(), rng.random() < 0.3, rng.random() < 0.2, rng.choice(list(BlockStatus))): 6,
        lambda: world.drain(name(), rng.choice((0.0, 1.0, 20.0))): 3,
        lambda: world.undrain(name()): 4,
        lambda: world.remove(name()): 1,
        lambda: world.want(rng.randint(1, 4), rng.random() < 0.5): 3,
        lambda: world.bump(): 1,
        lambda: world.wait(rng.choice((1, 2, 4, 8, 20, 160))): 40,
        lambda: world.ask(rng.random() < 0.3, rng.choices(BLOCKS, k=3)): 4,
        lambda: world.settle(): 2,
    }
    for _ in range(steps):
        rng.choices(list(actions), weights=list(actions.values()))[0]()
        world.pool.state.check()
    world.settle()
    return world.pool


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_settles(seed: int) -> None:
    pool = storm(seed, 120)
    assert pool.state.replication.copies.blocks["stored"] > 5, "hardly anything was copied: this tests nothing"
