"""Numbered batches of what became visible and what ceased to be: the node's side of the directory.

Changes gather in the open batch; closing it gives it the next number, from 1 within an incarnation.
Closed batches are kept until every master has them, or until the bound: who then still needs one that is
gone needs a snapshot instead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import Departure, Tier
from kvstrata.storage.records import Shelf

#: Hashes in closed batches that are kept for masters to catch up with.
KEPT_HASHES_MAX: Final = 1 << 20
#: Hashes in one batch: it travels as one message.
BATCH_HASHES_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """Neighbouring changes of one kind: hashes of one tenant in one namespace and tier, packed.

    ``why`` they were removed, and whose need (``cause``, a salt) it was.
    """

    added: bool
    namespace: Namespace
    epoch: int
    salt: str
    tier: Tier
    hashes: bytes
    why: Departure = Departure.UNKNOWN
    cause: str = ""


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """``seq`` counts up from 1 without gaps; ``runs`` are in the order they happened."""

    seq: int
    runs: tuple[ChangeRun, ...]
    count: int


@dataclass(slots=True)
class _Open:
    added: bool
    shelf: Shelf
    tier: Tier
    why: Departure
    cause: str
    hashes: list[bytes] = field(default_factory=list)

    def closed(self) -> ChangeRun:
        shelf = self.shelf
        return ChangeRun(
            self.added, shelf.entry.namespace, shelf.epoch, shelf.salt, self.tier, b"".join(self.hashes), self.why,
            self.cause,
        )  # fmt: skip


class DeltaLog:
    """Not thread-safe: its owner's lock covers it."""

    def __init__(self, kept_hashes_max: int = KEPT_HASHES_MAX, batch_hashes_max: int = BATCH_HASHES_MAX) -> None:
        self.open_seq = 1  #: the number that the open batch will get
        self._kept_max = kept_hashes_max
        self._batch_max = batch_hashes_max
        self._open: list[_Open] = []
        self._open_count = 0
        self._closed: deque[DeltaBatch] = deque()
        self._kept = 0

    @property
    def answer_seq(self) -> int:
        """A directory that has applied this batch knows all that an answer given now was based on."""
        return self.open_seq if self._open else self.open_seq - 1

    @property
    def gathers(self) -> bool:
        """Whether there is something in the open batch."""
        return bool(self._open)

    @property
    def room(self) -> int:
        """So many hashes more end the open batch."""
        return self._batch_max - self._open_count

    def record(
        self,
        added: bool,
        shelf: Shelf,
        hashes: list[bytes],
        tier: Tier = Tier.DRAM,
        why: Departure = Departure.UNKNOWN,
        cause: str = "",
    ) -> None:
        """Note a change; O(hashes). ``why`` and ``cause`` are for removals."""
        last = self._open[-1] if self._open else None
        if (
            last is None
            or last.shelf is not shelf
            or last.added is not added
            or last.why is not why
            or last.tier is not tier
            or last.cause != cause
        ):
            last = _Open(added, shelf, tier, why, cause)
            self._open.append(last)
        last.hashes.extend(hashes)
        self._open_count += len(hashes)
        if self._open_count >= self._batch_max:
            self.close_batch()

    def close_batch(self) -> int:
        """Number the open batch, if there is anything in it; returns the last number given."""
        if self._open:
            batch = DeltaBatch(self.open_seq, tuple(run.closed() for run in self._open), self._open_count)
            self._closed.append(batch)
            self._kept += self._open_count
            self.open_seq += 1
            self._open = []
            self._open_count = 0
            while self._kept > self._kept_max and len(self._closed) > 1:
                self._kept -= self._closed.popleft().count
        return self.open_seq - 1

    def mark(self) -> int:
        """Number a batch of nothing: who has applied it knows of what deltas do not tell. Returns its number."""
        self.close_batch()
        self._closed.append(DeltaBatch(self.open_seq, (), 0))
        self.open_seq += 1
        return self.open_seq - 1

    def after(self, seq: int) -> list[DeltaBatch] | None:
        """Closed batches numbered above ``seq``; None when some are gone: a snapshot is needed."""
        if seq >= self.open_seq - 1:
            return []
        first = self._closed[0].seq if self._closed else self.open_seq
        if seq + 1 < first:
            return None
        return [batch for batch in self._closed if batch.seq > seq]

    def trim(self, seq: int) -> None:
        """Every master has applied ``seq``: forget batches up to it."""
        while self._closed and self._closed[0].seq <= seq:
            self._kept -= self._closed.popleft().count

    def check(self) -> None:
        """Assert that numbers have no gap and counts add up."""
        numbers = [batch.seq for batch in self._closed]
        assert numbers == list(range(self.open_seq - len(numbers), self.open_seq)), numbers
        assert self._kept == sum(batch.count for batch in self._closed)
        assert self._open_count == sum(len(run.hashes) for run in self._open)
