from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.paged_replay.closed_loop import ClosedLoop
from kvstrata.cli.paged_replay.plan import Turn


def sessions_of(lengths: list[int], think_s: float) -> list[list[Turn]]:
    tokens = np.zeros(1, dtype=np.uint32)
    return [
        [Turn(100 * number + place, number, 0, tokens, 1, think_s if place else 0.0) for place in range(length)]
        for number, length in enumerate(lengths)
    ]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    concurrency=st.integers(1, 4),
    think_s=st.sampled_from([0.0, 2.0]),
    choices=st.data(),
)
def test_every_turn_is_sent_once_in_order_and_never_too_many_at_once(
    lengths: list[int], concurrency: int, think_s: float, choices: st.DataObject
) -> None:
    sessions = sessions_of(lengths, think_s)
    loop, now = ClosedLoop(sessions, concurrency), 0.0
    sent: list[Turn] = []
    ended_at: dict[int, float] = {}
    while not loop.finished:
        for turn in loop.due(now):
            assert now >= ended_at.get(turn.session, 0.0) + turn.think_s
            sent.append(turn)
        loop.check()
        under_way = loop.in_flight
        assert len(under_way) <= concurrency
        next_at = loop.next_at()
        if under_way and (next_at is None or choices.draw(st.booleans())):
            turn = choices.draw(st.sampled_from(under_way))
            loop.ended(turn, now)
            ended_at[turn.session] = now
        else:
            assert next_at is not None, "nothing is under way and nothing will be due"
            now = max(now, next_at)
        loop.check()
    assert not loop.in_flight and loop.due(now + 100) == []
    for number, session in enumerate(sessions):
        assert [turn for turn in sent if turn.session == number] == session


def test_a_session_starts_when_another_has_ended() -> None:
    loop = ClosedLoop(sessions_of([1, 1, 1], 0.0), 2)
    first = loop.due(0.0)
    assert [turn.session for turn in first] == [0, 1]
    assert loop.due(5.0) == []
    loop.ended(first[1], 5.0)
    assert [turn.session for turn in loop.due(5.0)] == [2]
