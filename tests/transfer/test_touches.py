"""Reads that a node has not heard of: each is told once, in the order of their latest times, in bounded messages."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.keys import HASHES_MAX
from kvstrata.transfer import touches as module
from kvstrata.transfer.touches import Touches

WIDTH = 16
Read = tuple[str, bytes]
reads = st.lists(
    st.tuples(st.sampled_from(["", "x"]), st.integers(0, 5), st.integers(1, 4)).map(
        lambda read: (read[0], bytes(read[1:]) * (8 * read[2]))
    )
)


def told(touches: Touches) -> list[tuple[str, bytes, int]]:
    """(salt, packed hashes, times) of each read, in order."""
    found = []
    for message in touches.take():
        calls, times = array("I", message.calls), array("I", message.times)
        assert len(calls) == len(times) and sum(calls) * WIDTH == len(message.hashes) <= HASHES_MAX * WIDTH
        start = 0
        for count, often in zip(calls, times, strict=True):
            found.append((message.salt, message.hashes[start : start + count * WIDTH], often))
            start += count * WIDTH
    return found


@pytest.mark.parametrize("most", [5, HASHES_MAX])
@given(reads=reads)
def test_each_read_is_told_once_with_how_often_it_was_done(most: int, reads: list[Read]) -> None:
    touches = Touches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HASHES_MAX", most)
        for salt, hashes in reads:
            touches.add(1, salt, 0, hashes, WIDTH)
        assert bool(touches) == bool(reads)
        found = told(touches)
    assert {(salt, hashes): times for salt, hashes, times in found} == dict(Counter(reads))
    for salt in ("", "x"):
        latest = list(dict.fromkeys(hashes for of, hashes in reversed(reads) if of == salt))[::-1]
        assert [hashes for of, hashes, _ in found if of == salt] == latest
    assert not touches and not touches.take()


def test_it_says_when_it_is_time_to_tell() -> None:
    touches = Touches()
    half = bytes(WIDTH) * (module.HASHES_WAITING_MAX // 2 + 1)
    assert not touches.add(1, "", 0, half, WIDTH)
    assert not touches.add(1, "", 0, half, WIDTH), "the same again takes no more room"
    assert touches.add(1, "x", 0, half, WIDTH)


def test_what_could_not_be_told_is_taken_again_and_not_without_bound() -> None:
    touches = Touches()
    touches.add(1, "", 0, bytes(WIDTH), WIDTH)
    (first,) = touches.take()
    touches.keep([first])
    touches.add(1, "x", 0, bytes(WIDTH), WIDTH)
    assert touches and [message.salt for message in touches.take()] == ["", "x"] and not touches
    touches.keep([first] * (module.KEPT_MAX + 1))
    assert len(touches.take()) == module.KEPT_MAX


def test_a_read_that_is_repeated_for_long_stays_within_what_a_node_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEATS_MAX", 3)
    touches = Touches()
    for _ in range(5):
        touches.add(1, "", 0, bytes(WIDTH), WIDTH)
    assert [times for _, _, times in told(touches)] == [3]
