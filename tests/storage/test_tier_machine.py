"""Two tiers against an oracle, with real bytes: whatever happens while blocks move, a read is right or a miss."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.tiers.moves import Move, Read
from kvstrata.storage.tiers.recovery import recover

from .conftest import holds, key, keys
from .memory_store import MemoryStore
from .tier_node import TierNode

NUMBERS = st.lists(st.integers(0, 39), min_size=1, max_size=10, unique=True)
PICK = st.integers(0, 1 << 16)


class Tiers(RuleBasedStateMachine):
    """``truth``: the one version that a block may have, by number; what it lacks must be found nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.node = TierNode(2, 2, block_bytes=8192)
        self.truth: dict[int, int] = {}
        self.version = 0
        self.moves: list[Move] = []
        self.reads: list[tuple[Read, list[int]]] = []
        self.epoch = 0

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        self.version += 1
        status = self.node.store(numbers, self.version, epoch=self.epoch)
        self.truth.update((n, self.version) for n, s in zip(numbers, status, strict=True) if s == BlockStatus.STORED)

    @rule(start=st.integers(0, 35), count=st.integers(1, 16))
    def grow(self, start: int, count: int) -> None:
        """A piece of one chain of all numbers: it may be longer than the memory."""
        numbers = list(range(start, min(start + count, 40)))
        parent = key(start - 1) if start else b""
        self.version += 1
        status = self.node.store(numbers, self.version, parent=parent, first_index=start, epoch=self.epoch)
        self.truth.update((n, self.version) for n, s in zip(numbers, status, strict=True) if s == BlockStatus.STORED)

    @rule(nbytes=st.sampled_from([4096, 16384, 1 << 20]), everything=st.booleans())
    def begin_demotion(self, nbytes: int, everything: bool) -> None:
        move = self.node.moves.demotions(nbytes, self.node.now, everything=everything)
        if move is not None:
            self.moves.append(move)

    @rule(numbers=NUMBERS)
    def begin_read(self, numbers: list[int]) -> None:
        read = self.node.begin_read(numbers)
        if read is not None:
            self.moves.extend(read.moves)
            self.reads.append((read, numbers))

    @rule(numbers=NUMBERS)
    def prefetch(self, numbers: list[int]) -> None:
        _, moves = self.node.moves.prefetch(self.node.handle, "", [key(n) for n in numbers], self.node.now)
        self.moves.extend(moves)

    @precondition(lambda self: self.moves)
    @rule(pick=PICK, works=st.booleans(), bad=st.sampled_from([None, BlockStatus.CORRUPT, BlockStatus.READ_ERROR]))
    def finish_move(self, pick: int, works: bool, bad: BlockStatus | None) -> None:
        move = self.moves.pop(pick % len(self.moves))
        if bad is not None and move.up:
            self.node.store_.fails = {move.source[0].hash: bad}
        self.node.finish(move, works)
        self.node.store_.fails = {}

    @precondition(lambda self: self.reads)
    @rule(pick=PICK)
    def end_read(self, pick: int) -> None:
        """It may have all it waited for, or have given up before."""
        read, numbers = self.reads.pop(pick % len(self.reads))
        arrived = [block.hash for move in read.waits if move.over and move.lease for block in move.lease.blocks]
        visible = [n for n in numbers if key(n) in arrived and n in self.truth]
        got = self._acquire(numbers)
        assert set(visible) <= got, "what has arrived is held for who waits for it"
        self.node.moves.end_read(read)

    @rule(numbers=NUMBERS)
    def acquire(self, numbers: list[int]) -> None:
        self._acquire(numbers)

    def _acquire(self, numbers: list[int]) -> set[int]:
        found = self.node.state.acquire(
            self.node.SESSION, self.node.handle, "", keys(numbers), 2.0, self.node.now, self.epoch
        )
        loaded = [n for n, s in zip(numbers, found.status, strict=True) if s == BlockStatus.LOADED]
        for n, block in zip(loaded, found.blocks, strict=True):
            assert n in self.truth, f"{n} was taken away and is back"
            assert holds(block, self.truth[n]), f"{n} has other bytes"
        return set(loaded)

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        removal = self.node.ssd.arena.next_generation()
        self.node.remove(numbers)
        self.node.store_.record([_removal(self.node, numbers, removal)])
        for n in numbers:
            self.truth.pop(n, None)

    @rule()
    def bump(self) -> None:
        self.epoch += 1
        self.node.state.set_epoch("model", self.epoch, self.node.now)
        self.truth.clear()

    @rule(limit=st.sampled_from([None, 0, 8 * 8192, 30 * 8192]))
    def share(self, limit: int | None) -> None:
        self.node.share("", None if limit is None else limit // 2, limit)

    @rule()
    def tend(self) -> None:
        for inventory in self.node.state.tiers():
            inventory.sweep(100)
            inventory.drain(16384)

    @rule(seconds=st.sampled_from([1.0, 5.0, 130.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.node.now += seconds
        self.node.state.expire(self.node.now)
        self.node.moves.expire(self.node.now)

    @rule()
    def crash(self) -> None:
        """All that is in memory goes; what had been flushed and not taken away comes back."""
        before = self.node
        flushed = set(before.on_ssd(range(40)))
        before.arena.close()
        self.node = TierNode(2, store=MemoryStore(2, before.store_.disk), block_bytes=8192)
        self.node.now = before.now
        recover(self.node.store_, self.node.state, self.node.now)
        self.node.state.set_epoch("model", self.epoch, self.node.now)
        assert flushed <= set(self.node.on_ssd(range(40))) <= self.truth.keys()
        self.moves, self.reads = [], []

    @invariant()
    def agrees(self) -> None:
        self.node.check()
        assert set(self.node.on_ssd(range(40))) <= self.truth.keys(), "on SSD, and nobody may have it"
        assert set(self.node.present(range(40))) <= self.truth.keys()

    def teardown(self) -> None:
        for read, _ in self.reads:
            self.node.moves.end_read(read)
        for move in self.moves:
            self.node.finish(move)
        self.node.state.inventory.sweep(1000)
        self.node.ssd.sweep(1000)
        self.node.assert_quiet()
        self.node.arena.close()


def _removal(node: TierNode, numbers: list[int], below: int) -> Any:
    from kvstrata.storage.ssd.base import Removal

    return Removal(below, node.namespace, keys(numbers), salt="")


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
