"""Wanted and actual replicas: they meet where there is room, and nothing is copied or let go that should not be."""

from __future__ import annotations

import pytest

from kvstrata.master import messages as m
from kvstrata.master.directory import directory
from kvstrata.master.replication.replication import REPAIR_AFTER_S
from kvstrata.proto.errors import InvalidArgument, Refused
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus, CopyReason, Tier
from tests.master.replication.pool import BLOCK, LONG, NS, SALT, Pool, one

#: Whether what dropped slots have left in the tables ever goes: nobody is to see a difference.
SWEPT = pytest.mark.parametrize("swept", [1 << 19, 0], ids=["swept", "never swept"])


def pool_of(nodes: int = 3, replicas: int = 2, blocks_max: int = 64, ssd_max: int = 0) -> Pool:
    pool = Pool()
    for index in range(nodes):
        pool.up(f"n{index}", blocks_max, ssd_max)
    if replicas > 1:
        pool.replicas(replicas)
    return pool


def test_by_default_nothing_is_copied() -> None:
    pool = pool_of(replicas=1)
    pool.store("n0", *range(20))
    pool.run(10)
    assert all(pool.have(number) == 1 for number in range(20))
    assert not pool.ordered(m.SendCopy)


@pytest.mark.parametrize("namespace", [NS, LONG], ids=["16-byte hashes", "32-byte hashes"])
def test_what_is_stored_gets_its_replicas_soon(namespace: Namespace) -> None:
    pool = pool_of(nodes=4, replicas=3)
    pool.store("n0", *range(20), namespace=namespace)
    pool.until(lambda: all(pool.have(number, namespace) == 3 for number in range(20)), 20)
    assert pool.reasons() == {CopyReason.REPLICA}


@pytest.mark.parametrize("namespace", [NS, LONG], ids=["16-byte hashes", "32-byte hashes"])
def test_a_new_number_of_replicas_reaches_what_is_there(namespace: Namespace) -> None:
    pool = pool_of(replicas=1)
    pool.store("n0", *range(20), namespace=namespace)
    pool.run(5)
    pool.replicas(2)
    pool.until(lambda: all(pool.have(number, namespace) == 2 for number in range(20)))
    pool.run(5)
    assert (pool.state.replication.scan.wanting, pool.state.replication.scan.surplus) == (0, 0)


def test_a_tenant_counts_before_a_namespace_and_that_before_the_default() -> None:
    rules = pool_of(nodes=1).state.replication.rules
    rules.set("model", None, 3)
    assert (rules.wanted("model", SALT), rules.wanted("other", SALT)) == (3, 2)
    rules.set("", SALT, 1)
    assert (rules.wanted("model", SALT), rules.wanted("model", "else")) == (1, 3)
    rules.set("", SALT, 0)
    assert rules.wanted("model", SALT) == 3


@pytest.mark.parametrize("count", [-1, 9])
def test_a_number_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 to 8"):
        pool_of(nodes=1).replicas(count)


def test_no_more_replicas_than_nodes_are_wanted() -> None:
    pool = pool_of(nodes=2, replicas=5)
    pool.store("n0", *range(5))
    pool.run(20)
    assert all(pool.have(number) == 2 for number in range(5))
    assert pool.state.replication.scan.wanting == 0


@SWEPT
def test_a_lost_node_s_blocks_are_copied_again_those_asked_for_first(
    swept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SWEPT_SLOTS", swept)
    pool = pool_of(nodes=3, replicas=2)
    pool.store("n0", *range(30))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(30)))
    pool.run(12)
    pool.ask(*range(20, 25))
    del pool.commands[:]
    pool.kill(pool.nodes["n0"])
    assert all(pool.have(number) == 1 for number in range(30))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(30)))
    orders = [order.hashes for order in pool.ordered(m.SendCopy) if isinstance(order, m.SendCopy)]
    first = b"".join(orders)[: 5 * 16]
    assert {first[i : i + 16] for i in range(0, 80, 16)} == {one(number) for number in range(20, 25)}


def test_a_node_that_is_back_at_once_causes_no_copies() -> None:
    pool = pool_of(nodes=3, replicas=2, ssd_max=64)
    pool.store("n0", *range(10), tier=Tier.SSD)
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.run(12)
    before = len(pool.ordered(m.SendCopy))
    pool.kill(pool.nodes["n0"])
    pool.run(REPAIR_AFTER_S - 2)
    pool.restart(pool.nodes["n0"])
    pool.run(20)
    assert len(pool.ordered(m.SendCopy)) == before
    assert all(pool.have(number) == 2 for number in range(10))


def test_a_suspected_node_is_not_lost() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.run(12)
    before = len(pool.ordered(m.SendCopy))
    silent = pool.nodes.pop("n0")
    pool.run(9.5)
    node = pool.state.nodes.get("n0")
    assert node is not None and node.state.value == "suspected"
    assert len(pool.ordered(m.SendCopy)) == before
    pool.nodes["n0"] = silent
    pool.run(5)
    assert len(pool.ordered(m.SendCopy)) == before


@SWEPT
def test_a_node_that_comes_back_makes_a_surplus_which_is_let_go(swept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "SWEPT_SLOTS", swept)
    pool = pool_of(nodes=3, replicas=2, ssd_max=64)
    pool.store("n0", *range(10), tier=Tier.SSD)
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.kill(pool.nodes["n0"])
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.restart(pool.nodes["n0"])
    pool.run(1)
    assert all(pool.have(number) == 3 for number in range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)), 90)
    pool.run(30)
    assert all(pool.have(number) == 2 for number in range(10))


def test_two_writers_of_one_block_make_a_surplus_too() -> None:
    pool = pool_of(replicas=1)
    pool.store("n0", *range(5))
    pool.store("n1", *range(5))
    pool.until(lambda: all(pool.have(number) == 1 for number in range(5)), 90)
    pool.run(30)
    assert all(pool.have(number) == 1 for number in range(5))


def test_copies_go_to_another_host_if_there_is_one() -> None:
    pool = Pool()
    for name, host in (("n0", "a"), ("n1", "a"), ("n2", "b")):
        pool.up(name, boot_id=host)
    pool.replicas(2)
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    assert len(pool.nodes["n2"].dram) == 10 and not pool.nodes["n1"].dram


def test_what_nobody_asks_for_makes_no_room_for_itself() -> None:
    """Two nodes that are full: new blocks get replicas, old ones are not copied round and round."""
    pool = pool_of(nodes=2, replicas=1, blocks_max=20)
    pool.store("n0", *range(20))
    pool.store("n1", *range(100, 120))
    pool.run(3)
    pool.replicas(2)
    pool.run(60)
    assert not pool.ordered(m.SendCopy)
    assert pool.state.replication.scan.wanting == 40
    pool.store("n0", 200)
    pool.until(lambda: pool.have(200) == 2)
    pool.run(60)
    assert len(pool.ordered(m.SendCopy)) == 1


def test_copies_that_fail_are_tried_elsewhere_and_not_at_once() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.nodes["n1"].fails = True
    pool.nodes["n1"].status = BlockStatus.FULL
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    pool.run(120)
    orders = [order for order in pool.ordered(m.SendCopy) if isinstance(order, m.SendCopy)]
    to_bad = [order for order in orders if order.session == pool.nodes["n1"].session]
    assert len(to_bad) <= 3


def test_a_tenant_without_room_is_left_alone_for_a_while() -> None:
    pool = pool_of(nodes=2, replicas=2)
    pool.nodes["n1"].fails = True
    pool.nodes["n1"].status = BlockStatus.QUOTA
    pool.store("n0", *range(10))
    pool.run(60)
    assert 1 <= len(pool.ordered(m.SendCopy)) <= 4
    assert pool.state.replication.copies.blocks["quota"] >= 10


def test_an_answer_that_never_comes_is_given_up_and_the_copy_made_elsewhere() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.nodes["n1"].mute = True
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)), 90)
    assert pool.state.replication.copies.blocks["late"]


def test_an_answer_twice_counts_once() -> None:
    pool = pool_of(nodes=2, replicas=2)
    pool.nodes["n1"].mute = True
    pool.store("n0", 1)
    pool.until(lambda: bool(pool.ordered(m.SendCopy)))
    order = pool.ordered(m.SendCopy)[0]
    assert isinstance(order, m.SendCopy)
    for _ in range(2):
        pool.tell(m.CopyDone(order.session, order.command, bytes([BlockStatus.STORED]), BLOCK))
    assert pool.state.replication.copies.blocks["stored"] == 1
    assert not len(pool.state.replication.copies)


def test_another_s_answer_counts_for_nothing() -> None:
    pool = pool_of(nodes=2, replicas=2)
    pool.nodes["n1"].mute = True
    pool.store("n0", 1)
    pool.until(lambda: bool(pool.ordered(m.SendCopy)))
    order = pool.ordered(m.SendCopy)[0]
    assert isinstance(order, m.SendCopy) and order.session == pool.nodes["n1"].session
    pool.tell(m.CopyDone(pool.nodes["n0"].session, order.command, bytes([BlockStatus.STORED]), BLOCK))
    assert len(pool.state.replication.copies) == 1 and not pool.state.replication.copies.blocks["stored"]


def test_the_same_block_is_not_ordered_twice_before_its_delta_is_here() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.nodes["n1"].mute = pool.nodes["n2"].mute = True
    pool.store("n0", 1)
    pool.until(lambda: bool(pool.ordered(m.SendCopy)))
    order = pool.ordered(m.SendCopy)[0]
    assert isinstance(order, m.SendCopy)
    pool.tell(m.CopyDone(order.session, order.command, bytes([BlockStatus.STORED]), BLOCK))
    for _ in range(8):
        pool.now += 0.25
        pool.tell(m.Tick())
    assert len(pool.ordered(m.SendCopy)) == 1


def test_an_ssd_block_is_copied_to_ssd() -> None:
    pool = pool_of(nodes=2, replicas=2, ssd_max=64)
    pool.store("n0", *range(5), tier=Tier.SSD)
    pool.until(lambda: all(pool.have(number) == 2 for number in range(5)))
    assert len(pool.nodes["n1"].ssd) == 5 and not pool.nodes["n1"].dram


def test_rules_and_drains_outlive_the_master() -> None:
    pool = pool_of(nodes=2, replicas=2)
    pool.replicas(3, salt=SALT)
    pool.drain("n1")
    again = Pool(pool.saved())
    assert again.state.replication.rules.wanted("model", SALT) == 3
    assert again.state.replication.rules.fallback == 2
    again.up("n0")
    node = again.up("n1")
    again.run(2)
    assert node.draining and node.drained == ""


def test_a_new_master_does_not_copy_what_is_still_on_its_way() -> None:
    pool = pool_of(nodes=3, replicas=2)
    pool.store("n0", *range(10))
    pool.until(lambda: all(pool.have(number) == 2 for number in range(10)))
    again = Pool(pool.saved())
    again.nodes = pool.nodes
    again.attach(again.nodes["n0"])
    again.run(4)
    again.attach(again.nodes["n1"])
    again.attach(again.nodes["n2"])
    again.run(20)
    assert not again.ordered(m.SendCopy)


def test_a_node_that_is_here_is_not_removed_by_mistake() -> None:
    pool = pool_of(nodes=2, replicas=1)
    with pytest.raises(Refused, match="drain n0"):
        pool.state.remove_node("n0", False, pool.now)
    with pytest.raises(InvalidArgument, match="no node 'x'"):
        pool.state.remove_node("x", False, pool.now)


def test_a_removed_node_is_waited_for_no_more() -> None:
    pool = pool_of(nodes=2, replicas=1, ssd_max=8)
    pool.store("n0", 1, tier=Tier.SSD)
    pool.step()
    pool.kill(pool.nodes["n0"])
    removal, commands = pool.state.remove(NS, SALT, one(1), pool.now)
    pool.take(commands)
    cleared, commands = pool.state.drop("", "other", False, pool.now)
    pool.take(commands)
    assert "n0" in pool.state.unconfirmed(removal.command) and "n0" in pool.state.unconfirmed(cleared.command)
    pool.take(pool.state.remove_node("n0", False, pool.now))
    pool.state.check()
    pool.run(1)
    assert "n0" not in pool.state.unconfirmed(removal.command) + pool.state.unconfirmed(cleared.command)
    assert pool.state.nodes.get("n0") is None
    row = pool.rows["n0"]
    assert isinstance(row, m.SaveNode) and row.removed


def test_a_node_that_is_cut_off_by_force_may_come_back_as_a_new_one() -> None:
    pool = pool_of(nodes=2, replicas=1)
    pool.take(pool.state.remove_node("n0", True, pool.now))
    pool.state.check()
    assert any(isinstance(c, m.CloseSession) and c.session == pool.nodes["n0"].session for c in pool.commands)
    pool.attach(pool.nodes["n0"])
    pool.run(1)
    assert pool.state.nodes.get("n0") is not None


def test_while_an_order_to_let_go_does_not_show_nobody_else_is_told() -> None:
    """The first may have obeyed, unheard: a second order would take the last replica."""
    pool = pool_of(nodes=2, replicas=1)
    pool.store("n0", 1)
    pool.store("n1", 1, *range(10, 20))
    pool.step()
    for node in pool.nodes.values():
        node.deaf = True
    pool.until(lambda: bool(pool.ordered(m.SendSurplus)), 60)
    pool.nodes["n0"].blocks_max, pool.nodes["n1"].blocks_max = 2, 64
    pool.run(8)
    assert len(pool.ordered(m.SendSurplus)) == 1
    pool.run(20)
    assert len(pool.ordered(m.SendSurplus)) > 1, "it is told again when it does not obey"


def test_copies_that_do_not_last_are_not_made_again_and_again() -> None:
    """Three replicas are wanted, and one node has no room: what it takes it evicts at once."""
    pool = pool_of(nodes=3, replicas=3)
    full = pool.nodes["n2"]
    keep = full.store

    def evicted(key: tuple[Namespace, str, bytes], tier: int = Tier.DRAM, epoch: int = 0) -> None:
        keep(key, tier, epoch)
        full.lose(key)

    full.store = evicted  # type: ignore[method-assign]
    pool.store("n0", 1)
    pool.run(120)
    assert pool.have(1) == 2
    assert full.copied <= 4, f"the same block was copied there {full.copied} times in two minutes"
