"""The index that clients read, against what is visible: any order of stores, removals, drops, new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstrata.proto.errors import ProtocolError
from kvstrata.proto.keys import Namespace
from kvstrata.storage.arena import dram_arena
from kvstrata.storage.records import VISIBLE, Block
from kvstrata.storage.serving import published as module
from kvstrata.storage.serving.index_memory import shared_memory
from kvstrata.storage.serving.published import Published
from kvstrata.storage.state import NodeState, WriteAsk
from kvstrata.transfer import index_layout as layout
from kvstrata.transfer.shared_index import SharedIndex

from .conftest import SLAB_BYTES, keys

SESSION = b"s" * 16
WIDTHS = (16, 32)
SALTS = ("", "x")

starts = st.integers(0, 300)
counts = st.integers(1, 60)
salts = st.sampled_from(SALTS)
widths = st.sampled_from(range(len(WIDTHS)))


class Reader:
    """A client's map of the index, kept up as the node's tables grow."""

    def __init__(self, published: Published) -> None:
        self._published = published
        head = published.memories[0]
        self.index = SharedIndex(head.share_fd, head.nbytes, 7)

    def caught_up(self) -> SharedIndex:
        for memory in self._published.memories[self.index.memories :]:
            assert self.index.behind
            self.index.add(memory.share_fd, memory.nbytes)
        assert not self.index.behind
        return self.index


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "BUCKETS_MIN", 1)  # so that it grows, and is crowded, with few blocks
        self.patch.setattr(module, "BLOCK_BYTES_FIRST", 1 << 30)
        self.patch.setattr(module, "FEW", 4)
        self.arena = dram_arena(2 * SLAB_BYTES, SLAB_BYTES)
        self.published = Published(7, self.arena.bytes_total * 8, shared_memory)
        self.state = NodeState(self.arena, published=self.published)
        self.reader = Reader(self.published)
        self.namespaces = [Namespace(f"model-{width}", 512, 16, hash_bytes=width) for width in WIDTHS]
        self.handles = [self.state.open_namespace(namespace)[0] for namespace in self.namespaces]
        self.epochs = [0, 0]
        self.scopes: dict[int, None] = {}

    def teardown(self) -> None:
        self.published.close()
        self.arena.close()
        self.patch.undo()

    def hashes(self, which: int, start: int, count: int) -> bytes:
        return keys(range(start, start + count * WIDTHS[which] // 16))

    @rule(salt=salts, which=widths, start=starts, count=counts)
    def store(self, salt: str, which: int, start: int, count: int) -> None:
        ask = WriteAsk(
            self.handles[which], salt, self.hashes(which, start, count), deadline_ms=1000, epoch=self.epochs[which]
        )
        reservation = self.state.reserve(SESSION, ask, 1.0).reservation
        if reservation is not None:
            checksums = [block.generation * 3 for block in reservation.blocks]
            self.state.commit(SESSION, reservation.id, checksums, None, 1.0)

    @rule(salt=salts, which=widths, start=starts, count=counts)
    def remove(self, salt: str, which: int, start: int, count: int) -> None:
        self.state.remove(self.namespaces[which], salt, self.hashes(which, start, count), 1.0)

    @rule(salt=st.sampled_from([*SALTS, None]), which=widths)
    def drop(self, salt: str | None, which: int) -> None:
        self.state.drop(self.namespaces[which].group, salt, 1.0)

    @rule(which=widths)
    def new_weights(self, which: int) -> None:
        self.epochs[which] += 1
        self.state.set_epoch(self.namespaces[which].group, self.epochs[which], 1.0)

    @rule()
    def sweep(self) -> None:
        self.state.expire(2.0)

    @invariant()
    def what_is_found_is_what_is_visible(self) -> None:
        self.state.check()
        self.published.beat(time.monotonic_ns())
        index = self.reader.caught_up()
        live = {}
        for (handle, _), shelf in self.state.inventory.shelves.items():
            if shelf.scope:
                live[shelf.scope] = shelf
                assert index.in_force(shelf.scope)
                self.found_alike(index, shelf.scope, list(shelf.blocks.values()), self.handles.index(handle))
        for scope in self.scopes:
            assert index.in_force(scope) == (scope in live), (
                "a scope that is gone counts, or one that is there does not"
            )
        self.scopes.update(dict.fromkeys(live))

    def found_alike(self, index: SharedIndex, scope: int, blocks: list[Block], which: int) -> None:
        """One by one and all together, and nothing of another scope."""
        width, packed = WIDTHS[which], b"".join(block.hash for block in blocks)
        rows = [index.find(block.hash, scope) for block in blocks]
        together = index.find_all(packed, width, scope)
        assert together.positions.tolist() == [at for at, row in enumerate(rows) if row is not None]
        assert not len(index.changed(together))
        for position, fields in zip(together.positions.tolist(), together.rows, strict=True):
            block, row = blocks[position], rows[position]
            assert block.state == VISIBLE and row is not None and row.words[row.at] == row.digest
            told = (row.slab, row.slot, row.offset, row.generation, row.checksum)
            assert told == (block.slab.index, block.slot, block.offset, block.generation, block.checksum)
            assert told == tuple(int(fields[name]) for name in ("slab", "slot", "offset", "generation", "checksum"))
        assert all((row is None) == (block.place < 0) for row, block in zip(rows, blocks, strict=True))
        assert not any(index.find(block.hash, scope + (1 << layout.SCOPE_BITS)) for block in blocks)


IndexMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestIndex = IndexMachine.TestCase


@pytest.fixture
def filled() -> Iterator[tuple[Published, SharedIndex, list[Block], int]]:
    """200 blocks of one tenant."""
    arena = dram_arena(2 * SLAB_BYTES, SLAB_BYTES)
    published = Published(7, arena.bytes_total, shared_memory)
    state = NodeState(arena, published=published)
    handle, _ = state.open_namespace(Namespace("model", 256, 16))
    got = state.reserve(SESSION, WriteAsk(handle, "", keys(range(200)), deadline_ms=1000), 1.0)
    assert got.reservation is not None
    state.commit(SESSION, got.reservation.id, list(range(200)), None, 1.0)
    published.beat(time.monotonic_ns())
    yield published, Reader(published).caught_up(), got.reservation.blocks, state.inventory.shelves[handle, ""].scope
    published.close()
    arena.close()


@given(which=st.integers(0, 199), others=st.integers(0, 199), words=st.sets(st.integers(0, 7), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_half_of_another_row_is_no_row(which: int, others: int, words: set[int]) -> None:
    """Whichever words of a row are already those of another block, as a reader may see them on any CPU."""
    arena = dram_arena(2 * SLAB_BYTES, SLAB_BYTES)
    published = Published(7, arena.bytes_total, shared_memory)
    try:
        state = NodeState(arena, published=published)
        handle, _ = state.open_namespace(Namespace("model", 256, 16))
        got = state.reserve(SESSION, WriteAsk(handle, "", keys(range(200)), deadline_ms=1000), 1.0)
        assert got.reservation is not None
        state.commit(SESSION, got.reservation.id, list(range(200)), None, 1.0)
        index, blocks = Reader(published).caught_up(), got.reservation.blocks
        scope = state.inventory.shelves[handle, ""].scope
        here, other = (place(published, blocks[each]) for each in (which, others))
        before = index.find_all(blocks[which].hash, 16, scope)
        rows = published.tables[0].words
        changed = any(rows[here + word] != rows[other + word] for word in words)
        for word in words:
            rows[here + word] = rows[other + word]
        found = index.find(blocks[which].hash, scope)
        if changed:
            assert found is None and not len(index.find_all(blocks[which].hash, 16, scope).positions)
        if changed and 7 in words:
            assert index.changed(before).tolist() == [0], "a row that was read before has changed"
    finally:
        published.close()
        arena.close()


def place(published: Published, block: Block) -> int:
    """Of the first word of a block's row."""
    assert len(published.tables) == 1
    return (block.place >> 4) * 8


def test_a_scope_that_is_gone_and_a_node_that_does_not_serve_are_not_in_force(
    filled: tuple[Published, SharedIndex, list[Block], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    published, index, _, scope = filled
    now = time.monotonic_ns()
    assert index.in_force(scope) and not index.in_force(scope + (1 << layout.SCOPE_BITS))
    for beat, fresh in (
        (now - layout.BEAT_MAX_NS - 1, False),
        (now + 10 * layout.BEAT_MAX_NS, False),  # another clock's
        (now, True),
    ):
        published.beat(beat)
        monkeypatch.setattr(time, "monotonic_ns", lambda: now)
        assert index.in_force(scope) == fresh
    published.stop()
    assert not index.in_force(scope)


def test_withdrawn_is_seen_by_who_has_found_it(filled: tuple[Published, SharedIndex, list[Block], int]) -> None:
    published, index, blocks, scope = filled
    row, rows = index.find(blocks[5].hash, scope), index.find_all(keys(range(200)), 16, scope)
    assert row is not None and len(rows.positions) == 200
    published.withdraw(blocks[5])
    assert row.words[row.at] != row.digest and index.changed(rows).tolist() == [5]
    assert index.find(blocks[5].hash, scope) is None


def test_memory_that_is_no_index_is_refused(filled: tuple[Published, SharedIndex, list[Block], int]) -> None:
    published, *_ = filled
    head, table = published.memories[:2]
    with pytest.raises(ProtocolError, match="another layout, or of another start"):
        SharedIndex(head.share_fd, head.nbytes, 8)
    with pytest.raises(ProtocolError, match="has 4096 bytes"):
        SharedIndex(head.share_fd, 4096, 7)
    with pytest.raises(ProtocolError, match="a table of the shared index"):
        SharedIndex(head.share_fd, head.nbytes, 7).add(table.share_fd, table.nbytes - 64)
    index = SharedIndex(head.share_fd, head.nbytes, 7)
    with pytest.raises(ProtocolError, match="more than"):
        for _ in range(layout.TABLES_MAX + 1):
            index.add(table.share_fd, table.nbytes)
    assert index.memories == 1 + layout.TABLES_MAX


def test_it_stays_within_its_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny blocks would want more rows than that: those that find none are read by asking."""
    monkeypatch.setattr(module, "BLOCK_BYTES_FIRST", 1 << 20)
    arena = dram_arena(4 * SLAB_BYTES, SLAB_BYTES)
    published = Published(7, arena.bytes_total)
    state = NodeState(arena, published=published)
    handle, _ = state.open_namespace(Namespace("tiny", 64, 16))
    for start in range(0, 3000, 500):
        got = state.reserve(
            SESSION, WriteAsk(handle, "", keys(range(start, start + 500)), b"", start, deadline_ms=1000), 1.0
        )
        assert got.reservation is not None
        state.commit(SESSION, got.reservation.id, [0] * 500, None, 1.0)
    state.check()
    first = module.BUCKETS_MIN * layout.BUCKET_BYTES
    assert published.nbytes <= max(first, arena.bytes_total // module.ARENA_SHARE)
    assert state.inventory.visible > published.blocks > 0
    published.close()
    arena.close()


def test_many_are_spread_as_one_is() -> None:
    packed = np.random.default_rng(5).bytes(32 * 50)
    for width in WIDTHS:
        found = layout.keys_of(packed, width)
        spread = layout.spread_all(found, 77)
        for at in range(len(found)):
            key = layout.key_of(packed[at * width : (at + 1) * width])
            assert key == tuple(int(word) for word in found[at]) and layout.spread(*key, 77) == int(spread[at])
