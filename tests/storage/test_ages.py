"""Stamps as seconds, and copies that enter as old as they are."""

from __future__ import annotations

import numpy as np
import pytest

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.eviction.ages import POINTS_MAX, Ages
from kvstrata.storage.eviction.orders import LruOrder
from kvstrata.storage.eviction.segmented_order import SegmentedOrder
from kvstrata.storage.records import Block

from .conftest import Node, key


def test_stamps_become_seconds_and_back() -> None:
    ages = Ages()
    for second in range(100):
        ages.note(second * 10, 1000.0 + second)
        ages.note(second * 10 + 5, 1000.5 + second)  # too soon after the last: not kept
    assert ages.stamp_at(1050.7) == 500 and ages.stamp_at(999.0) == 0
    assert 49.0 <= ages.idle_s(500, 1099.0) <= 50.0
    assert 49.0 <= ages.idle_s(495, 1099.0) <= 50.0
    stamps = np.array([0, 495, 500, 990, 995, 5000])
    assert ages.idle_all_s(stamps, 1099.0).tolist() == [ages.idle_s(stamp, 1099.0) for stamp in stamps.tolist()]
    assert Ages().idle_all_s(stamps, 1.0).tolist() == [Ages().idle_s(0, 1.0)] * 6
    assert ages.idle_s(5000, 1099.0) == 0.0, "a call that no point has seen yet"
    ages.check()


def test_old_points_thin_out_and_never_make_a_block_younger() -> None:
    ages = Ages()
    for second in range(10 * POINTS_MAX):
        ages.note(second, float(second))
    ages.check()
    end = 10.0 * POINTS_MAX
    for stamp in range(0, 10 * POINTS_MAX, 37):
        assert ages.idle_s(stamp, end) >= end - stamp - 1.0
        assert ages.stamp_at(float(stamp)) <= stamp


@pytest.mark.parametrize("order", [LruOrder, SegmentedOrder])
def test_a_copy_evicts_only_what_was_used_before_it_and_leaves_in_its_turn(order: type[LruOrder]) -> None:
    node = Node()
    node.state.inventory.policy._make_order = order  # type: ignore[attr-defined]
    inventory = node.state.inventory
    stamps: dict[int, int] = {}
    for number in range(node.capacity):
        node.store([number])
        stamps[number] = inventory.policy.stamp
    entry = node.state.entry(node.handle)
    shelf = inventory.shelf(entry, "")
    inventory.policy.next_stamp()
    half = stamps[node.capacity // 2]
    copies, refusal = inventory.admit(shelf, [key(1000 + n) for n in range(node.capacity)], [0] * node.capacity, half)
    assert refusal == BlockStatus.FULL, "the younger half stays"
    assert len(copies) == len([stamp for stamp in stamps.values() if stamp < half])
    assert node.present(range(node.capacity)) == [n for n, stamp in stamps.items() if stamp >= half]
    # They are published with the stamps they had, and are evicted before what is younger.
    inventory.publish(shelf, copies)
    inventory.backdate(copies, [half - 1] * len(copies))
    inventory.check()
    left: list[Block] = []
    inventory.evicted = left.append
    node.store(list(range(2000, 2000 + len(copies))))
    assert {block.hash for block in left} == {block.hash for block in copies}
    assert [block.hash for block in left] == [block.hash for block in reversed(copies)], "suffixes first"
    node.state.check()
    node.arena.close()
