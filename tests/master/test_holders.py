"""Interned holder sets against plain sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory.holders import GHOST, HIDDEN, HolderSets, code_of

STEP = st.tuples(
    st.sampled_from(["add", "remove", "clear", "hide", "show", "drop", "sweep"]),
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
        elif what == "drop":
            reason = MissReason.NODE_LOST if mask & 1 else None
            sets.drop_slot(slot, reason)
            for held in oracle:
                take(held, {code for code in held if code >> 2 == slot}, reason)
        else:
            retired = sets.retired
            ids = sets.current(ids)
            sets.forget(retired)
        sets.check()
        assert [set(sets.holders(set_id)) for set_id in ids.tolist()] == oracle
        assert [set(sets.holders(set_id)) for set_id in sets.current(ids).tolist()] == oracle
        assert not sets.retired.intersection(sets.current(ids).tolist())


def test_hidden_replicas_have_no_tier() -> None:
    sets = HolderSets()
    ids = sets.hidden(sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0), 0)
    assert sets.tiers_of(ids, 0).tolist() == [0]


def test_an_id_with_a_new_meaning_is_announced() -> None:
    sets = HolderSets()
    first = sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0)
    before = sets.reuses
    sets.drop_slot(0)
    assert sets.reuses == before + 1, "it stands for another set at once"
    sets.forget(sets.retired)
    before = sets.reuses
    assert sets.with_holder(np.zeros(1, dtype=np.uint32), 1, 0) == first
    assert sets.reuses == before + 1


def test_a_change_that_changes_nothing_leaves_a_retired_id_as_it_is() -> None:
    sets = HolderSets()
    both = sets.with_holder(sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0), 1, 0)
    sets.drop_slot(0)
    assert sets.with_holder(both, 1, 0) == both and both[0] in sets.retired
    assert sets.current(both) != both and sets.with_holder(both, 1, 1)[0] not in sets.retired


def test_reasons_by_set() -> None:
    sets = HolderSets()
    held = sets.with_holder(np.zeros(1, dtype=np.uint32), 0, 0)
    evicted = sets.without_holder(held, 0, 0, 16 * 7 + MissReason.EVICTED_QUOTA)
    hidden = sets.hidden(held, 0)
    reasons = sets.reasons()
    assert reasons[held[0]] == MissReason.UNROUTABLE and reasons[hidden[0]] == MissReason.LOAD_FAILED
    assert reasons[evicted[0]] == MissReason.EVICTED_QUOTA and reasons[0] == MissReason.NEVER_STORED
    assert sets.mark_of(int(evicted[0])) == 16 * 7 + MissReason.EVICTED_QUOTA and sets.mark_of(int(held[0])) is None
