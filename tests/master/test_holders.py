"""Interned holder sets against plain sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master.holders import HIDDEN, HolderSets, code_of

STEP = st.tuples(
    st.sampled_from(["add", "remove", "hide", "show", "drop"]), st.integers(0, 3), st.integers(0, 2), st.integers(1, 7)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(1, 60))
def test_transitions_equal_set_arithmetic(steps: list[tuple[str, int, int, int]], count: int) -> None:
    sets = HolderSets()
    ids = np.zeros(count, dtype=np.uint32)
    oracle: list[set[int]] = [set() for _ in range(count)]
    for number, (what, slot, tier, mask) in enumerate(steps):
        chosen = np.arange(count) % (number % 3 + 1) == 0
        touched = [held for held, take in zip(oracle, chosen, strict=True) if take]
        mark = code_of(slot, HIDDEN)
        if what == "add":
            ids[chosen] = sets.with_holder(ids[chosen], slot, tier)
            for held in touched:
                held.discard(mark)
                held.add(code_of(slot, tier))
        elif what == "remove":
            ids[chosen] = sets.without_holder(ids[chosen], slot, tier)
            for held in touched:
                held -= {mark, code_of(slot, tier)}
        elif what == "hide":
            ids[chosen] = sets.hidden(ids[chosen], slot)
            for held in touched:
                visible = {code for code in held if code >> 2 == slot and code != mark}
                if visible:
                    held -= visible
                    held.add(mark)
        elif what == "show":
            ids[chosen] = sets.shown(ids[chosen], slot, mask)
            for held in touched:
                if mark in held:
                    held.discard(mark)
                    held.update(code_of(slot, tier) for tier in range(HIDDEN) if mask >> tier & 1)
        else:
            ids = sets.mapping_without_slot(slot)[ids]
            sets.forget_slot(slot)
            for held in oracle:
                held -= {code for code in held if code >> 2 == slot}
        sets.check()
        assert [set(sets.holders(set_id)) for set_id in ids.tolist()] == oracle


def test_routes_prefer_the_asker_host_then_the_faster_tier() -> None:
    sets = HolderSets()
    empty = np.zeros(1, dtype=np.uint32)
    both = sets.with_holder(sets.with_holder(empty, 1, 1), 2, 0)
    hosts = {1: "a", 2: "b"}
    assert sets.routes(hosts, "")[both[0]] == 1 + code_of(2, 0)
    assert sets.routes(hosts, "a")[both[0]] == 1 + code_of(1, 1)
    assert sets.routes({1: "a"}, "b")[both[0]] == 1 + code_of(1, 1)
    assert sets.routes({}, "a")[both[0]] == 0


def test_equal_replicas_share_the_readers() -> None:
    sets = HolderSets()
    ids = np.zeros(1, dtype=np.uint32)
    answers = set()
    for extra in range(2, 10):
        pair = sets.with_holder(sets.with_holder(sets.with_holder(ids, 0, 0), 1, 0), extra, 2)
        answers.add(int(sets.routes({0: "", 1: ""}, "")[pair[0]]))
    assert answers == {1 + code_of(0, 0), 1 + code_of(1, 0)}


def test_hidden_replicas_are_not_routed() -> None:
    sets = HolderSets()
    ids = sets.hidden(sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0), 0)
    assert sets.routes({0: "a"}, "a")[ids[0]] == 0
    assert sets.tiers_of(ids, 0).tolist() == [0]


def test_an_id_with_a_new_meaning_is_announced() -> None:
    sets = HolderSets()
    first = sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0)
    sets.forget_slot(0)
    before = sets.reuses
    assert sets.with_holder(np.zeros(1, dtype=np.uint32), 1, 0) == first
    assert sets.reuses == before + 1
