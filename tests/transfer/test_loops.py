"""Background loops that say themselves when their next turn is due."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from kvstrata.transfer.loops import Loop

SOON_S = 5.0


class Turns:
    """A loop of a hundred turns a second, if its turns say nothing."""

    def __init__(self, pause_s: float | None, bound_s: float) -> None:
        self.done: queue.Queue[None] = queue.Queue()
        self._pause_s = pause_s
        self.loop = Loop("test", 0.01, self._turn, bound_s=bound_s).start()

    def _turn(self) -> float | None:
        self.done.put(None)
        return self._pause_s

    def came(self, within_s: float) -> bool:
        try:
            self.done.get(timeout=within_s)
        except queue.Empty:
            return False
        return True


@pytest.fixture
def resting() -> Iterator[Turns]:
    turns = Turns(pause_s=60.0, bound_s=200.0)
    yield turns
    turns.loop.stop()


def test_a_turn_that_names_a_pause_is_followed_by_none_until_it_is_woken(resting: Turns) -> None:
    assert resting.came(SOON_S) and not resting.came(0.2)
    resting.loop.wake()
    assert resting.came(SOON_S) and not resting.loop.problem()


def test_a_loop_that_rests_stops_at_once(resting: Turns) -> None:
    assert resting.came(SOON_S)
    resting.loop.stop(SOON_S)
    assert not resting.loop._thread.is_alive()


def test_no_pause_makes_a_loop_look_stuck() -> None:
    turns = Turns(pause_s=60.0, bound_s=0.4)
    try:
        for _ in range(3):
            assert turns.came(SOON_S)
    finally:
        turns.loop.stop()


def test_a_turn_that_names_none_comes_again_after_the_period() -> None:
    turns = Turns(pause_s=None, bound_s=SOON_S)
    try:
        for _ in range(3):
            assert turns.came(SOON_S)
    finally:
        turns.loop.stop()
