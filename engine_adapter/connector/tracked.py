"""What the scheduler side remembers of one life of a request: from when it was queued until it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.engine_adapter.connector.hits import LoadRows
from kvstrata.engine_adapter.connector.offers import OfferKey
from kvstrata.engine_adapter.connector.policy import Choice


@dataclass(slots=True)
class Question:
    """One lookup of a request's chain. ``moment``: when it was asked, as :class:`OfferedBlocks` counts.

    ``present``: one byte a block and group, once the lookup ended; ``known`` when the pool itself answered.
    """

    num_tokens: int
    moment: int
    ended_at: float = 0.0
    present: list[bytearray] = field(default_factory=list)
    known: bool = False

    @property
    def ended(self) -> bool:
        return bool(self.present)

    def looked_up(self, group: int, index: int) -> int:
        """The moment at which the pool was asked about a block; 0 when it was not, or has not answered."""
        return self.moment if self.known and index < len(self.present[group]) else 0

    def next_missing(self, group: int, index: int, end: int) -> int:
        """The first block from ``index`` on that the pool is not known to have, or ``end``."""
        if not self.known or index >= len(self.present[group]):
            return index
        hole = self.present[group].find(0, index)
        return min(end, hole if hole >= 0 else len(self.present[group]))


@dataclass(frozen=True, slots=True)
class Match:
    """What was decided for a number of local tokens."""

    local_tokens: int
    hit_tokens: int
    choice: Choice


@dataclass(slots=True)
class TrackedRequest:
    """``life`` tells it from an earlier request of the same id.

    ``cursor``: the first block of each group that was neither offered nor found to be in the pool; ``limit``: full
    blocks that are computed, or will be when the step ends.
    """

    request_id: str
    life: int
    cursor: list[int]
    limit: list[int]
    question: Question | None = None
    match: Match | None = None
    counted: bool = False
    load_job: int | None = None
    loaded: bool = False  # one load a life: what it did not bring is computed
    computed: bool = False  # a step has computed some of it
    stale: bool = False  # its KV, or what it hangs on, is of older weights than the engine's

    def reset(self) -> None:
        """The engine's weights are new: what was begun is of no use to the pool, nor the pool to it."""
        self.stale |= self.loaded or self.computed
        self.offer_again()

    @property
    def skipped(self) -> int:
        """Computed blocks that were not offered."""
        return sum(max(0, limit - cursor) for limit, cursor in zip(self.limit, self.cursor, strict=True))

    def offer_again(self) -> None:
        """The pool may have lost everything: start from the first block, and believe no lookup from before."""
        self.cursor = [0] * len(self.cursor)
        self.question = self.match = None


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """A load job, and what to make of its end."""

    request_id: str
    life: int
    rows: LoadRows
    explored: bool
    layered: bool = False


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store job. ``keys[i]`` and ``indices[i]`` (in its group's chain) belong to the job's block i."""

    request_id: str
    life: int
    keys: list[OfferKey]
    indices: list[int]
