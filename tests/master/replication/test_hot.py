"""A busy node's prefixes are copied to nodes that are less busy, when that is asked for, and go first later."""

from __future__ import annotations

from kvstrata.master import messages as m
from kvstrata.master.replication.hot import BUSY_BYTES, KEPT_S, Rates
from kvstrata.proto.status import CopyReason
from tests.master.replication.pool import Pool
from tests.master.replication.test_replication import pool_of


def busy_pool(*, enabled: bool) -> Pool:
    """Node n0 alone has a prefix that everybody asks for, and sends it all the time."""
    pool = pool_of(nodes=3, replicas=1)
    pool.state.replication.hot.enabled = enabled
    pool.store("n0", *range(20))
    pool.store("n1", *range(100, 120))
    pool.run(1)
    for _ in range(40):
        pool.nodes["n0"].bytes_out += BUSY_BYTES
        pool.nodes["n1"].bytes_out += BUSY_BYTES // 4
        pool.ask(*range(10))
        pool.step()
    return pool


def test_without_being_asked_for_nothing_is_copied() -> None:
    assert not busy_pool(enabled=False).ordered(m.SendCopy)


def test_a_hot_prefix_gets_a_copy_on_the_least_busy_node() -> None:
    pool = busy_pool(enabled=True)
    assert pool.reasons() == {CopyReason.HOT}
    assert [pool.have(number) for number in range(20)] == [2] * 10 + [1] * 10, "what nobody asks for has none"
    assert len(pool.nodes["n2"].dram) == 10


def test_such_a_copy_stays_for_a_while_and_then_goes() -> None:
    pool = busy_pool(enabled=True)
    pool.run(60)
    assert all(pool.have(number) == 2 for number in range(10))
    pool.now += 2 * KEPT_S
    pool.tell(m.Tick())
    for node in pool.nodes.values():
        pool.attach(node)
    pool.until(lambda: all(pool.have(number) == 1 for number in range(10)), 120)


def test_nodes_that_are_all_busy_have_nobody_to_turn_to() -> None:
    rates = Rates()
    for second in range(5):
        rates.seen({"a": second * BUSY_BYTES * 4, "b": second * BUSY_BYTES * 4}, float(second))
    assert rates.busiest() is None
    for second in range(5, 15):
        rates.seen({"a": second * BUSY_BYTES * 4, "b": 4 * BUSY_BYTES * 4}, float(second))
    assert rates.busiest() == "a" and rates.idle() == {"b"}


def test_a_node_that_began_anew_has_no_negative_rate() -> None:
    rates = Rates()
    rates.seen({"a": 1 << 40, "b": 0}, 0.0)
    rates.seen({"a": 10, "b": 0}, 1.0)
    rates.seen({"a": 20, "b": 0}, 2.0)
    assert rates.by_node["a"] >= 0
    rates.seen({"b": 0}, 3.0)
    assert "a" not in rates.by_node
