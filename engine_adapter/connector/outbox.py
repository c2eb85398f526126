"""Jobs a worker side has accepted, and their outcomes: each accepted job has exactly one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.client.results import all_settled, reasons_of
from kvstrata.engine_adapter.connector.base import Job, JobKind, JobOutcome
from kvstrata.engine_adapter.connector.chunks import blocks_in
from kvstrata.engine_adapter.connector.layered import LayeredLoad
from kvstrata.engine_adapter.connector.layered_store import LayeredStore
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.parking import Parking
from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import HELD, BlockStatus
from kvstrata.transfer.base import Landing
from kvstrata.transfer.gpu.runtime import Event

log = get_logger(__name__)

_HELD: Final = np.zeros(256, np.uint8)
_HELD[list(HELD)] = 1
_MOVED: Final = (int(BlockStatus.STORED), int(BlockStatus.LOADED))


@dataclass(eq=False, slots=True)
class OpenJob:
    """An accepted job. ``status`` u8[blocks], group after group, UNKNOWN where nothing was tried yet.

    ``start_by``: monotonic seconds after which no more calls are made for it. ``generation``: of the weights that it
    is of. ``layers``: of a layered load, what the forward pass waits for. ``writing``: of a store that has begun beside
    the forward pass. ``pending``: what its calls gave up and may still touch its memory.
    """

    job: Job
    started: float
    start_by: float
    generation: int = 0
    after: Event | None = None  #: the mark on the engine's stream that its memory comes after
    layers: LayeredLoad | None = None
    writing: LayeredStore | None = None
    pending: list[Landing] = field(default_factory=list)
    status: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.status = np.zeros(blocks_in(self.job), np.uint8)


class Outbox:
    """Thread-safe. ``transfer_s``: what one call to the pool may take; a job begins none that could end late."""

    def __init__(self, layout: PoolLayout, transfer_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._transfer_s = transfer_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, OpenJob] = {}
        self._outcomes: list[JobOutcome] = []
        self._stats: defaultdict[str, float] = defaultdict(float)
        self._wake: Callable[[], None] = _nobody
        self.parking = Parking(self._report, layout.num_blocks * len(layout.groups))

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def accept(self, job: Job, generation: int = 0) -> OpenJob | None:
        """None, and no outcome, for the id of a job that is open already."""
        now = self._clock()
        # A job shorter than two calls gets the first half of its time, and may end up to a call late.
        opened = OpenJob(job, now, now + max(job.deadline_s - self._transfer_s, job.deadline_s / 2), generation)
        with self._lock:
            if job.job_id in self._open:
                self._stats["jobs_refused"] += 1
                return None
            self._open[job.job_id] = opened
        return opened

    def restart(self, opened: OpenJob) -> None:
        """Its time counts from now: a store waits for the forward pass, which may take longer than a store may."""
        now = self._clock()
        opened.start_by, opened.started = now + (opened.start_by - opened.started), now

    def end(self, opened: OpenJob, untried: str, *, anyway: bool = False) -> None:
        """No more calls are made for the job. ``untried``: why blocks were left out.

        It is terminal once nothing touches its memory any more: now, or when what is pending of it has settled; or now
        ``anyway``, because nobody will ask.
        """
        if anyway:
            self.parking.drop(opened)
        elif not all_settled(opened.pending):
            if opened.layers is not None:
                opened.layers.end(loaded=False)
            self.parking.park(opened, untried)
            return
        self._report(opened, untried)

    def _report(self, opened: OpenJob, untried: str) -> None:
        outcome = self._outcome(opened, untried)
        with self._lock:
            if self._open.pop(opened.job.job_id, None) is None:
                self._stats["outcomes_refused"] += 1
                return
            self._outcomes.append(outcome)
            self._count(outcome, len(opened.status))
        if opened.layers is not None:
            opened.layers.end(loaded=0 not in outcome.done)
        try:
            self._wake()
        except Exception:
            log.exception("the engine's waker failed", job=outcome.job_id)

    def take(self) -> list[JobOutcome]:
        """Outcomes since the last call, each once."""
        if not self._outcomes:
            return []
        with self._lock:
            taken, self._outcomes = self._outcomes, []
        return taken

    def still_open(self) -> list[OpenJob]:
        with self._lock:
            return list(self._open.values())

    def stats(self) -> dict[str, float]:
        """Sums since the start. ``load_*`` and ``store_*``: ``jobs``, ``blocks``, ``blocks_<reason>``, ``bytes``,
        ``seconds`` (from start to outcome, added up over jobs); what is open; what was refused."""
        with self._lock:
            return {
                "jobs_open": float(len(self._open)),
                "jobs_parked": float(len(self.parking)),
                **self._stats,
            }

    def check(self) -> None:
        """Assert every structural invariant."""
        with self._lock:
            waiting = [outcome.job_id for outcome in self._outcomes]
            assert len(set(waiting)) == len(waiting), "two outcomes of one job"
            for kind in ("load", "store"):
                by_reason = sum(n for name, n in self._stats.items() if name.startswith(f"{kind}_blocks_"))
                assert by_reason == self._stats[f"{kind}_blocks"], "blocks asked are not those by reason"

    def _outcome(self, opened: OpenJob, untried: str) -> JobOutcome:
        job, status = opened.job, opened.status
        tried = status[status != BlockStatus.UNKNOWN]
        reasons = reasons_of(tried) if len(tried) else {}
        if len(tried) < len(status):
            reasons[untried] = reasons.get(untried, 0) + len(status) - len(tried)
        return JobOutcome(
            job_id=job.job_id,
            kind=job.kind,
            done=_HELD[status].tobytes(),
            bytes_moved=self._bytes_moved(opened),
            seconds=self._clock() - opened.started,
            reasons=reasons,
            layered=opened.writing is not None,
        )

    def _bytes_moved(self, opened: OpenJob) -> int:
        moved, offset = 0, 0
        for blocks in opened.job.groups:
            part = opened.status[offset : offset + len(blocks.block_ids)]
            offset += len(part)
            if count := int(np.isin(part, _MOVED).sum()):
                moved += count * self._layout.block_bytes(blocks.group)
        return moved

    def _count(self, outcome: JobOutcome, blocks: int) -> None:
        kind = "load" if outcome.kind is JobKind.LOAD else "store"
        self._stats[f"{kind}_jobs"] += 1
        self._stats[f"{kind}_blocks"] += blocks
        self._stats[f"{kind}_bytes"] += outcome.bytes_moved
        self._stats[f"{kind}_seconds"] += outcome.seconds
        for reason, count in outcome.reasons.items():
            self._stats[f"{kind}_blocks_{reason}"] += count


def _nobody() -> None:
    """Nobody waits for outcomes."""
