"""Recent events of the pool, newest last: what happened to nodes, leaders, quotas and content. Bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

#: Events that are remembered.
EVENTS_MAX: Final = 512
TEXT_CHARACTERS_MAX: Final = 400
#: What happens again to the same thing within so many seconds, as the last event of its kind, is counted there. A wall
#: clock that was set back by more begins anew; by less, it is ``first_at`` that goes back with it.
AGAIN_S: Final = 30.0
#: How many of the last events are looked through for one of the same kind.
_LOOK_BACK: Final = 32


class Severity(IntEnum):
    """How much an operator should care. Names in lower case are what is shown."""

    INFO = 0
    NOTICE = 1
    WARNING = 2
    CRITICAL = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Happening:
    """Something to note. ``kind`` is a short name that never changes, ``about`` the node or tenant, "" for none."""

    kind: str
    text: str
    severity: Severity = Severity.INFO
    about: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A happening with its number and its times (Unix seconds). ``times`` grows when it happens again."""

    seq: int
    at: float
    kind: str
    text: str
    severity: Severity
    about: str
    times: int = 1
    first_at: float = 0.0

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "seq": self.seq,
            "at": self.at,
            "kind": self.kind,
            "text": self.text,
            "severity": self.severity.label,
            "about": self.about,
            "times": self.times,
            "first_at": self.first_at,
        }


class Events:
    """The log. Sequence numbers grow by one with each note, so a reader sees what it has missed. Thread-safe."""

    def __init__(self, bound: int = EVENTS_MAX) -> None:
        self.seq = 0  #: of the newest; 0 before the first
        self._bound = bound
        self._all: deque[Event] = deque(maxlen=bound)
        self._lock = threading.Lock()

    def note(self, happening: Happening, at: float) -> Event:
        """Take one in. The same thing again soon takes a new number and the place of the earlier one."""
        with self._lock:
            return self._note(happening, at)

    def _note(self, happening: Happening, at: float) -> Event:
        self.seq += 1
        before = self._lately(happening, at)
        event = Event(
            self.seq, at, happening.kind, _cut(happening.text), happening.severity, _cut(happening.about), 1, at
        )
        if before is not None:
            self._all.remove(before)
            event = replace(event, times=before.times + 1, first_at=min(before.first_at, at))
        self._all.append(event)
        return event

    def extend(self, happenings: Iterable[Happening], at: float) -> None:
        for happening in happenings:
            self.note(happening, at)

    def _lately(self, happening: Happening, at: float) -> Event | None:
        for back, event in enumerate(reversed(self._all)):
            if back >= _LOOK_BACK or abs(at - event.at) > AGAIN_S:
                return None
            if (event.kind, event.about, event.text) == (happening.kind, _cut(happening.about), _cut(happening.text)):
                return event
        return None

    def since(self, seq: int, limit: int = EVENTS_MAX) -> list[Event]:
        """Those after number ``seq``, the newest ``limit`` of them, oldest first. O(events remembered)."""
        with self._lock:
            found = [event for event in self._all if event.seq > seq]
        return found[len(found) - limit :] if limit < len(found) else found

    def oldest(self) -> int:
        """The number of the oldest that is remembered; 0 when there is none."""
        with self._lock:
            return self._all[0].seq if self._all else 0

    def check(self) -> None:
        """Assert the bound, and that numbers grow."""
        numbers = [event.seq for event in self._all]
        assert len(numbers) <= self._bound
        assert numbers == sorted(set(numbers)), numbers
        assert not numbers or numbers[-1] == self.seq
        for event in self._all:
            assert event.times >= 1 and event.first_at <= event.at, event
            assert len(event.text) <= TEXT_CHARACTERS_MAX and len(event.about) <= TEXT_CHARACTERS_MAX


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
