"""A mirror fed by the log equals the directory, whatever happened in between.

Nodes store, evict, are lost, restart and flap; readers report misses; tenants, weights and single blocks go; the log is
short, so that a slow watcher is reset; snapshots are read in pieces while all this goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.client.index_mirror import IndexMirror, TableName
from kvstrata.master import messages as m
from kvstrata.master.directory.directory import TableKey
from kvstrata.master.directory.table import BEGIN
from kvstrata.master.index import log as log_module
from kvstrata.master.index import scan as scan_module
from kvstrata.master.index.converters import change_message, table_message
from kvstrata.master.index.log import LINGER_S, Entry, Kind
from kvstrata.master.state import MasterState
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus

NS = Namespace("g", block_bytes=64, block_tokens=4, shard_count=2)
SALTS = ("", "t")
NAMES = ("a", "b", "c")
BLOCKS = range(10)


def packed(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(16, "little") for block in blocks)


class _Bell:
    def set(self) -> None:
        pass


class Watcher:
    """What the service does, one step at a time: it may stand still while the log goes on."""

    def __init__(self, state: MasterState) -> None:
        self.mirror = IndexMirror()
        self.bell = _Bell()
        self._state = state
        state.index.join(self.bell)
        self._steps: Iterator[None] = iter(())
        self.sequence = 0
        self.until = 0
        self._reset()

    def _say(self, entries: list[Entry], **fields: Any) -> None:
        changes = [change for each in entries if (change := change_message(each, self._table)) is not None]
        self.mirror.apply(control.IndexMessage(epoch=1, sequence=self.sequence, changes=changes, **fields))
        self.mirror.check()

    def _table(self, key: TableKey) -> control.IndexTable | None:
        group = self._state.index.group(key.group)
        return None if group is None else table_message(key, group)

    def _reset(self) -> None:
        self.sequence = self._state.index.sequence
        self._say([], reset="test")
        self._steps = self._snapshot()

    def _snapshot(self) -> Iterator[None]:
        self._say([Entry(Kind.NODES, nodes=self._state.index.nodes())])
        yield
        for table in [key for key, _ in self._state.directory.tables()]:
            cursor: Any = BEGIN
            while cursor is not None:
                read, cursor = scan_module.piece(self._state.directory, table, cursor)
                yield  # entries are made of it later, when the directory has gone on
                for entries in read.parts():
                    self._say(entries)
                    yield
        self.until = self._state.index.sequence

    def step(self, count: int) -> bool:
        """False when there is nothing more to hear for now."""
        try:
            next(self._steps)
            return True
        except StopIteration:
            pass
        entries = self._state.index.since(self.sequence, count, 1 << 20)
        if entries is None:
            self._reset()
            return True
        self.sequence += len(entries)
        now_live = self.mirror._coming is not None and self.sequence >= self.until
        self._say(entries, live=now_live)
        return bool(entries) or now_live

    def resume(self, now: float) -> None:
        """Cut off, and back with the sequence it had: a new stream on the same log."""
        self._state.index.leave(self.bell, now)
        self._state.index.join(self.bell)
        if not self.mirror.resumable:
            self._reset()


class World(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.now, self.steps = 0.0, 0
        self.state = MasterState(self.now, random.Random(seed))
        self.sessions: dict[str, int] = {}
        self.seq: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.incarnation = dict.fromkeys(NAMES, 0)
        self.epoch = 0
        self.handle = self.state.open_namespace(NS)[0].handle
        self.watchers = [Watcher(self.state)]
        for name in NAMES[:2]:
            self.attach(name)

    def tell(self, event: m.Event) -> list[m.Command]:
        return self.state.handle(event, self.now)

    @rule(name=st.sampled_from(NAMES))
    def attach(self, name: str) -> None:
        self.incarnation[name] += 1
        facts = m.NodeFacts(name, self.incarnation[name], channel="x:1", dram_bytes=1 << 20, ssd_bytes=1 << 20)
        commands = self.tell(m.Attach(facts, epochs=((NS.group, self.epoch),) if self.epoch else ()))
        self.sessions[name] = next(c.session for c in commands if isinstance(c, m.SendAttached))
        self.seq[name] = 0

    @rule(
        name=st.sampled_from(NAMES),
        blocks=st.sets(st.sampled_from(BLOCKS)),
        salt=st.sampled_from(SALTS),
        shard=st.integers(0, 1),
        tier=st.integers(0, 1),
        last=st.booleans(),
    )
    def snapshot(self, name: str, blocks: set[int], salt: str, shard: int, tier: int, last: bool) -> None:
        if name in self.sessions:
            holding = m.Holding(self.shard(shard), salt, tier, packed(*blocks), self.epoch)
            holdings = (holding,) if blocks else ()
            self.tell(m.SnapshotPart(self.sessions[name], self.seq[name], holdings, True, last))

    @rule(
        name=st.sampled_from(NAMES),
        blocks=st.sets(st.sampled_from(BLOCKS), min_size=1),
        added=st.booleans(),
        salt=st.sampled_from(SALTS),
        shard=st.integers(0, 1),
        tier=st.integers(0, 1),
    )
    def delta(self, name: str, blocks: set[int], added: bool, salt: str, shard: int, tier: int) -> None:
        if name in self.sessions:
            self.seq[name] += 1
            change = m.Change(added, self.shard(shard), salt, tier, packed(*blocks), self.epoch)
            self.tell(m.DeltaBatch(self.sessions[name], self.seq[name], (change,)))

    @rule(name=st.sampled_from(NAMES), blocks=st.sets(st.sampled_from(BLOCKS), min_size=1), lag=st.integers(0, 3))
    def miss(self, name: str, blocks: set[int], lag: int) -> None:
        seq = self.seq[name] + lag
        incarnation = self.incarnation[name]
        self.tell(
            m.MissReport(
                self.handle, "", packed(*blocks), name, incarnation, seq, self.epoch, BlockStatus.MISSING, False
            )
        )

    @rule(name=st.sampled_from(NAMES))
    def detach(self, name: str) -> None:
        if name in self.sessions:
            self.tell(m.Detach(self.sessions.pop(name), "test"))

    @rule(beating=st.sets(st.sampled_from(NAMES)), seconds=st.sampled_from([1.0, 4.0, 12.0, LINGER_S + 1]))
    def wait(self, beating: set[str], seconds: float) -> None:
        self.now += seconds
        for name in beating & self.sessions.keys():
            self.tell(m.Heartbeat(name, self.incarnation[name]))
        self.tell(m.Tick())
        for name in NAMES:
            node = self.state.nodes.get(name)
            if node is None or node.attachment is None:
                self.sessions.pop(name, None)

    @rule()
    def bump(self) -> None:
        self.epoch = self.state.bump(NS.group, self.now)[0].epoch

    @rule(salt=st.sampled_from([*SALTS, None]), group=st.sampled_from(["", NS.group]))
    def drop(self, salt: str | None, group: str) -> None:
        self.state.drop(group, salt, False, self.now)

    @rule(blocks=st.sets(st.sampled_from(BLOCKS), min_size=1), salt=st.sampled_from(SALTS))
    def remove(self, blocks: set[int], salt: str) -> None:
        self.state.remove(NS, salt, packed(*blocks), self.now)

    @rule(which=st.integers(0, 1), count=st.integers(1, 5), steps=st.integers(1, 4))
    def hear(self, which: int, count: int, steps: int) -> None:
        watcher = self.watchers[which % len(self.watchers)]
        for _ in range(steps):
            watcher.step(count)

    @precondition(lambda self: len(self.watchers) < 2)
    @rule()
    def watch_too(self) -> None:
        self.watchers.append(Watcher(self.state))

    @rule()
    def cut_off(self) -> None:
        self.watchers[0].resume(self.now)

    @invariant()
    def converges(self) -> None:
        """Once it has heard all, a mirror says what the directory says."""
        self.steps += 1
        if self.steps % 4 == 0:
            self.state.check()
        for watcher in self.watchers:
            if self.state.index.sequence != watcher.sequence or not watcher.mirror.resumable:
                continue
            same(watcher.mirror, self.state)

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.check()
        for watcher in getattr(self, "watchers", []):
            while watcher.step(100):
                pass
            assert watcher.mirror.resumable
            same(watcher.mirror, self.state)

    @staticmethod
    def shard(number: int) -> Namespace:
        return Namespace(NS.group, NS.block_bytes, NS.block_tokens, NS.hash_bytes, number, NS.shard_count)


def same(mirror: IndexMirror, state: MasterState) -> None:
    directory, groups = state.directory, state.namespaces
    expected: dict[TableName, dict[bytes, tuple[int, ...]]] = {}
    for table, _ in directory.tables():
        group = groups.by_number(table.group)
        assert group is not None
        keys, ids, after = directory.entries(table, BEGIN, 1 << 20)
        while after is not None:  # entries were moving to other slots
            keys, ids, after = directory.entries(table, after, 1 << 20)
        held = {
            key.tobytes(): tuple(4 * s + t for s, t in directory.holders_of(i) if t != 3)
            for key, i in zip(keys, ids.tolist(), strict=True)
        }
        name = TableName(group.name, group.epoch, table.shard, table.salt)
        expected[name] = {key: codes for key, codes in held.items() if codes}
    assert dict(mirror.tables()) == {name: table for name, table in expected.items() if table}
    facts = state.membership.slot_facts
    assert {n.slot: (n.node_id, n.incarnation) for n in mirror.nodes} == {
        slot: (f.node_id, f.incarnation) for slot, f in facts.items()
    }
    number = groups.named(NS.group).number
    for salt in SALTS:
        asked = packed(*BLOCKS)
        found = directory.lookup(number, 0, NS.shard_count, salt, fold(asked, 16))
        answer = mirror.prefix(NS, salt, asked)
        assert answer.blocks == found.hit_blocks
        for slot, fact in facts.items():
            ids = directory.living_ids(TableKey(number, 0, salt), fold(asked, 16))
            tiers = directory.holders.tiers_of(ids, slot)
            has = np.append(tiers != 0, False)
            assert answer.by_node.get(fact.node_id, 0) == int(np.argmin(has))


@pytest.fixture(autouse=True)
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "LOG_ENTRIES_MAX", 12)
    monkeypatch.setattr(scan_module, "SLOTS_A_PIECE", 16)
    monkeypatch.setattr(scan_module, "REPLICAS_A_PART", 3)


TestMirror = World.TestCase
TestMirror.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
