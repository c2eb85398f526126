"""One engine's events in order: gaps are asked for again, a restart is noticed, and what cannot be known is forgotten.

The sequence numbers of an engine count batches; vLLM begins at 0 at each start, ours with the second of the start in
the upper half. A number that is not greater than the last, or has another upper half, is another start's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.transfer.kv_events.events import Event
from kvstrata.transfer.kv_events.publisher import EPOCH_SHIFT

#: Batches that wait for an answer on the replay socket, and what they were as messages. Past one of these the answer is
#: not waited for.
PENDING_MAX: Final = 10_000
PENDING_BYTES_MAX: Final = 32 << 20

Apply = Callable[[Sequence[Event]], None]


class EngineFeed:
    """Gives events to ``apply`` in order, after ``clear`` where something may be missing before them.

    ``replays``: whether the engine can be asked for past batches. Methods return the sequence to ask it from, or None;
    an answer that was asked for is to end in :meth:`replayed`, if only because it is late.
    """

    def __init__(self, apply: Apply, clear: Callable[[], None], *, replays: bool) -> None:
        self.counts: Counter[str] = Counter({"batches": 0, "gaps": 0, "restarts": 0, "replays": 0, "incomplete": 0})
        self.last: int | None = None  #: the last batch that was applied
        self._apply = apply
        self._clear = clear
        self._replays = replays
        self._pending: list[tuple[int, Sequence[Event]]] | None = None  #: batches that wait for a replay
        self._pending_bytes = 0

    @property
    def replaying(self) -> bool:
        return self._pending is not None

    def connected(self) -> int | None:
        """A connection begins: whatever was said while there was none was missed."""
        self._begin()
        return self._ask(0)

    def batch(self, sequence: int, said: Sequence[Event], nbytes: int = 0) -> int | None:
        """A batch as it was published, a message of ``nbytes``."""
        if self._pending is not None:
            if len(self._pending) < PENDING_MAX and self._pending_bytes + nbytes <= PENDING_BYTES_MAX:
                self._pending.append((sequence, said))
                self._pending_bytes += nbytes
                return None
            self.replayed()
        if self.last is None or sequence == self.last + 1:
            self._take(sequence, said)
            return None
        if sequence <= self.last or sequence >> EPOCH_SHIFT != self.last >> EPOCH_SHIFT:
            self.counts["restarts"] += 1
            self._begin()
            return self._ask(sequence >> EPOCH_SHIFT << EPOCH_SHIFT, (sequence, said))
        self.counts["gaps"] += 1
        return self._ask(self.last + 1, (sequence, said))

    def replay(self, sequence: int, said: Sequence[Event]) -> None:
        """A batch that was asked for."""
        if self._pending is None or (self.last is not None and sequence <= self.last):
            return
        self._in_order(sequence, said)

    def replayed(self) -> None:
        """The answer is complete, or will not come."""
        pending, self._pending, self._pending_bytes = self._pending or [], None, 0
        for sequence, said in pending:
            if self.last is None or sequence > self.last:
                self._in_order(sequence, said)

    def _ask(self, sequence: int, *pending: tuple[int, Sequence[Event]]) -> int | None:
        if self._replays:
            self.counts["replays"] += 1
            self._pending, self._pending_bytes = list(pending), 0  # the one that showed the gap is not counted
            return sequence
        for each in pending:
            self._in_order(*each)
        return None

    def _in_order(self, sequence: int, said: Sequence[Event]) -> None:
        if self.last is not None and sequence != self.last + 1:
            # What was removed meanwhile is not known: better to know of less than of what is not there.
            self.counts["incomplete"] += 1
            self._clear()
        self._take(sequence, said)

    def _take(self, sequence: int, said: Sequence[Event]) -> None:
        self._apply(said)
        self.last = sequence
        self.counts["batches"] += 1

    def _begin(self) -> None:
        self._clear()
        self.last, self._pending, self._pending_bytes = None, None, 0

    def check(self) -> None:
        assert self._pending is None or (self._replays and len(self._pending) <= PENDING_MAX)
        assert self._pending_bytes <= (PENDING_BYTES_MAX if self._pending is not None else 0)
