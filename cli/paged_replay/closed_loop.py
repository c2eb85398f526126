"""Who may send next: so many sessions at once, each with one request under way. No clock, no sockets."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstrata.cli.paged_replay.plan import Turn


class ClosedLoop:
    """Sessions start in order; one that ends makes room for the next. A turn is sent once and ends once."""

    def __init__(self, sessions: Sequence[Sequence[Turn]], concurrency: int) -> None:
        self._sessions = sessions
        self._concurrency = concurrency
        self._started = 0
        self._active = 0
        self._position: dict[int, int] = {}  # session -> turns that have ended
        self._waiting: list[tuple[float, int]] = []  # (may be sent at, session)
        self._in_flight: dict[int, Turn] = {}  # session -> its turn under way

    @property
    def finished(self) -> bool:
        return self._started == len(self._sessions) and not self._active

    @property
    def in_flight(self) -> list[Turn]:
        return list(self._in_flight.values())

    def due(self, now: float) -> list[Turn]:
        """The turns to send now; from here on they are in flight."""
        while self._started < len(self._sessions) and self._active < self._concurrency:
            heapq.heappush(self._waiting, (now, self._started))
            self._position[self._started] = 0
            self._started += 1
            self._active += 1
        sent = []
        while self._waiting and self._waiting[0][0] <= now:
            session = heapq.heappop(self._waiting)[1]
            turn = self._in_flight[session] = self._sessions[session][self._position[session]]
            sent.append(turn)
        return sent

    def next_at(self) -> float | None:
        """When :meth:`due` has something again without any request ending; None when only that can bring it."""
        return self._waiting[0][0] if self._waiting else None

    def ended(self, turn: Turn, now: float) -> None:
        """A turn in flight has ended, well or not."""
        under_way = self._in_flight.pop(turn.session, None)
        assert under_way is turn, f"turn {turn.index} of session {turn.session} is not in flight"
        position = self._position[turn.session] = self._position[turn.session] + 1
        following = self._sessions[turn.session][position : position + 1]
        if following:
            heapq.heappush(self._waiting, (now + following[0].think_s, turn.session))
        else:
            self._active -= 1

    def check(self) -> None:
        """Assert every structural invariant."""
        waiting = {session for _, session in self._waiting}
        assert len(waiting) == len(self._waiting), "a session waits twice"
        assert not waiting & self._in_flight.keys(), "a session waits and is in flight"
        assert len(waiting) + len(self._in_flight) == self._active <= self._concurrency
        assert all(self._position[s] < len(self._sessions[s]) for s in waiting | self._in_flight.keys())
