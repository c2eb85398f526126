"""Copies between two nodes against an oracle, with real bytes, while blocks are removed, outdated, evicted and moved.

The source may hear of a removal or of new weights long after the target: what is gone must not come back by a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import BlockStatus, CopyReason, Tier
from kvstrata.storage.copying import intake
from kvstrata.storage.copying.book import Copy
from kvstrata.storage.copying.intake import CopyIntake, Piece, Told
from kvstrata.storage.records import VISIBLE, Block
from kvstrata.storage.tiers.movers import header
from kvstrata.transfer.base import Endpoint
from tests.storage.conftest import fill, holds, key, keys, payload
from tests.storage.tier_node import TierNode

COUNT = 12
NUMBERS = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=8, unique=True)
#: What clears everything is done seldom.
SELDOM = st.integers(0, 7).map(lambda draw: draw == 7)
PICK = st.integers(0, 1 << 16)
BLOCK_BYTES = 8192
STORED = int(BlockStatus.STORED)


@dataclass(eq=False)
class Asked:
    """One piece on its way: what the source said and sent; then ``piece``, once it has slots."""

    copy: Copy
    positions: list[int]
    told: list[Told]
    data: dict[bytes, bytes]
    piece: Piece | None = None
    views: dict[bytes, bytes] = field(default_factory=dict)


def checksum(number: int, version: int) -> int:
    return xxhash.xxh3_64_intdigest(payload(key(number), version, BLOCK_BYTES))


class Copies(RuleBasedStateMachine):
    """``truth``: the one version that a block may have anywhere. ``unheard``: what the source has not heard of yet."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(intake, "PIECE_BYTES", 3 * BLOCK_BYTES)
        self.source, self.target = TierNode(2, 3, block_bytes=BLOCK_BYTES), TierNode(2, 3, block_bytes=BLOCK_BYTES)
        self.intake = CopyIntake(self.target.state, self.target.moves)
        self.truth: dict[int, int] = {}
        self.version = self.epoch = self.command = 0
        self.unheard: set[int] = set()
        self.unheard_drops: list[str | None] = []
        self.source_epoch = 0
        self.orders: dict[int, Copy] = {}
        self.answers: dict[int, control.CopyDone] = {}
        self.asked: list[Asked] = []

    # ------------------------------------------------------------------ what clients do

    def _store(self, node: TierNode, numbers: list[int]) -> None:
        """By content: who stores a block that is somewhere stores the same bytes."""
        for number in numbers:
            behind = self.source_epoch != self.epoch or bool(self.unheard_drops)
            if number in self.unheard or (node is self.source and behind):
                continue
            version = self.truth.get(number)
            if version is None:
                self.version += 1
                version = self.version
            got = node.reserve(
                [number], parent=key(number - 1) if number else b"", first_index=number, epoch=self.epoch
            )
            if got.reservation is None:
                continue
            for block in got.reservation.blocks:
                fill(block, version)
            status = node.state.commit(node.SESSION, got.reservation.id, [checksum(number, version)], None, node.now)
            if status[0] == STORED:
                self.truth[number] = version

    @rule(numbers=NUMBERS)
    def store_at_source(self, numbers: list[int]) -> None:
        self._store(self.source, sorted(numbers))

    @rule(numbers=NUMBERS)
    def store_at_target(self, numbers: list[int]) -> None:
        self._store(self.target, sorted(numbers))

    @rule(numbers=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=2, unique=True))
    def remove(self, numbers: list[int]) -> None:
        """The target hears of it now, the source later."""
        self.target.remove(numbers)
        for number in numbers:
            self.truth.pop(number, None)
        self.unheard.update(numbers)

    @precondition(lambda self: self.orders.keys() - self.answers.keys())
    @rule(pick=PICK)
    def remove_what_waits(self, pick: int) -> None:
        waiting = [copy for number, copy in self.orders.items() if number not in self.answers]
        copy = waiting[pick % len(waiting)]
        numbers = [n for n in range(COUNT) if key(n) in copy.hashes]
        self.remove([numbers[pick % len(numbers)]])

    @rule()
    def source_hears(self) -> None:
        if self.unheard:
            self.source.remove(sorted(self.unheard))
            self.unheard.clear()
        for salt in self.unheard_drops:
            self.source.state.drop("", salt, self.source.now)
        self.unheard_drops.clear()
        self.source.state.set_epoch("model", self.epoch, self.source.now)
        self.source_epoch = self.epoch

    @rule(does=SELDOM)
    def bump(self, does: bool) -> None:
        if not does:
            return
        self.epoch += 1
        self.target.state.set_epoch("model", self.epoch, self.target.now)
        self.truth.clear()

    @precondition(lambda self: self.target.state.copies.waits)
    @rule(salt=st.sampled_from([None, "", "other"]))
    def drop(self, salt: str | None) -> None:
        """As a removal."""
        self.target.state.drop("", salt, self.target.now)
        self.unheard_drops.append(salt)
        if salt != "other":
            self.truth.clear()

    @rule(limit=st.sampled_from([None, None, 0, 6 * BLOCK_BYTES]))
    def share(self, limit: int | None) -> None:
        self.target.share("", limit, limit)

    # ------------------------------------------------------------------ what the node does

    @rule(nbytes=st.sampled_from([BLOCK_BYTES, 1 << 20]), at_source=st.booleans())
    def demote(self, nbytes: int, at_source: bool) -> None:
        (self.source if at_source else self.target).demote(nbytes)

    @rule(numbers=NUMBERS)
    def read(self, numbers: list[int]) -> None:
        found = self.target.state.acquire(
            self.target.SESSION, self.target.handle, "", keys(numbers), 2.0, self.target.now, self.epoch
        )
        loaded = [n for n, status in zip(numbers, found.status, strict=True) if status == BlockStatus.LOADED]
        for number, block in zip(loaded, found.blocks, strict=True):
            assert number in self.truth, f"{number} was taken away and is back"
            assert holds(block, self.truth[number]), f"{number} has other bytes"

    @rule(numbers=NUMBERS)
    def let_go(self, numbers: list[int]) -> None:
        node = self.target
        node.state.let_go(node.namespace, "", keys(numbers), self.epoch, node.now)

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 1.0, 3.0, 3.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        for node in (self.source, self.target):
            node.now += seconds
            node.state.expire(node.now)
            node.moves.expire(node.now)

    @rule(leaves=SELDOM)
    def drain(self, leaves: bool) -> None:
        draining = self.target.state.draining
        if leaves:
            draining.begin(1, 0.0, self.target.now)
        else:
            draining.cancel()

    # ------------------------------------------------------------------ copies

    @rule(numbers=NUMBERS, tier=st.sampled_from([Tier.DRAM, Tier.SSD]), reason=st.sampled_from(list(CopyReason)))
    def order(self, numbers: list[int], tier: Tier, reason: CopyReason) -> None:
        """A master names what it has not been told to forget."""
        self.source_hears()
        self._store(self.source, sorted(numbers))
        self.command += 1
        node = self.target
        copy = Copy(
            (1, self.command), Endpoint("s", 1, "s:1"), node.namespace, "", [key(n) for n in numbers], self.epoch, tier,
            reason, node.now + 120.0, lambda done: None,
        )  # fmt: skip
        self.orders[self.command] = copy
        assert node.state.copies.take(copy) is None

    @precondition(lambda self: self.target.state.copies.waits and len(self.asked) < 2)
    @rule()
    def ask(self) -> None:
        book, node = self.target.state.copies, self.target
        copy = book.next_turn()
        assert copy is not None
        positions = self.intake.next_piece(copy, node.now)
        told, data, given = [], {}, []
        for position in positions:
            block = self._at_source(copy, copy.hashes[position])
            if block is None:
                copy.status[position] = BlockStatus.MISSING
                continue
            given.append(position)
            data[block.hash] = self._bytes(self.source, block)
            inventory = self.source.state.inventory if block.slab in self.source.arena.slabs else self.source.ssd
            idle_s = inventory.ages.idle_s(block.stamp, self.source.now)
            told.append(Told(block.checksum, block.before, block.index, idle_s))
        self.asked.append(Asked(copy, given, told, data))

    def _at_source(self, copy: Copy, name: bytes) -> Block | None:
        for inventory in self.source.state.tiers():
            shelf = inventory.shelves.get((self.source.handle, ""))
            block = shelf.blocks.get(name) if shelf is not None else None
            if block is not None and block.state == VISIBLE and block.shelf.epoch == copy.epoch:
                return block
        return None

    def _bytes(self, node: TierNode, block: Block) -> bytes:
        if block.slab in node.arena.slabs:
            return bytes(block.bytes())
        into = bytearray(BLOCK_BYTES)
        assert node.store_.read([block], [memoryview(into)]) == [BlockStatus.LOADED]
        return bytes(into)

    @precondition(lambda self: any(asked.piece is None for asked in self.asked))
    @rule(pick=PICK)
    def arrive(self, pick: int) -> None:
        """Slots are given, and filled."""
        open_ = [asked for asked in self.asked if asked.piece is None]
        asked = open_[pick % len(open_)]
        piece = self.intake.admit(asked.copy, asked.positions, asked.told, self.target.now) if asked.positions else None
        if piece is None:
            self._over(asked)
            return
        asked.piece = piece
        if piece.tier == Tier.DRAM:
            for block in piece.blocks:
                block.bytes()[:] = asked.data[block.hash]

    @precondition(lambda self: any(asked.piece is not None for asked in self.asked))
    @rule(pick=PICK, bad=st.sampled_from([0, 1, 3]))
    def finish(self, pick: int, bad: int) -> None:
        """``bad``: of four bits, which rows arrived corrupt."""
        full = [asked for asked in self.asked if asked.piece is not None]
        asked = full[pick % len(full)]
        piece = asked.piece
        assert piece is not None
        outcome = [int(BlockStatus.CORRUPT) if bad >> row & 1 else STORED for row in range(len(piece.blocks))]
        for row, block in enumerate(piece.blocks):
            if outcome[row] != STORED:
                data = bytearray(asked.data[block.hash])
                data[0] ^= 1
                asked.data[block.hash] = bytes(data)
                if piece.tier == Tier.DRAM:
                    block.bytes()[:] = data
        if piece.tier == Tier.SSD:
            items = [(block, header(block, block), memoryview(asked.data[block.hash])) for block in piece.blocks]
            for row, ok in enumerate(self.target.store_.write(items)):
                if not ok and outcome[row] == STORED:
                    outcome[row] = int(BlockStatus.ABORTED)
        self.intake.commit(piece, outcome, self.target.now)
        self._over(asked)

    @rule(pick=PICK, steps=st.integers(1, 4))
    def go_on(self, pick: int, steps: int) -> None:
        """Copies get on while nothing else happens."""
        for _ in range(steps):
            self._step(pick)

    @rule(pick=PICK)
    def step(self, pick: int) -> None:
        self._step(pick)

    def _step(self, pick: int) -> None:
        if self.target.state.copies.waits and len(self.asked) < 2 and pick % 2:
            self.ask()
        elif any(asked.piece is None for asked in self.asked):
            self.arrive(pick)
        elif self.asked:
            self.finish(pick, 0)
        elif self.target.state.copies.waits:
            self.ask()

    def _over(self, asked: Asked) -> None:
        self.asked.remove(asked)
        done = self.target.state.copies.turn_over(asked.copy)
        if done is not None:
            number = asked.copy.number[1]
            assert number not in self.answers, "answered twice"
            self.answers[number] = done
            assert len(done.status) == len(asked.copy.hashes) and all(done.status), "a block without an outcome"

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def sound(self) -> None:
        self.source.check()
        self.target.check()
        node = self.target
        for inventory in node.state.tiers():
            shelf = inventory.shelves.get((node.handle, ""))
            for block in shelf.blocks.values() if shelf is not None else ():
                if block.state == VISIBLE:
                    number = next(n for n in range(COUNT) if key(n) == block.hash)
                    assert number in self.truth, f"{number} is back"
                    assert block.checksum == checksum(number, self.truth[number]), f"{number}: of another version"
                    if inventory.tier == Tier.DRAM:
                        assert xxhash.xxh3_64_intdigest(block.bytes()) == block.checksum, f"{number}: other bytes"

    def teardown(self) -> None:
        """Every order ends, and holds nothing."""
        try:
            self._end()
        finally:
            self.patch.undo()

    def _end(self) -> None:
        self.target.now += 100.0
        self.target.state.draining.cancel()
        for _ in range(1000):
            if not len(self.target.state.copies):
                break
            if any(asked.piece is not None for asked in self.asked):
                self.finish(0, 0)
            elif self.asked:
                self.arrive(0)
            else:
                self.ask()
        assert self.answers.keys() == self.orders.keys()
        self.source.assert_quiet()
        self.target.assert_quiet()
        self.source.arena.close()
        self.target.arena.close()


TestCopies: Any = Copies.TestCase
TestCopies.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
