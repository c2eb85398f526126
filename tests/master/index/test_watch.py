"""A watcher's stream: a snapshot in parts, rights that change, and a sign of life when there is nothing to tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvstrata.master import messages as m
from kvstrata.master.hub import Hub
from kvstrata.master.index import scan as scan_module
from kvstrata.master.index import watch as module
from kvstrata.master.index.watch import Watchers
from kvstrata.master.stores.opening import open_store
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Unauthenticated
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.security.rights import EVERYTHING, Rights, Role

NS = Namespace("g", block_bytes=64, block_tokens=4)
BLOCKS = 100
MINE, YOURS = (Rights("router", Role.READ, (salt,), ("*",)) for salt in ("mine", "yours"))


@pytest.fixture
def hub() -> Hub:
    hub = Hub(open_store(None, None, None), random.Random(1), 0.0, clock=lambda: 1.0)
    session, _ = hub.attach(m.Attach(m.NodeFacts("n", 1, channel="x:1", dram_bytes=1 << 30)))
    hashes = random.Random(2).randbytes(16 * BLOCKS)
    holdings = tuple(m.Holding(NS, salt, 0, hashes, 0) for salt in ("mine", "yours"))
    hub.handle(m.SnapshotPart(session, 0, holdings, True, True))
    return hub


def yes() -> bool:
    return True


def until_live(
    watchers: Watchers, rights: Rights, epoch: int = 0, sequence: int = 0, active: Callable[[], bool] = yes
) -> list[control.IndexMessage]:
    """Messages up to the one that is live, or the first of a stream that goes on."""
    said = []
    for message in watchers.watch(control.IndexQuery(epoch=epoch, sequence=sequence), rights, active):
        said.append(message)
        if message.live or not said[0].reset:
            break
    return said


def salts(said: list[control.IndexMessage]) -> set[str]:
    return {change.table.salt for message in said for change in message.changes if change.hashes}


def test_other_rights_begin_anew_and_the_same_go_on(hub: Hub) -> None:
    watchers = Watchers(hub)
    mine = until_live(watchers, MINE)
    last = mine[-1]
    assert mine[0].reset and salts(mine) == {"mine"}
    assert not until_live(watchers, MINE, last.epoch, last.sequence)[0].reset
    for rights, sees in ((YOURS, {"yours"}), (EVERYTHING, {"mine", "yours"})):
        said = until_live(watchers, rights, last.epoch, last.sequence)
        assert said[0].reset and salts(said) == sees
    everything = until_live(watchers, EVERYTHING)[-1]
    assert everything.epoch == watchers.epoch
    assert not until_live(watchers, EVERYTHING, everything.epoch, everything.sequence)[0].reset
    assert until_live(watchers, MINE, everything.epoch, everything.sequence)[0].reset


def test_rights_are_looked_at_in_a_snapshot_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "SLOTS_A_PIECE", 1)
    looked = []

    def active() -> bool:
        looked.append(1)
        if len(looked) > 5:
            raise Unauthenticated("gone")
        return True

    said: list[control.IndexMessage] = []
    with pytest.raises(Unauthenticated):
        for message in Watchers(hub).watch(control.IndexQuery(), EVERYTHING, active):
            said.append(message)
    assert len(looked) == 6 and said[0].reset and not any(message.live for message in said)


def test_pieces_without_blocks_are_a_sign_of_life(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "SLOTS_A_PIECE", 1)
    monkeypatch.setattr(scan_module, "BREATH_S", 0.0)
    quiet = len(until_live(Watchers(hub), EVERYTHING))
    monkeypatch.setattr(module, "ALIVE_S", 0.0)
    said = until_live(Watchers(hub), EVERYTHING)
    assert len(said) > quiet and any(not each.changes and not each.reset and not each.live for each in said)
