"""What a story rests on: chance is the seed's, who leaves comes back, and what was had for a moment was had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from tests.sim.node_host import NodeHost
from tests.sim.oracle import Key, Violation
from tests.sim.plan import Action, NodePlan, Plan, chain, namespace, planned
from tests.sim.runner import run, scaled
from tests.sim.world import World

NODE = NodePlan(slabs=3, extents=0, policy=SsdPolicy.DEMOTE, host="host-0", last_words=False)
HASHES = chain("llama", 0, 2)


@pytest.fixture
def world() -> Iterator[World]:
    """Of two nodes, in which nothing happens of its own."""
    with scaled(1):
        yield World(Plan(seed=1, masters=1, clients=1, nodes=(NODE, NODE)))


def test_a_story_is_told_again_event_by_event() -> None:
    """Also those whose order a directory's secret decides."""
    one, other = (run(planned(5, 40)) for _ in range(2))
    assert not one.problem and (one.events, one.reads, one.hits, one.story) == (
        other.events, other.reads, other.hits, other.story,
    )  # fmt: skip


def test_a_node_that_stood_still_while_it_left_is_started_again() -> None:
    """It was to be gone and back by then, and ends only when it goes on."""
    leaves = Action(2.0, "leave node", "node-0", lasts=0.5, pick=0.9)
    stands = Action(2.1, "stop node", "node-0", lasts=14.0)
    later = Action(7.0, "load", "client-0", group="llama", salt="a", count=1)
    told = run(Plan(seed=1, masters=1, clients=1, nodes=(NODE, NODE), actions=(leaves, stands, later)))
    assert not told.problem, told.told()
    assert "node-0 is started again" in [words for _, words in told.story]


def _remove(node: NodeHost) -> None:
    assert node.state.remove(namespace("llama"), "a", HASHES, node.process.clock())


@pytest.mark.parametrize("loses", [NodeHost.kill, _remove, partial(NodeHost.leave, budget_s=0.0)])
def test_what_a_node_had_between_two_looks_it_had(world: World, loses: Callable[[NodeHost], None]) -> None:
    """A leader that tells another one to let a block go had heard of it, and not yet of its end."""
    scheduler, client = world.scheduler, world.clients["client-0"]
    scheduler.run_until(2.01)
    client.process.start(client.store(namespace("llama"), "a", HASHES, 0, False))
    keys = {Key("llama", "a", HASHES[:16]), Key("llama", "a", HASHES[16:])}
    scheduler.run_until(2.4)
    had, other = sorted(world.nodes.values(), key=lambda node: not world.checks.held(node))
    assert world.checks.held(had) == keys and not world.checks.held(other)
    loses(had)
    scheduler.run_until(2.75)
    assert not world.checks.held(had)
    world.checks.let_go(other, keys)
    world.checks.gone(other, keys)
    with pytest.raises(Violation, match="it was the last"):
        world.checks.let_go(had, keys)
