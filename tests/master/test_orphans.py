"""Sister shards of what was evicted: who is told, of what, and when nobody is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvstrata.master import messages as m
from kvstrata.master.content import orphans
from kvstrata.master.converters import message_of
from kvstrata.master.outbox import HINTS_BEHIND_MAX, NOBODY, Outbox
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import Departure, Tier

from .world import NS, SALT, World, hashes

SHARDS = [replace(NS, shard=shard, shard_count=3) for shard in range(3)]


class Sharded(World):
    """Three nodes, each with one shard of the same blocks."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.sessions = [self.attach(f"n{shard}") for shard in range(3)]
        self.seqs = [0, 0, 0]
        for shard, session in enumerate(self.sessions):
            holding = m.Holding(SHARDS[shard], SALT, 0, hashes(*numbers))
            self.tell(m.SnapshotPart(session, 0, (holding,), True, True))

    def says(
        self, node: int, shard: int, numbers: Iterable[int], why: Departure | None, tier: Tier = Tier.DRAM
    ) -> None:
        """``why`` None: they have come."""
        change = m.Change(why is None, SHARDS[shard], SALT, tier, hashes(*numbers), 0, why or 0)
        self.seqs[node] += 1
        self.tell(m.DeltaBatch(self.sessions[node], self.seqs[node], (change,)))

    def hints(self) -> list[tuple[int, int, bytes]]:
        """(node, shard, hashes) of what is told in the next tick."""
        self.commands.clear()
        self.tell(m.Tick())
        told = [command for command in self.commands if isinstance(command, m.SendHint)]
        assert all(hint.salt == SALT and hint.epoch == 0 for hint in told)
        return sorted((self.sessions.index(hint.session), hint.namespace.shard, hint.hashes) for hint in told)


@pytest.mark.parametrize("why", [Departure.ROOM, Departure.QUOTA, Departure.LOWERED, Departure.DEVICE])
def test_the_holders_of_sister_shards_are_told(why: Departure) -> None:
    world = Sharded(1, 2, 3)
    world.says(0, 0, [2, 3], why)
    assert world.hints() == [(1, 1, hashes(2, 3)), (2, 2, hashes(2, 3))]
    assert world.hints() == [] and world.state.orphans.counted.told == 4


@pytest.mark.parametrize(
    "why", [Departure.UNKNOWN, Departure.REMOVED, Departure.EPOCH, Departure.HINT, Departure.ORPHAN]
)
def test_what_left_for_other_reasons_orphans_nothing(why: Departure) -> None:
    world = Sharded(1, 2, 3)
    world.says(0, 0, [2, 3], why)
    assert world.hints() == []


def test_a_replica_elsewhere_or_on_ssd_is_enough() -> None:
    world = Sharded(1, 2, 3)
    world.says(0, 0, [1], None, Tier.SSD)
    world.says(1, 0, [2], None)
    world.says(0, 0, [1, 2, 3], Departure.ROOM)
    assert world.hints() == [(1, 1, hashes(3)), (2, 2, hashes(3))]
    world.says(0, 0, [1], Departure.ROOM, Tier.SSD)
    assert world.hints() == [(1, 1, hashes(1)), (2, 2, hashes(1))]


def test_what_is_stored_again_meanwhile_orphans_nothing() -> None:
    world = Sharded(1)
    world.says(0, 0, [1], Departure.ROOM)
    world.says(0, 0, [1], None)
    assert world.hints() == []


def test_every_holder_of_a_sister_is_told_and_nodes_that_are_away_are_not() -> None:
    world = Sharded(1)
    world.says(0, 1, [1], None)
    world.says(0, 2, [1], None, Tier.SSD)
    world.tell(m.LinkLost(world.sessions[2]))
    world.says(0, 0, [1], Departure.ROOM)
    assert world.hints() == [(0, 1, hashes(1)), (0, 2, hashes(1)), (1, 1, hashes(1))]


def test_a_bump_or_a_drop_meanwhile_ends_it() -> None:
    world = Sharded(1)
    world.says(0, 0, [1], Departure.ROOM)
    world.bump()
    assert world.hints() == [] and len(world.state.orphans) == 0


def test_one_shard_alone_has_no_sisters() -> None:
    world = World()
    session = world.up(1, 2)
    world.delta(session, 1, remove=[1], reason=Departure.ROOM)
    assert len(world.state.orphans) == 0


def test_work_is_bounded_and_more_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "WAITING_MAX", 10)
    monkeypatch.setattr(orphans, "LOOKED_FOR", 12)
    world = Sharded(*range(20))
    world.says(0, 0, range(6), Departure.ROOM)
    world.says(0, 0, range(6, 20), Departure.QUOTA)
    assert len(world.state.orphans) == 10 and world.state.orphans.counted.passed == 10
    told = [world.hints() for _ in range(4)]
    assert told[0] == [(1, 1, hashes(*range(4))), (2, 2, hashes(*range(4)))], "four blocks in three shards a turn"
    assert [hint for turn in told for hint in turn if hint[0] == 1] == [
        (1, 1, hashes(*range(4))),
        (1, 1, hashes(*range(4, 8))),
        (1, 1, hashes(8, 9)),
    ]


def test_a_node_that_is_slow_to_read_is_spared_hints() -> None:
    outbox = Outbox()
    hint = m.SendHint(1, SHARDS[1], SALT, hashes(1), 0)
    for _ in range(HINTS_BEHIND_MAX + 10):
        outbox.put(hint)
    outbox.put(m.SendResync(1, "news"))
    assert outbox.closed is None
    got = [outbox.get(0.0) for _ in range(HINTS_BEHIND_MAX + 2)]
    assert got[-2:] == [(m.SendResync(1, "news"), NOBODY), None]


def test_on_the_wire() -> None:
    orphaned = message_of(m.SendHint(1, SHARDS[1], SALT, hashes(1, 2), 7), "c").orphaned
    assert Namespace.from_spec(orphaned.spec) == SHARDS[1]
    assert (orphaned.salt, orphaned.hashes, orphaned.epoch) == (SALT, hashes(1, 2), 7)
