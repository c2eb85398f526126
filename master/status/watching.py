"""What nobody reports when it happens: health problems that come and go, another leader, refusals that are counted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstrata.master.status.events import Happening, Severity

#: Problems that are followed at a time; more are one.
PROBLEMS_MAX: Final = 64
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Seen:
    """A moment. ``refused`` counts, by what was refused, since the master's start."""

    problems: tuple[str, ...] = ()
    leading: bool = False
    leader: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)


class Watch:
    """Compares each moment with the one before. Sans-IO."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._before: Seen | None = None

    def turn(self, seen: Seen) -> list[Happening]:
        """What has changed since the last turn; nothing at the first but problems that are there already."""
        before, self._before = self._before, seen
        found = list(self._compare_problems(seen))
        if before is not None:
            found += self._compare_leaders(before, seen)
            found += self._compare_refusals(before, seen)
        return found

    def _compare_problems(self, seen: Seen) -> Iterator[Happening]:
        # Numbers in a problem's text (ages, rows that wait) change while it is the same problem.
        now = {_NUMBERS.sub("N", text): text for text in seen.problems[:PROBLEMS_MAX]}
        for known, text in now.items():
            if known not in self._problems:
                yield Happening("problem", text, Severity.CRITICAL)
        for known, text in self._problems.items():
            if known not in now:
                yield Happening("problem.over", f"over: {text}", Severity.NOTICE)
        self._problems = now

    def _compare_leaders(self, before: Seen, seen: Seen) -> Iterator[Happening]:
        if seen.leading or (before.leading, before.leader) == (seen.leading, seen.leader):
            return  # that this master leads it says itself
        if seen.leader:
            yield Happening("leader", f"{seen.leader} leads", Severity.NOTICE)
        elif not before.leading:
            yield Happening("leader", f"nobody leads any more: {before.leader} is not heard of", Severity.CRITICAL)

    def _compare_refusals(self, before: Seen, seen: Seen) -> Iterator[Happening]:
        for what, count in seen.refused.items():
            more = count - before.refused.get(what, 0)
            if more > 0:
                yield Happening("refused", f"refused: {what}", Severity.WARNING, what)

    def check(self) -> None:
        assert len(self._problems) <= PROBLEMS_MAX
