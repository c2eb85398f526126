"""Where new blocks go: balance, ramp, same host, intents; all from a seed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvstrata.master import placement as placement_module
from kvstrata.master.candidates import Candidate, Candidates, ramp_at, slot_mask
from kvstrata.master.directory.probing import Keys
from kvstrata.master.placement import INTENT_S, RUN_BLOCKS, STRIPE_NODES_MAX, Placed, Placement, writer_tag
from kvstrata.proto.status import PlaceState

GIB = 1 << 30
SCOPE = np.array([[1, 2]], dtype=np.uint64)


def keys_for(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, size=(count, 2), dtype=np.uint64)


def node(slot: int, boot_id: str = "", free: float = 0.5, ramp: float = 1.0, capacity: int = 10 * GIB) -> Candidate:
    return Candidate(slot, boot_id or f"host{slot}", int(free * capacity), capacity, ramp)


def place(
    placement: Placement,
    keys: Keys,
    nodes: list[Candidate],
    boot_id: str = "",
    now: float = 100.0,
    present: np.ndarray | None = None,
    scope: Keys = SCOPE,
    writer: int = 0,
) -> Placed:
    known = np.zeros(len(keys), dtype=np.uint16) if present is None else present
    return placement.place(keys, scope, known, Candidates.of(nodes), boot_id, now, writer)


def share_by_slot(nodes: list[Candidate], calls: int = 250, boot_id: str = "") -> dict[int, float]:
    """Share of one-run calls that each slot got."""
    placement = Placement(random.Random(7))
    chosen: Counter[int] = Counter()
    for call in range(calls):
        code = place(placement, keys_for(4, seed=call), nodes, boot_id).codes[0]
        chosen[(int(code) - 1) >> 2] += 1
    return {candidate.slot: chosen[candidate.slot] / calls for candidate in nodes}


def test_present_blocks_name_their_holder_and_need_no_node() -> None:
    present = np.array([1 + 4 * 3 + 1, 0], dtype=np.uint16)
    placed = place(Placement(random.Random(0)), keys_for(2), [], present=present)
    assert placed.codes.tolist() == [1 + 4 * 3, 0]
    assert placed.states.tolist() == [PlaceState.PRESENT, PlaceState.NOWHERE]


def test_a_second_writer_is_told_in_flight_until_the_intent_lapses() -> None:
    placement, keys, nodes = Placement(random.Random(0)), keys_for(300), [node(0), node(1), node(2)]
    first = place(placement, keys, nodes)
    assert set(first.states.tolist()) == {PlaceState.NEW}
    second = place(placement, keys, nodes, now=100.0 + INTENT_S - 1)
    assert set(second.states.tolist()) == {PlaceState.IN_FLIGHT}
    assert np.array_equal(first.codes, second.codes)
    third = place(placement, keys, nodes, now=100.0 + INTENT_S + 1)
    assert set(third.states.tolist()) == {PlaceState.NEW}


def test_the_writer_of_an_intent_is_sent_to_the_same_node_again() -> None:
    placement, keys, nodes = Placement(random.Random(0)), keys_for(300), [node(0), node(1), node(2)]
    mine, other = writer_tag(b"a" * 16), writer_tag(b"b" * 16)
    assert mine != other
    first = place(placement, keys, nodes, writer=mine)
    again = place(placement, keys, nodes, now=105.0, writer=mine)
    assert set(again.states.tolist()) == {PlaceState.NEW} and np.array_equal(first.codes, again.codes)
    for writer in (other, 0):
        assert set(place(placement, keys, nodes, now=106.0, writer=writer).states.tolist()) == {PlaceState.IN_FLIGHT}
    unknown = Placement(random.Random(0))
    place(unknown, keys, nodes)
    assert set(place(unknown, keys, nodes).states.tolist()) == {PlaceState.IN_FLIGHT}, "nobody is taken for another"


@pytest.mark.parametrize("later", [INTENT_S * step for step in (1.1, 1.9, 2.1, 4.3, 100, 4266.7)])
def test_a_lapsed_intent_holds_up_nobody_however_late_it_is_looked_at(later: float) -> None:
    placement, keys = Placement(random.Random(0)), keys_for(10)
    place(placement, keys, [node(16382)], writer=511)
    assert placement.in_flight(keys, SCOPE, slot_mask({16382}), 100.0 + INTENT_S / 2).all()
    assert not placement.in_flight(keys, SCOPE, slot_mask({16382}), 100.0 + later).any()
    assert set(place(placement, keys, [node(16382)], now=100.0 + later, writer=1).states.tolist()) == {PlaceState.NEW}


def test_intents_of_other_tenants_and_of_lost_nodes_do_not_count() -> None:
    placement, keys = Placement(random.Random(0)), keys_for(10)
    place(placement, keys, [node(0)])
    other = place(placement, keys, [node(0)], scope=np.array([[9, 9]], dtype=np.uint64))
    assert set(other.states.tolist()) == {PlaceState.NEW}
    lost = place(placement, keys, [node(1)])
    assert set(lost.states.tolist()) == {PlaceState.NEW} and set(lost.codes.tolist()) == {1 + 4}


def test_intents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "INTENTS_MAX", 1000)
    placement = Placement(random.Random(0))
    for call in range(20):
        place(placement, keys_for(500, seed=call), [node(0)])
        placement.check()
    assert placement.intents <= 2 * 1500


def test_one_node_takes_everything_and_long_prefixes_are_striped_in_runs() -> None:
    placement = Placement(random.Random(3))
    assert set(place(placement, keys_for(1000), [node(4)]).codes.tolist()) == {1 + 16}
    codes = place(placement, keys_for(1000, seed=1), [node(0), node(1), node(2)]).codes
    for start in range(0, 1000, RUN_BLOCKS):
        assert len(set(codes[start : start + RUN_BLOCKS].tolist())) == 1
    assert len(set(codes.tolist())) == 3


def test_a_call_of_several_runs_uses_all_nodes_of_the_host_by_weight_and_only_those() -> None:
    for seed in range(20):
        nodes = [node(0, "mine", ramp=0.06), node(1, "mine", ramp=0.05), node(2, ramp=0.06)]
        codes = place(Placement(random.Random(seed)), keys_for(5 * RUN_BLOCKS, seed), nodes, "mine").codes
        counts = Counter(((codes[::RUN_BLOCKS] - 1) >> 2).tolist())
        assert sorted(counts) == [0, 1] and min(counts.values()) == 2, counts
    nodes = [node(0, "mine"), node(1, "mine", ramp=0.1), node(2)]
    codes = place(Placement(random.Random(1)), keys_for(100 * RUN_BLOCKS), nodes, "mine").codes
    counts = Counter(((codes[::RUN_BLOCKS] - 1) >> 2).tolist())
    assert counts[0] > 80 > 20 > counts[1]


def test_very_long_prefixes_use_a_bounded_number_of_nodes() -> None:
    codes = place(Placement(random.Random(1)), keys_for(40 * RUN_BLOCKS), [node(slot) for slot in range(30)]).codes
    assert len(set(codes.tolist())) == STRIPE_NODES_MAX


def test_equal_nodes_get_equal_shares_full_or_not() -> None:
    for free in (0.5, 0.0):
        shares = share_by_slot([node(slot, free=free) for slot in range(4)])
        assert all(0.15 < share < 0.35 for share in shares.values()), shares


def test_free_space_draws_and_full_nodes_still_count() -> None:
    shares = share_by_slot([node(0, free=0.9), node(1, free=0.1)])
    assert shares[0] > 0.9
    by_capacity = share_by_slot([node(0, free=0.0, capacity=30 * GIB), node(1, free=0.0, capacity=10 * GIB)])
    assert 0.6 < by_capacity[0] < 0.9 and by_capacity[1] > 0.05


def test_an_empty_node_that_joins_does_not_get_every_write() -> None:
    assert ramp_at(0) < 0.1 and ramp_at(15) == 0.5 and ramp_at(300) == 1.0
    old = [node(slot, free=0.3) for slot in range(3)]
    early = share_by_slot([*old, node(3, free=1.0, ramp=ramp_at(0))])
    late = share_by_slot([*old, node(3, free=1.0, ramp=ramp_at(60))])
    assert early[3] < 0.15 < late[3]


def test_the_same_host_comes_first_while_it_has_headroom() -> None:
    others = [node(1, free=0.9), node(2, free=0.9)]
    assert share_by_slot([node(0, "mine", free=0.2), *others], boot_id="mine")[0] == 1.0
    assert share_by_slot([node(0, "mine", free=0.01), *others], boot_id="mine")[0] < 0.3
    full = [node(slot, f"h{slot}", free=0.0) for slot in range(3)]
    assert share_by_slot(full, boot_id="h2")[2] == 1.0, "all full: local is as good as any, and near"
    assert share_by_slot([node(0, "mine", ramp=0.2), *others], boot_id="mine")[0] < 0.5, "it still joins"
    assert share_by_slot([node(0, "mine", ramp=0.2), node(1, ramp=0.2)], boot_id="mine")[0] == 1.0, "all join"


def test_same_seed_same_choices() -> None:
    nodes = [node(slot) for slot in range(5)]
    runs = [place(Placement(random.Random(11)), keys_for(5000), nodes).codes for _ in range(2)]
    assert np.array_equal(runs[0], runs[1])


def test_a_full_share_counts_as_a_full_node_and_large_shares_draw() -> None:
    shares = share_by_slot([node(0, free=0.0, capacity=8 * GIB), node(1, free=0.9, capacity=GIB)])
    assert shares[1] > 0.8, "room within a small share beats a large share that is used up"
    used_up = share_by_slot([node(0, free=0.0, capacity=9 * GIB), node(1, free=0.0, capacity=GIB)])
    assert used_up[0] > 0.6, "all used up: most to where it has most"
