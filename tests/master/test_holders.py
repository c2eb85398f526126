"""Interned holder sets against plain sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.holders import GHOST, HIDDEN, HolderSets, code_of

STEP = st.tuples(
    st.sampled_from(["add", "remove", "clear", "hide", "show", "drop"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(1, 7),
)


def ghosts(held: set[int]) -> set[int]:
    return {code for code in held if code >= GHOST}


def take(held: set[int], gone: set[int], reason: int | None) -> None:
    """The last holder that goes leaves a ghost, if there is a reason."""
    had = bool(held)
    held -= gone
    if had and not held and reason is not None:
        held.add(GHOST + reason)


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
                held -= {mark, *ghosts(held)}
                held.add(code_of(slot, tier))
        elif what == "remove":
            ids[chosen] = sets.without_holder(ids[chosen], slot, tier, MissReason.EVICTED)
            for held in touched:
                take(held, {mark, code_of(slot, tier)}, MissReason.EVICTED)
        elif what == "clear":
            ids[chosen] = sets.without_holders(ids[chosen], MissReason.REMOVED)
            for held in touched:
                take(held, held - ghosts(held), MissReason.REMOVED)
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
            reason = MissReason.NODE_LOST if mask & 1 else None
            ids = sets.mapping_without_slot(slot, reason)[ids]
            sets.forget_slot(slot)
            for held in oracle:
                take(held, {code for code in held if code >> 2 == slot}, reason)
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


def test_memory_comes_before_the_disk_of_the_same_node() -> None:
    sets = HolderSets()
    both = sets.with_holder(sets.with_holder(np.zeros(1, dtype=np.uint32), 3, 1), 3, 0)
    for host in ("", "a", "b"):
        assert sets.routes({3: "a"}, host)[both[0]] == 1 + code_of(3, 0)
    disk = sets.without_holder(both, 3, 0, MissReason.EVICTED_ROOM)
    assert sets.routes({3: "a"}, "a")[disk[0]] == 1 + code_of(3, 1)


def test_reasons_by_set() -> None:
    sets = HolderSets()
    held = sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0)
    evicted = sets.without_holder(held, 0, 0, 16 * 7 + MissReason.EVICTED_QUOTA)
    hidden = sets.hidden(held, 0)
    reasons = sets.reasons()
    assert reasons[held[0]] == MissReason.UNROUTABLE and reasons[hidden[0]] == MissReason.LOAD_FAILED
    assert reasons[evicted[0]] == MissReason.EVICTED_QUOTA and reasons[0] == MissReason.NEVER_STORED
    assert sets.mark_of(int(evicted[0])) == 16 * 7 + MissReason.EVICTED_QUOTA and sets.mark_of(int(held[0])) is None
