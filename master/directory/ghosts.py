"""What is remembered of blocks that left: why, and about when.

A ghost is a mark in place of a block's holders, so it costs the directory nothing to look at: the probe
that finds no holder finds the reason. Marks belong to a *generation*, a stretch of time, so that "when" needs
no clock a block, and so that many can be forgotten together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstrata.master.content.misses import LEFT_REASONS, MissReason

#: Ghosts kept; past it the oldest generation goes ...
GHOSTS_MAX: Final = 1 << 20
#: ... unless it is younger than this (a lost node leaves many at once, and someone will ask) ...
YOUNG_S: Final = 120.0
#: ... and there are not even so many.
YOUNG_GHOSTS_MAX: Final = 1 << 24
#: A generation ends when it has so many ghosts, or is so old and has any.
GENERATION_GHOSTS: Final = GHOSTS_MAX // 8
GENERATION_S: Final = 600.0


class Ghost(NamedTuple):
    """A mark, read: the block left for ``reason`` between two times of the owner's clock."""

    reason: MissReason
    since: float
    until: float


@dataclass(slots=True)
class _Generation:
    number: int
    began: float
    ended: float | None = None


class Ghosts:
    """The generations. A mark is a small number: ``generation * LEFT_REASONS + reason``."""

    def __init__(self) -> None:
        self._generations = [_Generation(0, 0.0)]
        self._expiring: dict[int, _Generation] = {}
        self._now = 0.0

    def mark(self, reason: MissReason) -> int:
        """The mark for blocks that leave now."""
        assert reason < LEFT_REASONS
        return self._generations[-1].number * LEFT_REASONS + reason

    def read(self, mark: int) -> Ghost:
        """What a mark says."""
        number, reason = divmod(mark, LEFT_REASONS)
        generation = self._find(number)
        until = self._now if generation.ended is None else generation.ended
        return Ghost(MissReason(reason), generation.began, until)

    def _find(self, number: int) -> _Generation:
        known = self._expiring.get(number)
        return known or next(generation for generation in self._generations if generation.number == number)

    def turn(self, now: float, counts: dict[int, int]) -> set[int]:
        """Time passes. ``counts`` is ghosts by generation number; returns those to forget from now on.

        They can still be read until :meth:`forgotten`.
        """
        self._now = now
        current = self._generations[-1]
        count = counts.get(current.number, 0)
        if count >= GENERATION_GHOSTS or (count and now - current.began >= GENERATION_S):
            current.ended = now
            self._generations.append(_Generation(current.number + 1, now))
        elif not count:
            current.began = now
        return {generation.number for generation in self._expire(now, counts)}

    def _expire(self, now: float, counts: dict[int, int]) -> list[_Generation]:
        gone: list[_Generation] = []
        total = sum(counts.get(generation.number, 0) for generation in self._generations)
        while len(self._generations) > 1 and self._too_many(total, now):
            oldest = self._generations.pop(0)
            total -= counts.get(oldest.number, 0)
            self._expiring[oldest.number] = oldest
            gone.append(oldest)
        return gone

    def _too_many(self, total: int, now: float) -> bool:
        ended = self._generations[0].ended
        assert ended is not None
        return total > GHOSTS_MAX and (now - ended >= YOUNG_S or total > YOUNG_GHOSTS_MAX)

    def forgotten(self, number: int) -> None:
        """No mark of this generation is left."""
        del self._expiring[number]

    def check(self) -> None:
        numbers = [generation.number for generation in self._generations]
        assert numbers == sorted(set(numbers)) and not self._expiring.keys() & set(numbers)
        assert [generation.ended is None for generation in self._generations] == [False] * (len(numbers) - 1) + [True]
        assert all(generation.ended is not None for generation in self._expiring.values())
