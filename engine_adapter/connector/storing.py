"""Store jobs, carried out: those of one request that follow each other go to the pool as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from kvstrata.engine_adapter.connector.base import GroupBlocks
from kvstrata.engine_adapter.connector.chunks import CHUNK_BYTES, chunks_of
from kvstrata.engine_adapter.connector.job_queue import continues
from kvstrata.engine_adapter.connector.loading import ABSENT, ERROR, LATE, Codes, Gate, TransferPool
from kvstrata.engine_adapter.connector.outbox import OpenJob, Outbox
from kvstrata.engine_adapter.connector.pool import verdict_of
from kvstrata.engine_adapter.connector.readiness import Verdict
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing
from kvstrata.transfer.tracing import TRACING


class Storer:
    """Thread-safe: all state of a call is in its jobs. Jobs given to :meth:`run` continue one another."""

    def __init__(self, pool: TransferPool, outbox: Outbox, gate: Gate, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pool = pool
        self._outbox = outbox
        self._gate = gate
        self._chunk_bytes = chunk_bytes

    def run(self, jobs: Sequence[OpenJob]) -> None:
        """Ends each job exactly once, whatever happens; a mistake in this program is raised after that."""
        width = self._pool.layout.hash_bytes
        assert all(continues(a.job, b.job, width) for a, b in pairwise(jobs)), "not one chain"
        left = list(jobs)
        try:
            while left and self._gate.late(left[0].start_by):
                self._outbox.end(left.pop(0), LATE)
            if left:
                untried = self._run(left)
                while left:
                    self._outbox.end(left.pop(0), untried)
        finally:
            for opened in left:
                self._outbox.end(opened, ERROR)

    def run_beside(self, opened: OpenJob) -> bool:
        """One job, as its ``writing`` allows. False when that took too long: the job has not ended, and what of it is
        ABORTED was not stored."""
        untried, again = ERROR, False
        try:
            untried = self._run([opened])
            assert opened.writing is not None
            again = opened.writing.given_up and not opened.pending and not self._gate.stale(opened)
            again = again and bool((opened.status == BlockStatus.ABORTED).any())
        finally:
            if not again:
                self._outbox.end(opened, untried)
        return not again

    def _run(self, jobs: Sequence[OpenJob]) -> str:
        """Store what can be, under the trace that the jobs share; returns why the rest was not tried."""
        with TRACING.under(jobs[0].job.trace):
            return self._stored(jobs)

    def _stored(self, jobs: Sequence[OpenJob]) -> str:
        start_by = min(opened.start_by for opened in jobs)
        merged = _merged(jobs)
        # The last job's mark is the latest on the engine's one stream.
        # Beside a forward pass it is one call: the first layers of all blocks go first.
        writing = jobs[0].writing
        size = self._chunk_bytes if writing is None else sys.maxsize
        for chunk in chunks_of(merged, self._pool.layout, size, jobs[-1].after):
            if stop := self._gate.stop(jobs[0], start_by):
                return stop
            pending: list[Landing] = []
            try:
                status = self._pool.store(jobs[0].job.cache_salt, chunk, jobs[0].generation, pending, writing)
            finally:
                for opened in jobs if pending else ():
                    opened.pending.extend(pending)
            _share(jobs, chunk.column, chunk.start, status)
            if verdict_of(status) is not Verdict.ANSWERED:
                return ABSENT
        return ""


def _merged(jobs: Sequence[OpenJob]) -> list[GroupBlocks]:
    """The jobs' blocks, group by group, as one chain each."""
    if len(jobs) == 1:
        return jobs[0].job.groups
    columns = zip(*(opened.job.groups for opened in jobs), strict=True)
    return [
        GroupBlocks(
            group=parts[0].group,
            hashes=b"".join(part.hashes for part in parts),
            block_ids=[block_id for part in parts for block_id in part.block_ids],
            first_index=parts[0].first_index,
            parent=parts[0].parent,
        )
        for parts in columns
    ]


def _share(jobs: Sequence[OpenJob], column: int, start: int, status: Codes) -> None:
    """Enter the statuses of rows ``start`` and on of the merged group ``column`` where each job keeps them."""
    stop, first = start + len(status), 0
    for opened in jobs:
        counts = [len(blocks.block_ids) for blocks in opened.job.groups]
        low, high = max(start, first), min(stop, first + counts[column])
        if low < high:
            offset = sum(counts[:column]) - first
            opened.status[offset + low : offset + high] = status[low - start : high - start]
        first += counts[column]
