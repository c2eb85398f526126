"""Calls of few blocks go another way than those of many: both say the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstrata.master import metrics as metrics_module
from kvstrata.master import placement as placement_module
from kvstrata.master import replies as replies_module
from kvstrata.master.candidates import Candidate, Candidates, slot_mask
from kvstrata.master.content import lookups as lookups_module
from kvstrata.master.content.lookups import NO_REASONS, LookedUp, left, reasons_of
from kvstrata.master.content.misses import MissReason
from kvstrata.master.directory import directory as directory_module
from kvstrata.master.directory import table as table_module
from kvstrata.master.directory.directory import Directory, Found, TableKey
from kvstrata.master.directory.probing import FEW, Keys
from kvstrata.master.messages import NodeFacts
from kvstrata.master.metrics import Metrics
from kvstrata.master.placement import INTENT_S, Placed, Placement
from kvstrata.master.replies import lookup_ok, place_ok

SCOPE = np.array([[3, 9]], dtype=np.uint64)
SLOTS = 4
NODES = {slot: NodeFacts(f"n{slot}", 1, channel=f"h:{slot}", unix_path=f"/run/{slot}") for slot in range(SLOTS)}
CODES = st.integers(0, 4 * SLOTS)
CALLS = st.tuples(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 0, 0, 2, 7])), max_size=FEW),  # a hash, and where it is
    st.integers(0, 2),  # the writer
    st.sets(st.integers(0, SLOTS - 1)),  # active nodes
    st.sampled_from([0.0, 0.4, INTENT_S / 2, INTENT_S, 2 * INTENT_S]),  # seconds since the call before
    st.booleans(),  # whether what was placed arrives
)


@contextmanager
def as_many(*modules: ModuleType) -> Iterator[None]:
    """However few blocks there are, they go the way of many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "FEW", -1)
        yield


@given(calls=st.lists(CALLS, max_size=12), seed=st.integers(0, 100))
def test_placement(calls: list[tuple[list[tuple[int, int]], int, set[int], float, bool]], seed: int) -> None:
    few, many = Placement(random.Random(seed)), Placement(random.Random(seed))
    now = 1000.0
    for blocks, writer, slots, elapsed, arrives in calls:
        now += elapsed
        keys = keys_of([number for number, _ in blocks])
        present = np.array([code for _, code in blocks], dtype=np.uint16)
        candidates = Candidates.of([Candidate(slot, f"host{slot % 2}", 50 + slot, 100) for slot in sorted(slots)])
        given_few = few.place(keys, SCOPE, present, candidates, "host1", now, writer)
        with as_many(placement_module, table_module):
            given_many = many.place(keys, SCOPE, present, candidates, "host1", now, writer)
            new = dict(given_many.new_blocks())
            awaited = many.in_flight(keys, SCOPE, slot_mask(slots), now)
        assert given_few.codes.tolist() == given_many.codes.tolist()
        assert given_few.states.tolist() == given_many.states.tolist()
        assert dict(given_few.new_blocks()) == new
        in_flight = few.in_flight(keys, SCOPE, slot_mask(slots), now)
        assert in_flight.tolist() == awaited.tolist() and in_flight.dtype == awaited.dtype
        if arrives:
            few.fulfilled(keys, SCOPE)
            many.fulfilled(keys, SCOPE)
        assert few.intents == many.intents
        few.check()


CHANGES = st.tuples(
    st.sampled_from(["add", "remove", "hide", "drop slot", "route", "turn"]),
    st.integers(0, SLOTS - 1),
    st.integers(0, 2),  # a tier
    st.sets(st.integers(0, 8), min_size=1),
)


@example(changes=[("add", 0, 0, set(range(9))), ("add", 2, 0, {0, 1, 2, 3, 4})], asked=[*range(1, 9)], host=1)
@example(changes=[("add", 0, 0, set(range(9))), ("add", 2, 0, {0})], asked=[*range(1, 9)], host=1)
@given(changes=st.lists(CHANGES, max_size=15), asked=st.lists(st.integers(0, 9), max_size=FEW), host=st.integers(0, 2))
def test_lookups(changes: list[tuple[str, int, int, set[int]]], asked: list[int], host: int) -> None:
    directory, table = Directory(), TableKey(0, 0, "tenant")
    for _ in range(SLOTS):
        directory.take_slot()
    directory.route({slot: f"host{slot % 2}" for slot in range(SLOTS)})
    for at, (what, slot, tier, numbers) in enumerate(changes):
        keys = keys_of(sorted(numbers))
        match what:
            case "add":
                directory.add(slot, table, tier, keys)
            case "remove":
                directory.remove(slot, table, tier, keys)
            case "hide":
                directory.hide(slot, table, keys, 1)
            case "drop slot":
                directory.drop_slot(slot)
                assert directory.take_slot() == slot
            case "route":
                directory.route({other: f"host{other % 2}" for other in range(SLOTS) if other != slot})
            case "turn":
                directory.turn(float(at))
    few = directory.lookup(0, 0, 1, "tenant", keys_of(asked), f"host{host}")
    with as_many(directory_module, table_module):
        many = directory.lookup(0, 0, 1, "tenant", keys_of(asked), f"host{host}")
    assert_same(astuple(few), astuple(many))


@given(changes=st.lists(CHANGES, max_size=15), asked=st.lists(st.integers(0, 9), max_size=FEW), buried=st.booleans())
def test_reasons(changes: list[tuple[str, int, int, set[int]]], asked: list[int], buried: bool) -> None:
    directory, table, keys = Directory(), TableKey(0, 0, "tenant"), keys_of(asked)
    for _ in range(SLOTS):
        directory.take_slot()
    directory.route(dict.fromkeys(range(SLOTS - 1), ""))
    directory.add(0, table, 0, keys_of([8, 9]))
    if buried:
        directory.drop_tables(lambda key: key == table, MissReason.DROPPED, 1.0)
    for what, slot, tier, numbers in changes:
        change = {"remove": directory.remove, "drop slot": directory.remove}.get(what, directory.add)
        change(slot, table, tier, keys_of(sorted(numbers)))
    found = directory.lookup(0, 0, 1, "tenant", keys)
    found = replace(found, present=found.present & (np.arange(len(keys)) % 3 > 0))  # a sister shard is away
    few = reasons_of(directory, table, keys, found)
    gone = left(*few)
    with as_many(directory_module, table_module, lookups_module):
        many = reasons_of(directory, table, keys, found)
        assert_same((*few, *gone), (*many, *left(*many)))


def assert_same(few: Sequence[object], many: Sequence[object]) -> None:
    for one, other in zip(few, many, strict=True):
        assert np.array_equal(one, other) and np.asarray(one).dtype == np.asarray(other).dtype  # type: ignore[arg-type]


def keys_of(numbers: list[int]) -> Keys:
    return np.array([(number, number * 7) for number in numbers], dtype=np.uint64).reshape(-1, 2)


@given(codes=st.lists(CODES, max_size=FEW), states=st.lists(st.integers(0, 3), min_size=FEW, max_size=FEW))
def test_answers(codes: list[int], states: list[int]) -> None:
    array = np.array(codes, dtype=np.uint16)
    found = Found(array, array != 0, 0, 0, np.zeros(len(codes), dtype=np.uint32))
    placed = Placed(array, np.array(states[: len(codes)], dtype=np.uint8))
    answer = LookedUp(found, False, NO_REASONS)
    few = lookup_ok(answer, 1, NODES), place_ok(placed, NODES)
    with as_many(replies_module):
        assert few == (lookup_ok(answer, 1, NODES), place_ok(placed, NODES))


@given(codes=st.lists(CODES, max_size=FEW))
def test_counters(codes: list[int]) -> None:
    array = np.array(codes, dtype=np.uint16)
    reasons = np.arange(codes.count(0), dtype=np.uint8) % 3
    answer = LookedUp(Found(array, array != 0, 0, 0, np.zeros(len(codes), dtype=np.uint32)), False, reasons)
    few, many = Metrics(), Metrics()
    few.looked_up(answer, 0.001)
    with as_many(metrics_module):
        many.looked_up(answer, 0.001)
    assert few.counted() == many.counted()
