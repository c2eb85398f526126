"""The master's choice among a block's replicas, and of where to store: what clients avoid, and who is busy."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.master import messages as m
from kvstrata.master.traffic import HALF_S, IDLE, Traffic, weights_of
from kvstrata.proto.status import PlaceState
from tests.master.world import NS, SALT, World, fold, hashes

MIB = 1 << 20


def named(world: World, *numbers: int, avoid: tuple[str, ...] = ()) -> list[str]:
    """The node that a lookup names for each block; "" for none."""
    answer = world.state.questions.lookup(
        NS, world.group(), SALT, fold(hashes(*numbers), 16), "", world.now, None, {(name, 1) for name in avoid}
    )
    facts = world.state.membership.slot_facts
    return [facts[(code - 1) >> 2].node_id if code else "" for code in answer.found.codes.tolist()]


def placed(world: World, *numbers: int, avoid: tuple[str, ...] = ()) -> tuple[set[str], set[int]]:
    """The nodes that blocks are placed on, and their states."""
    answer = world.state.questions.place(
        NS, world.group(), SALT, fold(hashes(*numbers), 16), "", world.now, None, {(name, 1) for name in avoid}
    )
    facts = world.state.membership.slot_facts
    return {facts[(code - 1) >> 2].node_id for code in answer.codes.tolist()}, set(answer.states.tolist())


def a_second(world: World, given_out: dict[int, int]) -> None:
    """One passes, after which each session's node reports what it has given out so far. Not checked: it is long."""
    world.now += 1
    for session, nbytes in given_out.items():
        world.state.handle(m.StatusReport(session, m.NodeUsage(bytes_out=nbytes)), world.now)
    world.state.handle(m.Tick(), world.now)


def test_another_replica_is_named_for_a_node_that_cannot_be_reached() -> None:
    world = World()
    world.up(1, 2, 3, node_id="a")
    world.up(2, 3, node_id="b")
    world.up(3, node_id="c")
    assert named(world, 1, 2, 3, avoid=("a",))[:2] == ["a", "b"], "the only one is named, avoided or not"
    assert named(world, 3, avoid=("a", "b")) == ["c"]
    assert named(world, 1, 9, avoid=("a", "nobody")) == ["a", ""]
    assert named(world, 2, avoid=("a", "b")) != [""], "with all of them avoided it is still there"


def test_a_node_that_was_started_again_is_not_the_one_that_could_not_be_reached() -> None:
    world = World()
    world.up(1, node_id="a", incarnation=2)
    world.up(1, node_id="b")
    a_only = {name for start in range(16) for name in named(world, 1, avoid=("b",))}
    assert a_only == {"a"}
    world.up(2, node_id="c", incarnation=2)
    assert {name for at in range(40) for name in placed(world, 100 + at, avoid=("a", "b", "c"))[0]} == {"a", "c"}


def test_a_writer_is_sent_elsewhere() -> None:
    world = World()
    world.up(1, node_id="a")
    world.up(node_id="b")
    assert all(placed(world, *range(at, at + 10), avoid=("a",))[0] == {"b"} for at in range(100, 400, 10))
    assert placed(world, 500, avoid=("a", "b"))[1] == {PlaceState.NEW}, "with all of them avoided one is tried"
    assert placed(world, 1, avoid=("a",)) == ({"a"}, {PlaceState.PRESENT})


def test_a_busy_node_serves_less_of_what_others_have_too() -> None:
    world = World()
    everything = range(16 * 64)
    sessions = {name: world.up(*everything, node_id=name) for name in ("a", "b")}
    assert named(world, *everything).count("a") == len(everything) / 2
    for second in range(1, 20):
        a_second(world, {sessions["a"]: second * 100 * MIB, sessions["b"]: 0})
    assert 0 < named(world, *everything).count("a") < len(everything) * 0.4
    for _ in range(40):
        a_second(world, {sessions["a"]: 19 * 100 * MIB, sessions["b"]: 0})
    world.state.check()
    assert named(world, *everything).count("a") == len(everything) / 2, "it has been idle for long"


def test_a_rate_follows_the_reports_and_fades_without() -> None:
    traffic = Traffic()
    for second in range(60):
        traffic.reported(second * 10 * MIB, float(second))
    assert traffic.rate(59.0) == pytest.approx(10 * MIB, rel=0.01)
    traffic.reported(5, 60.0)  # another start's count
    assert traffic.rate(60.0) == pytest.approx(10 * MIB, rel=0.01)
    traffic.reported(5, 60.0)
    assert traffic.rate(60.0 + 10 * HALF_S) < 0.1 * MIB
    assert np.isfinite(traffic.rate(1e9))


def test_weights_halve_at_the_mean_and_change_in_steps() -> None:
    assert weights_of({}) == {} and weights_of({1: 0.0, 2: IDLE / 100}) == {}
    even = weights_of({1: 100.0 * MIB, 2: 100.0 * MIB})
    assert even == {1: 0.5, 2: 0.5}
    assert weights_of({1: 101.0 * MIB, 2: 99.0 * MIB}) == even
    skewed = weights_of({1: 900.0 * MIB, 2: 0.0, 3: 0.0})
    assert skewed[1] < 0.3 and 2 not in skewed
