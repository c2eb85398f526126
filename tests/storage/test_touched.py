"""Reads by the shared index count, and keep blocks from leaving, as reads by asking do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.proto.errors import FingerprintMismatch, InvalidArgument
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.state import NodeState, Touched

from .conftest import Node, key, keys

reads = st.lists(st.tuples(st.integers(0, 25), st.integers(1, 8)), max_size=12)


def order(node: Node) -> list[bytes]:
    return [block.hash for block in node.state.inventory.coldest_blocks(1000)]


def touched(node: Node, calls: list[list[int]], times: list[int], epoch: int = 0) -> None:
    named = [number for call in calls for number in call]
    told = Touched(node.handle, "", keys(named), [len(call) for call in calls], times, epoch)
    node.state.touched(told, node.now)
    node.state.check()


@pytest.mark.parametrize("segmented", [False, True])
@given(asked=reads)
@settings(max_examples=40, deadline=None)
def test_the_order_and_the_counts_are_those_of_reads_by_asking(segmented: bool, asked: list[tuple[int, int]]) -> None:
    nodes = [Node(2), Node(2)]
    try:
        for node in nodes:
            if segmented:
                node.state = NodeState(node.arena, order=SegmentedOrder)
                node.handle = node.state.open_namespace(node.namespace)[0]
            for start in range(0, 30, 5):
                node.store(range(start, start + 5))
        calls = [list(range(start, min(start + count, 30))) for start, count in asked]
        for call in calls:
            got = nodes[0].acquire(call)
            nodes[0].state.release(Node.SESSION, [got.lease.id])
            nodes[0].state.counts.bytes_out += len(call) * 4096  # as the handler counts it
        if calls:
            touched(nodes[1], calls, [1] * len(calls))
        assert order(nodes[0]) == order(nodes[1])
        counts, others = (node.state.counts for node in nodes)
        for name in ("blocks_asked", "hits", "misses", "bytes_out"):
            assert getattr(counts, name) == getattr(others, name)
        assert others.hits_index == others.hits
    finally:
        for node in nodes:
            node.arena.close()


def test_what_was_read_stays_and_what_was_not_leaves(make_node: Callable[..., Node]) -> None:
    node = make_node(2)
    full = node.capacity
    for number in range(full):
        node.store([number])
    touched(node, [[number] for number in range(5)], [1] * 5)
    node.store(range(full, full + full - 5))
    assert node.present(range(full)) == list(range(5))


def test_a_read_that_was_repeated_counts_each_time(node: Node) -> None:
    node.store(range(4))
    touched(node, [[0, 1], [2]], [1000, 3])
    counts = node.state.counts
    assert counts.hits == counts.hits_index == counts.blocks_asked == 2 * 1000 + 3
    assert counts.bytes_out == counts.hits * 4096


def test_what_has_left_meanwhile_counts_and_no_more(node: Node) -> None:
    """It was read: that is true whatever has become of it. Nothing of other weights is touched."""
    node.store(range(4))
    before = order(node)
    touched(node, [[3, 77]], [1])
    assert node.state.counts.hits == 2 and order(node) != before
    node.state.remove(node.namespace, "", key(1), node.now)
    node.state.set_epoch("model", 1, node.now)
    touched(node, [[0, 2]], [1])
    assert node.state.counts.hits == 4
    with pytest.raises(FingerprintMismatch):
        node.state.touched(Touched(99, "", keys([1]), [1], [1]), node.now)


@pytest.mark.parametrize(
    ("calls", "times"), [([[]], [1]), ([[0], []], [1, 1]), ([[0]], [0]), ([[0]], [(1 << 16) + 1]), ([[0]], [1, 1])]
)
def test_what_no_client_tells_is_refused(node: Node, calls: list[list[int]], times: list[int]) -> None:
    """Nothing costs more than its hashes, and no count grows past what a field holds."""
    node.store(range(4))
    with pytest.raises(InvalidArgument):
        touched(node, calls, times)
    assert node.state.counts.hits == 0
