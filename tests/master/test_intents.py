"""An intent ends when its block is held: what was stored and evicted can be stored again at once."""

from __future__ import annotations

import random

import pytest

from kvstrata.master import messages as m
from kvstrata.master.directory.table import Keys
from kvstrata.master.saved import Saved
from kvstrata.master.state import MasterState
from kvstrata.proto.folding import fold
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import PlaceState

NS = Namespace("model", block_bytes=1 << 20, block_tokens=16)
HASHES = bytes(range(32))


class Attached:
    """A master's state with one node that holds nothing, at a clock that stands still."""

    def __init__(self) -> None:
        self.state = MasterState(1000.0, random.Random(1), Saved(), 0.0)
        event = m.Attach(m.NodeFacts("n", 1, channel="h:1", dram_bytes=1 << 30))
        self.session = next(c.session for c in self.state.handle(event, 1000.0) if isinstance(c, m.SendAttached))
        self.state.handle(m.SnapshotPart(self.session, 0, (), True, True), 1000.0)
        self.seq = 0
        self.group = self.state.open_namespace(NS)[0].group.number

    def change(self, added: bool, salt: str = "t") -> None:
        self.seq += 1
        delta = m.DeltaBatch(self.session, self.seq, (m.Change(added, NS, salt, 0, HASHES),))
        self.state.handle(delta, 1000.0)
        self.state.check()

    def place(self) -> list[int]:
        keys: Keys = fold(HASHES, 16)
        return [int(state) for state in self.state.questions.place(NS, self.group, "t", keys, "", 1000.0).states]


@pytest.fixture
def master() -> Attached:
    return Attached()


def test_a_stored_and_evicted_block_is_placed_anew(master: Attached) -> None:
    assert master.place() == [PlaceState.NEW] * 2
    assert master.place() == [PlaceState.IN_FLIGHT] * 2
    master.change(added=True)
    assert master.place() == [PlaceState.PRESENT] * 2
    master.change(added=False)
    assert master.place() == [PlaceState.NEW] * 2


def test_an_intent_outlives_what_is_not_its_blocks_commit(master: Attached) -> None:
    master.place()
    master.change(added=True, salt="other")
    master.change(added=False)
    assert master.place() == [PlaceState.IN_FLIGHT] * 2


def test_a_refused_writer_frees_the_block_for_the_next(master: Attached) -> None:
    master.place()
    handle = master.state.open_namespace(NS)[0].handle
    master.state.handle(m.MissReport(handle, "t", HASHES[:16], "n", 1, 0), 1000.0)
    assert master.place() == [PlaceState.NEW, PlaceState.IN_FLIGHT]
    master.state.check()
