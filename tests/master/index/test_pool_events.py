"""What nodes said becomes events; one that cannot be told leaves a gap for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstrata.master.hub import Hub
from kvstrata.master.index.pool_events import PoolEvents
from kvstrata.master.index.pool_log import Blocks, PoolLog
from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import Tier
from kvstrata.transfer.kv_events.events import BlockStored
from kvstrata.transfer.kv_events.publisher import Publisher
from kvstrata.transfer.loops import Loops

NS = Namespace("g", 64, 4)


class Sent:
    def __init__(self) -> None:
        self.said: list[Any] = []
        self.skipped = 0

    def full(self) -> bool:
        return False

    def publish(self, said: list[Any], topic: str) -> None:
        if "@bad@" in topic:
            raise RuntimeError("cannot be told")
        self.said += said

    def skip(self, count: int) -> None:
        self.skipped += count


class World:
    """Turns are taken by the test, not by a loop."""

    def __init__(self) -> None:
        self.log, self.sent = PoolLog(), Sent()
        hub = SimpleNamespace(read=lambda question: question(SimpleNamespace(pool_log=self.log), 0.0))
        loops = SimpleNamespace(add=lambda loop: loop)
        self.events = PoolEvents(cast(Hub, hub), cast(Publisher, self.sent), cast(Loops, loops))

    def says(self, tier: int, node: str = "n") -> None:
        self.log.append(Blocks(True, node, NS, "", tier, bytes(16)))

    def media(self) -> list[str | None]:
        return [each.medium for each in self.sent.said if isinstance(each, BlockStored)]


def test_every_tier_has_a_medium_also_one_that_is_not_known() -> None:
    world = World()
    for tier in (*Tier, 3):
        world.says(tier)
    world.events._turn()
    assert world.media() == ["CPU", "STORAGE", "GPU", "STORAGE"] and world.sent.skipped == 0


def test_one_bad_entry_loses_one_with_a_gap() -> None:
    world = World()
    for number in range(10):
        world.says(Tier.DRAM, "bad" if number == 3 else "n")
    with pytest.raises(RuntimeError, match="cannot be told"):
        world.events._turn()
    assert len(world.media()) == 9 and world.sent.skipped == 1
    world.says(Tier.DRAM)
    world.events._turn()
    assert len(world.media()) == 10 and world.sent.skipped == 1
