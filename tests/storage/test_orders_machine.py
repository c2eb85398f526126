"""Any mix of stores, moves, reads, orders, failing devices and crashes: what may be read is never older than that.

The oracle knows, for each block, which versions may be read now, and which may still come back after a crash:
every one that was stored and whose end has not been confirmed.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.proto.status import Tier
from kvstrata.storage.records import VISIBLE, Lease
from kvstrata.storage.tiers.moves import Move, Read

from .conftest import key, payload
from .ordered_node import OrderedNode

NUMBERS = range(3)
SALTS = ("a", "b")
Place = tuple[str, int]
PLACES: list[Place] = [(salt, number) for salt in SALTS for number in NUMBERS]
places = st.sampled_from(PLACES)


@dataclass(frozen=True)
class Version:
    """One store of one block; its payload is a stream of its number."""

    number: int
    epoch: int


@functools.lru_cache(maxsize=4096)
def body(number: int, version: int) -> bytes:
    return payload(key(number), version, 4096)


class Orders(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.node = OrderedNode(self.directory)
        self.now_readable: dict[Place, set[Version]] = {}
        self.may_return: dict[Place, set[Version]] = {}
        self.ends: dict[int, set[tuple[Place, Version]]] = {}
        self.to_erase: dict[int, set[tuple[int, int, int]]] = {}
        self.begun: dict[int, set[Lease]] = {}
        self.moves: list[Move] = []
        self.reads: list[Read] = []
        self.sends: list[tuple[Lease, Place, bytes]] = []
        self.versions = self.epoch = 0
        self.bumps: dict[int, int] = {}
        for place in PLACES:
            self.store(place)
        self.demote_at_once()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            self.node.arena.close()
            shutil.rmtree(self.directory)

    # ------------------------------------------------------------------ content

    @rule(place=places)
    def store(self, place: Place) -> None:
        self.versions += 1
        salt, number = place
        if self.node.store([number], self.versions, salt=salt) == [1]:
            version = Version(self.versions, self.node.epoch)
            self.now_readable[place] = {version}
            self.may_return.setdefault(place, set()).add(version)

    @rule()
    def demote_at_once(self) -> None:
        self.node.demote()

    @rule()
    def begin_to_demote(self) -> None:
        move = self.node.moves.demotions(1 << 20, self.node.now, everything=True)
        if move is not None:
            self.moves.append(move)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), works=st.booleans())
    def end_move(self, data: st.DataObject, works: bool) -> None:
        self.node.finish(self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1))), works)

    @rule()
    def leave_memory(self) -> None:
        """What nobody holds leaves DRAM."""
        inventory = self.node.state.inventory
        for block in [b for b in inventory.blocks() if b.state == VISIBLE and not b.leases and not b.shelf.retired]:
            inventory.withdraw(block, "evicted")

    @rule(salt=st.sampled_from(SALTS))
    def read_from_ssd(self, salt: str) -> None:
        read = self.node.begin_read(NUMBERS, salt)
        if read is not None:
            self.reads.append(read)
            self.moves.extend(read.moves)

    @precondition(lambda self: self.reads)
    @rule()
    def end_read(self) -> None:
        self.node.moves.end_read(self.reads.pop(0))

    @rule(place=places)
    def send(self, place: Place) -> None:
        salt, number = place
        node = self.node
        got = node.state.acquire(node.SESSION, node.handle, salt, key(number), 0.0, node.now, node.epoch)
        if got.lease is not None:
            self.sends.append((got.lease, place, bytes(got.blocks[0].bytes())))

    @precondition(lambda self: self.sends)
    @rule()
    def end_send(self) -> None:
        lease, _, bytes_then = self.sends.pop(0)
        assert bytes(lease.blocks[0].bytes()) == bytes_then, "bytes changed under a reader"
        self.node.state.end(lease)

    # ------------------------------------------------------------------ orders

    def ordered(self, number: int, gone: Callable[[Place], bool], *, waits: bool = True) -> None:
        if waits:
            self.begun[number] = {lease for lease, place, _ in self.sends if gone(place)}
        self.ends[number] = {(p, v) for p, versions in self.may_return.items() if gone(p) for v in versions}
        for place in [place for place in self.now_readable if gone(place)]:
            del self.now_readable[place]

    @rule(at_once=st.booleans())
    def bump(self, at_once: bool) -> None:
        number = self.node.bump(self.node.epoch + 1)
        self.bumps[number] = self.node.epoch
        self.ordered(number, lambda place: True)
        if at_once:
            self.turn()

    @rule(salt=st.sampled_from([*SALTS, None]), erase=st.booleans(), at_once=st.booleans())
    def drop(self, salt: str | None, erase: bool, at_once: bool) -> None:
        slots = {
            (block.slab.index, block.slot, block.generation)
            for block in self.node.ssd.blocks()
            if salt in (None, block.shelf.salt)
        }
        number = self.node.drop(salt=salt, erase=erase)
        self.ordered(number, lambda place: salt in (None, place[0]))
        if erase:
            self.to_erase[number] = slots
        if at_once:
            self.turn()

    @rule(place=places)
    def remove(self, place: Place) -> None:
        self.ordered(self.node.order_removal([place[1]], place[0]), lambda other: other == place, waits=False)

    @rule()
    def turn(self) -> None:
        for number, error in self.node.turn():
            ended = self.ends.pop(number)
            slots, begun = self.to_erase.pop(number, set()), self.begun.pop(number, set())
            epoch = self.bumps.pop(number, 0)
            if error:
                continue
            self.epoch = max(self.epoch, epoch)
            for place, version in ended:
                self.may_return[place].discard(version)
            for index, slot, generation in slots:
                written = self.node.disk_store.disk.slots.get((index, slot))
                assert written is None or written[1].generation != generation, "confirmed, and not overwritten"
            assert not {lease for lease, _, _ in self.sends} & begun, "confirmed, and still being sent"

    @rule(seconds=st.sampled_from([0.05, 1.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.node.now += seconds
        self.node.state.expire(self.node.now)
        self.node.moves.expire(self.node.now)

    @rule(refuses=st.sampled_from([False, False, True]))
    def device_changes_its_mind(self, refuses: bool) -> None:
        self.node.disk_store.refuses = refuses

    @rule()
    def crash(self) -> None:
        before, self.node = self.node, self.node.after_crash(self.directory)
        before.arena.close()
        self.moves, self.reads, self.sends, self.ends, self.to_erase, self.begun = [], [], [], {}, {}, {}
        epoch = self.node.epoch
        assert epoch >= self.epoch, "new weights were confirmed, and forgotten"
        self.bumps = {}
        self.now_readable = {p: {v for v in vs if v.epoch == epoch} for p, vs in self.may_return.items()}

    # ------------------------------------------------------------------ what holds

    @invariant()
    def only_what_may_be_read_can_be(self) -> None:
        if not hasattr(self, "node"):
            return
        self.node.check()
        for inventory in self.node.state.tiers():
            for shelf in inventory.shelves.values():
                for number in NUMBERS:
                    block = shelf.blocks.get(key(number))
                    if block is None or block.state != VISIBLE:
                        continue
                    if inventory.tier == Tier.DRAM:
                        found = bytes(block.bytes())
                    else:
                        found = self.node.disk_store.disk.slots[block.slab.index, block.slot][2]
                    allowed = self.now_readable.get((shelf.salt, number), set())
                    assert found in {body(number, version.number) for version in allowed}, (shelf.salt, number, allowed)


TestOrders = Orders.TestCase
TestOrders.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than a test may
    suppress_health_check=[HealthCheck.too_slow],
)
