"""A snapshot of the directory: every replica once, in parts of bounded size, made outside the lock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.master import messages as m
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.holders import HIDDEN
from kvstrata.master.directory.table import BEGIN
from kvstrata.master.hub import Hub
from kvstrata.master.index import scan as module
from kvstrata.master.index.log import Entry
from kvstrata.master.state import MasterState
from kvstrata.proto.keys import Namespace

NS = Namespace("g", block_bytes=64, block_tokens=4)
NODES = 5


class Lock:
    """A hub that knows whether its lock is held."""

    def __init__(self, state: MasterState) -> None:
        self.held = False
        self.state = state

    def read(self, question: Callable[[MasterState, float], Any]) -> Any:
        self.held = True
        try:
            return question(self.state, 0.0)
        finally:
            self.held = False


def filled(blocks: int, seed: int) -> MasterState:
    state, rng = MasterState(0.0, random.Random(seed)), np.random.default_rng(seed)
    state.open_namespace(NS)
    all_of_them = np.frombuffer(rng.bytes(blocks * 16), dtype=np.uint8).reshape(-1, 16)
    for node in range(NODES):
        facts = m.NodeFacts(f"n{node}", 1, channel="x:1", dram_bytes=1 << 30, ssd_bytes=1 << 30)
        (session,) = (c.session for c in state.handle(m.Attach(facts), 0.0) if isinstance(c, m.SendAttached))
        has = tuple(m.Holding(NS, "", tier, all_of_them[rng.random(blocks) < 0.5].tobytes(), 0) for tier in (0, 1))
        state.handle(m.SnapshotPart(session, 0, has, True, True), 0.0)
    for table, _ in state.directory.tables():
        keys, _, _ = state.directory.entries(table, BEGIN, 1 << 20)
        state.directory.hide(0, table, keys[rng.random(len(keys)) < 0.3], 1)
    return state


def oracle(state: MasterState) -> set[tuple[bytes, int, int]]:
    table = only_table(state)
    keys, ids, _ = state.directory.entries(table, BEGIN, 1 << 20)
    return {
        (key.tobytes(), slot, tier)
        for key, set_id in zip(keys, ids.tolist(), strict=True)
        for slot, tier in state.directory.holders_of(set_id)
        if tier != HIDDEN
    }


def only_table(state: MasterState) -> TableKey:
    (table,) = (key for key, _ in state.directory.tables())
    return table


def told(parts: Iterator[list[Entry]]) -> list[tuple[bytes, int, int]]:
    return [
        (each.hashes[start : start + 16], each.slot, each.tier)
        for part in parts
        for each in part
        for start in range(0, len(each.hashes), 16)
    ]


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(0, 50), st.integers(1, 60))
def test_each_replica_is_told_once_in_small_parts(blocks: int, seed: int, bound: int) -> None:
    state = filled(blocks, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REPLICAS_A_PART", bound)
        patch.setattr(module, "BREATH_S", 0.0)
        parts = list(module.scan(cast(Hub, Lock(state)), lambda table: True))
    rows = told(iter(parts))
    assert len(rows) == len(set(rows)) and set(rows) == oracle(state)
    for part in parts:
        held = told(iter([part]))
        assert len(held) <= max(bound, 2 * NODES), "no more, but all of one block"


def test_entries_are_made_when_others_may_have_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, made = Lock(filled(100, 0)), []

    def entry(*fields: Any, **more: Any) -> Entry:
        assert not lock.held
        made.append(Entry(*fields, **more))
        return made[-1]

    monkeypatch.setattr(module, "Entry", entry)
    assert list(module.scan(cast(Hub, lock), lambda table: True)) and made
