"""The ledger of loads and stores: which blocks each holds, which ranks have reported, what every rank has done.

Keyed by job id, never by request id: a request may stop and come back under its id while its old jobs still run.
Sans-IO. A job ends when every rank has reported it, and only then are its blocks released: until that moment a
transfer may still touch them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstrata.engine_adapter.connector.base import BlockHolder, GroupBlocks, Job, JobKind, JobOutcome

#: Lines kept of what happened to jobs, the newest.
STORY_MAX: Final = 2048
#: A job is overdue when it has not ended after this many of its deadlines, and a second.
OVERDUE_DEADLINES: Final = 2.0
OVERDUE_GRACE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A job that every rank has reported. ``done``: one byte a block, 1 where every rank has done it.

    ``bytes_moved`` and ``seconds`` are those of the rank that took longest; ``reasons`` are summed over ranks.
    ``layered``: a store, and some rank made it beside the forward pass.
    """

    job: Job
    done: bytes
    bytes_moved: int
    seconds: float
    reasons: dict[str, int]
    layered: bool = False


@dataclass(slots=True)
class _OpenJob:
    job: Job
    block_ids: list[int]
    under_way_since: float  # infinite until the step that carried it has ended: a store waits for its forward pass
    done: int  # one byte a block, as a number: AND over the ranks is one operation
    reported: set[int] = field(default_factory=set)
    bytes_moved: int = 0
    seconds: float = -1.0
    reasons: Counter[str] = field(default_factory=Counter)
    overdue: bool = False
    layered: bool = False


class JobLedger:
    """Open jobs and the blocks they hold. ``ranks``: how many must report each job.

    ``unknown_outcomes``, ``malformed_outcomes`` and ``overdue_jobs`` count since the start.
    """

    def __init__(self, ranks: int, holder: BlockHolder, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks = ranks
        self.unknown_outcomes = 0
        self.malformed_outcomes = 0
        self.overdue_jobs = 0
        self._holder = holder
        self._clock = clock
        self._next_id = 1
        self._open: dict[int, _OpenJob] = {}
        self._held = 0
        self._pending = dict.fromkeys(JobKind, 0)
        self._story: deque[tuple[float, int, str]] = deque(maxlen=STORY_MAX)

    def open(
        self,
        kind: JobKind,
        request_id: str,
        cache_salt: str,
        groups: list[GroupBlocks],
        deadline_s: float,
        *,
        layered: bool = False,
        trace: str = "",
    ) -> Job:
        """Hold the blocks, until the job is terminal on every rank, and return the job to be sent to them."""
        block_ids = [block for entry in groups for block in entry.block_ids]
        job = Job(
            job_id=self._next_id,
            kind=kind,
            request_id=request_id,
            cache_salt=cache_salt,
            groups=groups,
            deadline_s=deadline_s,
            layered=layered,
            trace=trace,
        )
        self._next_id += 1
        self._holder.hold(block_ids)
        ones = int.from_bytes(b"\x01" * len(block_ids), "little")
        self._open[job.job_id] = _OpenJob(job, block_ids, math.inf, ones)
        self._held += len(block_ids)
        self._pending[kind] += len(block_ids)
        self._tell(job.job_id, f"opened: {kind.name} of {request_id!r}, {len(block_ids)} blocks")
        return job

    def outcome(self, rank: int, outcome: JobOutcome) -> JobEnd | None:
        """Take one rank's report. Returns the end when it was the last one; the blocks are released by then.

        A report of a job that is not open, or the second of one rank, is counted and changes nothing. One whose
        ``done`` has the wrong length or kind counts as nothing done.
        """
        entry = self._open.get(outcome.job_id)
        if entry is None or rank in entry.reported or not 0 <= rank < self.ranks:
            self.unknown_outcomes += 1
            self._tell(outcome.job_id, f"ignored: rank {rank} reported it, and it is not waited for")
            return None
        entry.reported.add(rank)
        entry.done &= self._done_of(entry, outcome)
        entry.reasons.update(outcome.reasons)
        entry.layered |= outcome.layered
        if outcome.seconds > entry.seconds:
            entry.seconds, entry.bytes_moved = outcome.seconds, outcome.bytes_moved
        self._tell(outcome.job_id, f"rank {rank} reported, {self.ranks - len(entry.reported)} to come")
        if len(entry.reported) < self.ranks:
            return None
        self._close(entry)
        done = entry.done.to_bytes(len(entry.block_ids), "little")
        return JobEnd(entry.job, done, entry.bytes_moved, max(entry.seconds, 0.0), dict(entry.reasons), entry.layered)

    def _done_of(self, entry: _OpenJob, outcome: JobOutcome) -> int:
        if outcome.kind is not entry.job.kind or len(outcome.done) != len(entry.block_ids):
            self.malformed_outcomes += 1
            self._tell(outcome.job_id, f"malformed: {outcome.kind.name}, {len(outcome.done)} blocks")
            return 0
        return int.from_bytes(outcome.done, "little")

    def cancel(self, job_id: int) -> None:
        """End a job that was not sent to any rank: nothing can touch its blocks."""
        entry = self._open[job_id]
        assert not entry.reported, f"job {job_id} was sent: {self.story(job_id)}"
        self._close(entry)
        self._tell(job_id, "cancelled before it was sent")

    def abandon(self) -> int:
        """Release everything: for shutdown, when the workers are gone. Returns how many jobs were open."""
        entries = list(self._open.values())
        for entry in entries:
            self._close(entry)
            self._tell(entry.job.job_id, "abandoned")
        return len(entries)

    def _close(self, entry: _OpenJob) -> None:
        del self._open[entry.job.job_id]
        self._held -= len(entry.block_ids)
        self._pending[entry.job.kind] -= len(entry.block_ids)
        self._holder.release(entry.block_ids)

    def newly_overdue(self) -> list[Job]:
        """Jobs that should have ended long ago, each reported once. Their blocks stay held. To be called after each
        step: a job's time counts from the first call after it was opened. O(open jobs)."""
        now = self._clock()
        for entry in self._open.values():
            entry.under_way_since = min(entry.under_way_since, now)
        late = [
            entry
            for entry in self._open.values()
            if not entry.overdue
            and now - entry.under_way_since > OVERDUE_DEADLINES * entry.job.deadline_s + OVERDUE_GRACE_S
        ]
        for entry in late:
            entry.overdue = True
            self._tell(entry.job.job_id, f"overdue: ranks that reported: {sorted(entry.reported)}")
        self.overdue_jobs += len(late)
        return [entry.job for entry in late]

    def pending_blocks(self, kind: JobKind) -> int:
        """Blocks held by open jobs of one kind; a block counts once for each job that holds it."""
        return self._pending[kind]

    @property
    def newest(self) -> int:
        """The id of the newest job; 0 before there was one."""
        return self._next_id - 1

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def story(self, job_id: int) -> list[tuple[float, str]]:
        """(time, what happened) of one job, oldest first, as far as it is kept."""
        return [(at, text) for at, job, text in self._story if job == job_id]

    def check(self) -> None:
        """Assert that counts equal what the open jobs hold, and that each still waits for a rank."""
        by_kind = dict.fromkeys(JobKind, 0)
        for job_id, entry in self._open.items():
            blocks = [block for group in entry.job.groups for block in group.block_ids]
            by_kind[entry.job.kind] += len(blocks)
            assert entry.job.job_id == job_id < self._next_id
            assert entry.block_ids == blocks, self.story(job_id)
            assert entry.reported < set(range(self.ranks)), self.story(job_id)
            assert entry.done.bit_length() <= 8 * len(blocks), self.story(job_id)
        assert by_kind == self._pending and sum(by_kind.values()) == self._held, (by_kind, self._pending, self._held)

    def _tell(self, job_id: int, text: str) -> None:
        self._story.append((self._clock(), job_id, text))
