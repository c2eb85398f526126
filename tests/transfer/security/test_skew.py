"""Hosts whose clocks differ: by minutes they let each other in, by more they say so, and fetch no tickets over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.proto.errors import Unavailable
from kvstrata.proto.wire import Kind
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.tickets import BEHIND_S, LIFE_S, SKEW_S, issue
from tests.transfer.security.doors import Door, Forced, someone, write_keys

CALL_S = 5.0


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return write_keys(tmp_path / "keys", "one")


@pytest.fixture
def door(keys: KeyFile) -> Iterator[Door]:
    door = Door(keys)
    yield door
    door.stop()


def tickets_of(keys: KeyFile, age_s: float = 0.0) -> Forced:
    """Of a master whose clock is right; given ``age_s`` ago."""
    tickets = Forced(keys, someone())
    tickets.now = issue(keys.keys(), someone(), time.time() - age_s)
    return tickets


@pytest.mark.parametrize("ahead_s, age_s", [(-120.0, 0.0), (5 - BEHIND_S, 0.0), (LIFE_S / 2 + SKEW_S - 5, LIFE_S / 2)])
def test_clocks_that_differ_by_minutes_do_not_matter(door: Door, keys: KeyFile, ahead_s: float, age_s: float) -> None:
    door.clock.ahead = ahead_s
    channel = Channel([door.address], Identity.new("client", tickets=tickets_of(keys, age_s)), self_probing=False)
    assert channel.call(Kind.LOOKUP, b"", time.monotonic() + CALL_S).kind == Kind.LOOKUP_OK
    channel.close()


def test_a_clock_that_is_behind_by_more_is_told_of_and_has_no_ticket_fetched(door: Door, keys: KeyFile) -> None:
    door.clock.ahead = -BEHIND_S - 30
    tickets = tickets_of(keys)
    channel = Channel([door.address], Identity.new("client", tickets=tickets), self_probing=False)
    with pytest.raises(Unavailable, match=r"clock there.* behind"):
        channel.call(Kind.LOOKUP, b"", time.monotonic() + CALL_S)
    assert tickets.refusals == 0 and door.server.counts["unauthenticated"] == 1
    door.clock.ahead = 0.0
    assert channel.probe()
    assert channel.call(Kind.LOOKUP, b"", time.monotonic() + CALL_S).kind == Kind.LOOKUP_OK
    channel.close()
