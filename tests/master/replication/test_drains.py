"""Nodes on their way out: what they have is elsewhere before they go, within a budget, whoever dies meanwhile."""

from __future__ import annotations

import pytest

from kvstrata.master import messages as m
from kvstrata.master.replication.drains import DrainState
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.status import BlockStatus, CopyReason, PlaceState, Tier
from tests.master.replication.pool import BLOCK, LONG, NS, SALT, Pool, one
from tests.master.replication.test_replication import pool_of


def over(pool: Pool, node_id: str) -> bool:
    return pool.drain_of(node_id).state is not DrainState.DRAINING


def test_a_drained_node_s_blocks_are_elsewhere_memory_and_ssd() -> None:
    pool = pool_of(nodes=3, replicas=1, ssd_max=64)
    pool.store("n0", *range(20))
    pool.store("n0", *range(100, 120), tier=Tier.SSD)
    pool.store("n0", *range(200, 210), namespace=LONG)
    pool.run(1)
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"))
    drain = pool.drain_of("n0")
    assert drain.state is DrainState.DRAINED
    assert (drain.bytes_moved, drain.bytes_failed, drain.bytes_total) == (50 * BLOCK, 0, 50 * BLOCK)
    pool.step()
    assert pool.nodes["n0"].drained == ""
    pool.kill(pool.nodes["n0"], ssd_too=True)
    assert all(pool.have(number) == 1 for number in (*range(20), *range(100, 120)))
    assert all(pool.have(number, LONG) == 1 for number in range(200, 210))
    assert sum(len(pool.nodes[name].ssd) for name in ("n1", "n2")) == 20
    assert pool.reasons() == {CopyReason.DRAIN}


def test_what_another_node_has_is_not_copied() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.replicas(1)
    pool.replicas(2)
    del pool.commands[:]
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"))
    orders = [order for order in pool.ordered(m.SendCopy) if isinstance(order, m.SendCopy)]
    assert not [order for order in orders if order.reason == CopyReason.DRAIN]
    assert pool.drain_of("n0").bytes_moved == 10 * BLOCK


def test_a_draining_node_gets_nothing_new() -> None:
    pool = pool_of(nodes=2, replicas=2)
    pool.drain("n0")
    pool.store("n1", *range(10))
    pool.run(10)
    assert not pool.nodes["n0"].dram
    opened, _ = pool.state.open_namespace(NS)
    import numpy as np

    from kvstrata.proto.folding import fold

    keys = fold(b"".join(one(number) for number in range(500, 600)), 16)
    placed = pool.state.questions.place(NS, opened.group.number, SALT, keys, "n0", pool.now)
    node = pool.state.nodes.get("n1")
    assert node is not None and node.attachment is not None and node.attachment.slot is not None
    assert (placed.states == PlaceState.NEW).all()
    assert (placed.codes == np.uint16(1 + 4 * node.attachment.slot)).all()


def test_the_hottest_go_first_and_what_does_not_fit_is_named() -> None:
    """The others are full: the hottest part of what leaves is worth more than the coldest of what stays."""
    pool = pool_of(nodes=2, replicas=1, blocks_max=40)
    pool.store("n0", *range(40))
    pool.store("n1", *range(100, 140))
    pool.run(1)
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"))
    drain = pool.drain_of("n0")
    assert drain.state is DrainState.DRAINED and drain.bytes_failed
    assert drain.bytes_moved + drain.bytes_failed == drain.bytes_total == 40 * BLOCK
    assert 0.4 <= drain.bytes_moved / drain.bytes_total <= 0.6
    kept = [number for number in range(40) if (NS, SALT, one(number)) in pool.nodes["n1"].dram]
    assert kept and min(kept) >= 20, "the hottest are those stored last"
    pool.step()
    assert "nowhere else" in (pool.nodes["n0"].drained or "")


def test_a_budget_ends_a_drain() -> None:
    pool = pool_of(nodes=2, replicas=1)
    pool.nodes["n1"].mute = True
    pool.store("n0", *range(10))
    pool.run(1)
    pool.drain("n0", budget_s=5)
    pool.run(4)
    assert not over(pool, "n0")
    pool.run(2)
    assert pool.drain_of("n0").state is DrainState.OUT_OF_TIME
    assert "out of time" in (pool.nodes["n0"].drained or "")
    count = len(pool.ordered(m.SendCopy))
    pool.run(30)
    assert len(pool.ordered(m.SendCopy)) == count


def test_undrain_takes_it_back() -> None:
    pool = pool_of(nodes=2, replicas=1)
    pool.drain("n0")
    pool.run(1)
    assert pool.nodes["n0"].draining
    pool.state.replication.leavers.undrain("n0")
    pool.take(pool.state.taken())
    pool.run(1)
    assert not pool.nodes["n0"].draining
    node = pool.state.nodes.get("n0")
    assert node is not None and not node.leaving
    row = pool.rows["n0"]
    assert isinstance(row, m.SaveNode) and not row.draining


def test_an_unknown_node_cannot_be_drained() -> None:
    with pytest.raises(InvalidArgument, match="no node 'x'"):
        pool_of(nodes=1, replicas=1).drain("x")


def test_a_node_that_dies_in_its_drain_begins_it_again() -> None:
    pool = pool_of(nodes=2, replicas=1, ssd_max=64)
    pool.store("n0", *range(10), tier=Tier.SSD)
    pool.run(1)
    pool.nodes["n1"].mute = True
    pool.drain("n0")
    pool.run(2)
    pool.kill(pool.nodes["n0"])
    pool.run(15)
    assert not over(pool, "n0")
    pool.nodes["n1"].mute = False
    pool.restart(pool.nodes["n0"])
    pool.until(lambda: over(pool, "n0"), 120)
    assert pool.drain_of("n0").bytes_moved == 10 * BLOCK
    assert all(pool.have(number) == 2 for number in range(10))


def test_a_target_that_dies_is_replaced() -> None:
    pool = pool_of(nodes=3, replicas=1)
    pool.store("n0", *range(10))
    pool.run(1)
    pool.nodes["n1"].mute = pool.nodes["n2"].mute = True
    pool.drain("n0")
    pool.run(2)
    assert pool.ordered(m.SendCopy)
    pool.kill(pool.nodes["n1"])
    pool.nodes["n2"].mute = False
    pool.until(lambda: over(pool, "n0"), 120)
    assert pool.drain_of("n0").bytes_moved == 10 * BLOCK and not pool.drain_of("n0").bytes_failed


def test_a_block_that_nobody_takes_is_given_up_after_some_tries() -> None:
    pool = pool_of(nodes=2, replicas=1)
    pool.nodes["n1"].fails = True
    pool.nodes["n1"].status = BlockStatus.CORRUPT
    pool.store("n0", *range(3))
    pool.run(1)
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"), 120)
    assert pool.drain_of("n0").bytes_failed == 3 * BLOCK


def test_a_single_node_has_nowhere_to_go() -> None:
    pool = pool_of(nodes=1, replicas=1)
    pool.store("n0", *range(3))
    pool.run(1)
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"))
    assert pool.drain_of("n0").bytes_failed == 3 * BLOCK


def test_a_node_that_is_stopping_asks_for_its_drain_and_its_next_process_is_not_drained() -> None:
    pool = pool_of(nodes=2, replicas=1)
    node = pool.nodes["n0"]
    pool.store("n0", *range(10))
    pool.run(1)
    pool.tell(m.Leaving(node.session, 30.0, "stopping"))
    pool.until(lambda: node.drained is not None)
    assert node.drained == "" and len(pool.nodes["n1"].dram) == 10
    pool.tell(m.Detach(node.session, "stopping"))
    row = pool.rows["n0"]
    assert isinstance(row, m.SaveNode) and row.gone and not row.draining
    node.alive = False
    node.dram.clear()
    pool.run(2)
    pool.restart(node)
    pool.run(2)
    known = pool.state.nodes.get("n0")
    assert known is not None and not known.leaving and not node.draining


def test_offers_of_an_earlier_drain_are_passed_over() -> None:
    pool = pool_of(nodes=2, replicas=1)
    node = pool.nodes["n0"]
    pool.drain("n0")
    earlier = pool.drain_of("n0").command
    pool.drain("n0")
    holding = m.Holding(NS, SALT, 0, one(1))
    pool.tell(m.Offer(node.session, earlier, (holding,), True, BLOCK))
    assert not pool.drain_of("n0").whole and not pool.drain_of("n0").bytes_total


def test_an_offer_that_comes_after_the_time_is_over_is_passed_over() -> None:
    pool = pool_of(nodes=2, replicas=1)
    node = pool.nodes["n0"]
    pool.store("n0", *range(3))
    pool.run(1)
    pool.drain("n0", budget_s=1)
    node.wire.clear()
    pool.now += 2
    pool.tell(m.Tick())
    assert pool.drain_of("n0").state is DrainState.OUT_OF_TIME
    pool.tell(m.Offer(node.session, pool.drain_of("n0").command, (m.Holding(NS, SALT, 0, one(1)),), True, BLOCK))
    pool.state.check()
    assert not pool.drain_of("n0").blocks


def test_a_drained_node_whose_stream_breaks_is_drained_again_within_its_budget() -> None:
    pool = pool_of(nodes=2, replicas=1)
    pool.store("n0", *range(3))
    pool.run(1)
    pool.drain("n0", budget_s=5)
    pool.until(lambda: over(pool, "n0"))
    pool.run(10)
    pool.attach(pool.nodes["n0"])
    pool.run(3)
    assert pool.drain_of("n0").state is DrainState.DRAINED


def test_a_node_that_is_away_hears_later_that_it_stays() -> None:
    pool = pool_of(nodes=2, replicas=1)
    node = pool.nodes["n0"]
    pool.drain("n0")
    pool.run(1)
    pool.tell(m.LinkLost(node.session))
    pool.state.replication.leavers.undrain("n0")
    pool.take(pool.state.taken())
    assert node.draining
    command = node.draining
    pool.attach(node)
    node.draining = command
    pool.run(1)
    assert not node.draining


def test_what_finds_no_memory_free_goes_to_ssd() -> None:
    pool = pool_of(nodes=2, replicas=1, blocks_max=20, ssd_max=64)
    pool.store("n0", *range(20))
    pool.store("n1", *range(100, 120))
    pool.run(1)
    pool.drain("n0")
    pool.until(lambda: over(pool, "n0"))
    assert pool.drain_of("n0").bytes_failed == 0
    assert len(pool.nodes["n1"].ssd) == 20 and len(pool.nodes["n1"].dram) == 20


def test_what_is_of_older_weights_need_not_move() -> None:
    pool = pool_of(nodes=2, replicas=1)
    node = pool.nodes["n0"]
    pool.store("n0", 1)
    pool.run(1)
    pool.drain("n0")
    _, commands = pool.state.bump(NS.group, pool.now)
    pool.take(commands)
    drain = pool.drain_of("n0")
    drain.whole = False
    before = drain.bytes_moved
    pool.tell(m.Offer(node.session, drain.command, (m.Holding(NS, SALT, 0, one(2), 0),), False, 2 * BLOCK))
    assert drain.bytes_moved == before + BLOCK and not drain.blocks
