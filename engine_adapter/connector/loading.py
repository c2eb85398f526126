"""A load job, carried out: call after call, in the order of its tokens, until its end, a hole or its deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.base import PoolState
from kvstrata.engine_adapter.connector.chunks import CHUNK_BYTES, Chunk, chunks_of
from kvstrata.engine_adapter.connector.layered import LayeredLoad
from kvstrata.engine_adapter.connector.layered_store import LayeredStore
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.outbox import OpenJob, Outbox
from kvstrata.engine_adapter.connector.pool import verdict_of
from kvstrata.engine_adapter.connector.readiness import Verdict
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing
from kvstrata.transfer.tracing import TRACING

Codes = npt.NDArray[np.uint8]

# Why blocks of a job were not tried, beside the names of BlockStatus.
ABSENT: Final = "absent"  #: the pool does not answer
SHED: Final = "shed"  #: a queue was full
CLOSED: Final = "closed"  #: the worker side was closed
INVALID: Final = "invalid"  #: the job names blocks that are not there
LATE: Final = "late"  #: as the status: no call was begun that could end after the deadline
STALE: Final = "stale"  #: the engine's weights are new, and the job is of older ones
SKIPPED: Final = "skipped"  #: blocks before it are missing, so it would be of no use
ERROR: Final = "error"  #: a mistake in this program; the log has it


class TransferPool(Protocol):
    """What a job needs of :class:`kvstrata.engine_adapter.connector.pool.Pool`."""

    @property
    def layout(self) -> PoolLayout: ...
    @property
    def state(self) -> PoolState: ...
    @property
    def generation(self) -> int: ...
    def load(
        self, salt: str, chunk: Chunk, generation: int, pending: list[Landing], layers: LayeredLoad | None = None
    ) -> Codes: ...
    def store(
        self, salt: str, chunk: Chunk, generation: int, pending: list[Landing], writing: LayeredStore | None = None
    ) -> Codes: ...


class Gate:
    """Whether a job, load or store, may make its next call. Thread-safe."""

    def __init__(self, pool: TransferPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._closing = False

    def close(self) -> None:
        """Jobs under way end after the call they are in."""
        self._closing = True

    def stale(self, opened: OpenJob) -> bool:
        """It is of weights that the engine has no more."""
        return opened.generation != self._pool.generation

    def stop(self, opened: OpenJob, start_by: float) -> str:
        """Why it may not, or an empty string. ``start_by``: monotonic seconds after which no call is begun."""
        if self._closing:
            return CLOSED
        if self.stale(opened):
            return STALE
        if self._pool.state is PoolState.ABSENT:
            return ABSENT
        return LATE if self.late(start_by) else ""

    def late(self, start_by: float) -> bool:
        return self._clock() > start_by


class Loader:
    """Thread-safe: all state of a job is in its own :class:`OpenJob`."""

    def __init__(self, pool: TransferPool, outbox: Outbox, gate: Gate, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pool = pool
        self._outbox = outbox
        self._gate = gate
        self._chunk_bytes = chunk_bytes

    def run(self, opened: OpenJob) -> None:
        """Ends the job exactly once, whatever happens; a mistake in this program is raised after that."""
        untried = ERROR
        try:
            with TRACING.under(opened.job.trace):
                untried = self._run(opened)
        finally:
            if self._gate.stale(opened):
                opened.status[:] = BlockStatus.UNKNOWN  # what came before was of the older weights too
                untried = STALE
            self._outbox.end(opened, untried)

    def _run(self, opened: OpenJob) -> str:
        """Load what can be; returns why the rest was not tried."""
        job = opened.job
        # A layered load is one call: the first layers of all blocks come first.
        size = sys.maxsize if opened.layers is not None else self._chunk_bytes
        for chunk in chunks_of(job.groups, self._pool.layout, size, opened.after):
            if stop := self._gate.stop(opened, opened.start_by):
                return stop
            status = self._pool.load(job.cache_salt, chunk, opened.generation, opened.pending, opened.layers)
            opened.status[chunk.offset : chunk.offset + len(status)] = status
            if verdict_of(status) is not Verdict.ANSWERED:
                return ABSENT
            if not (status == BlockStatus.LOADED).all():
                return SKIPPED
        return ""
