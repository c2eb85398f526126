"""The connector's worker side: a rank's KV memory, moved to and from the pool by threads of its own.

::

    start(meta)      loads --> queue --> load threads ---+
                     stores -> written                   +--> client calls --> outbox --> take_output()
    wait_layer(i)    <-- ranges of layered loads --------+
    layer_written(i) --> one store beside the step ------+
    forward_ended()  written -> queue -> store threads --+
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput, Job, JobKind, PoolState
from kvstrata.engine_adapter.connector.chunks import CHUNK_BYTES, problem_of
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.job_queue import JobQueue
from kvstrata.engine_adapter.connector.layered import LayeredLoad, LayeredLoads, LayerRanges, layered_group
from kvstrata.engine_adapter.connector.layered_store import RANGES_MAX as STORE_RANGES_MAX
from kvstrata.engine_adapter.connector.layered_store import WAIT_MAX_S
from kvstrata.engine_adapter.connector.layout import EngineMemory, PoolLayout
from kvstrata.engine_adapter.connector.loading import ABSENT, CLOSED, ERROR, INVALID, SHED, Gate, Loader
from kvstrata.engine_adapter.connector.lookup_server import LookupServer
from kvstrata.engine_adapter.connector.outbox import OpenJob, Outbox
from kvstrata.engine_adapter.connector.parking import Parking
from kvstrata.engine_adapter.connector.pool import Pool
from kvstrata.engine_adapter.connector.pool_client import PoolClient, open_client, transfer_s
from kvstrata.engine_adapter.connector.presence import answer_lookup
from kvstrata.engine_adapter.connector.stores_beside import THREADS as BESIDE_THREADS
from kvstrata.engine_adapter.connector.stores_beside import StoresBeside
from kvstrata.engine_adapter.connector.storing import Storer
from kvstrata.engine_adapter.connector.workers import Workers
from kvstrata.proto.errors import KVError
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: Apart from each other, so that no load waits for a store.
LOAD_THREADS: Final = 4
STORE_THREADS: Final = 2
#: What a call may take beyond its deadline (a silent peer), and a thread to end after it.
CLOSE_GRACE_S: Final = 2.0
#: How often the threads' health is looked at for :meth:`PoolWorkerSide.take_output`.
PROBLEMS_PERIOD_S: Final = 1.0


class PoolWorkerSide:
    """A :class:`~kvstrata.engine_adapter.connector.base.WorkerSide` over a pool. Nothing of it raises.

    ``memory``: flat u8[layout.memory_bytes], zeroed, laid out as ``connector/layout.py`` says; the engine's to use
    until and after :meth:`close`; or ``engine_memory``, where the engine has its own. ``start``, ``forward_ended``
    and ``take_output`` are called from one thread.
    """

    def __init__(
        self,
        layout: PoolLayout,
        config: PoolConfig,
        *,
        rank: int = 0,
        endpoint: str = "",
        connect: Callable[[], PoolClient],
        clock: Callable[[], float] = time.monotonic,
        chunk_bytes: int = CHUNK_BYTES,
        engine_memory: EngineMemory | None = None,
    ) -> None:
        call_s = transfer_s(config)
        bound_s = 2 * call_s + CLOSE_GRACE_S
        self.layout = layout
        self._close_s = call_s + CLOSE_GRACE_S
        callers = LOAD_THREADS + STORE_THREADS + BESIDE_THREADS
        self._pool = Pool(
            layout, rank, connect, transfer_s=call_s, callers=callers, clock=clock, engine_memory=engine_memory
        )
        self.memory: npt.NDArray[np.uint8] = self._pool.memory
        group = layered_group(layout)
        self._layer_ranges = None if group is None else LayerRanges.of(self._pool.layer_ends(group))
        self._outbox = Outbox(layout, call_s, clock)
        self._gate = Gate(self._pool, clock)
        self._loader = Loader(self._pool, self._outbox, self._gate, chunk_bytes=chunk_bytes)
        self._storer = Storer(self._pool, self._outbox, self._gate, chunk_bytes=chunk_bytes)
        self._loads = JobQueue(blocks_max=layout.num_blocks * len(layout.groups))
        self._stores = JobQueue(blocks_max=config.store_pending_blocks_max)
        self._written: list[OpenJob] = []
        self._handing = threading.Lock()
        self._layered = LayeredLoads()
        self._problems: list[str] = []
        self._look_again_at = 0.0
        self._closed = False
        self._closing = threading.Lock()
        self._lookups: LookupServer | None = None
        if endpoint and rank == 0:
            try:
                asking_s = call_s * len(layout.groups) + CLOSE_GRACE_S
                self._lookups = LookupServer(endpoint, partial(answer_lookup, self._pool), bound_s=asking_s)
            except BaseException:
                self._pool.close()
                raise
        self._load_workers = Workers("connector-load", LOAD_THREADS, self._load_step, bound_s=bound_s)
        self._store_workers = Workers("connector-store", STORE_THREADS, self._store_step, bound_s=bound_s)
        self._beside: StoresBeside | None = None
        on_host = engine_memory is None or not engine_memory.device
        if config.layered_stores and group is not None and on_host:
            ranges = LayerRanges.of(self._pool.layer_ends(group), STORE_RANGES_MAX)
            calls = self._begin_beside, self._storer.run_beside, self._again
            self._beside = StoresBeside(
                layout, group, ranges, *calls, wait_s=min(call_s / 2, WAIT_MAX_S), bound_s=bound_s
            )

    # ------------------------------------------------------------------ the engine's calls

    def start(self, meta: ConnectorMeta) -> None:
        """Queue the meta's loads at once; its stores when :meth:`forward_ended` says the KV is written.

        A reset comes first: jobs of before end as not done, when the call that they are in has ended."""
        if meta.reset:
            self._pool.renew()
        loads = [opened for job in meta.loads if (opened := self._accepted(job)) is not None]
        for opened in self._marked(loads):
            self._enqueue(opened, self._loads, self._load_workers)
        for job in meta.stores:
            if (opened := self._accepted(job)) is not None:
                self._written.append(opened)
        if self._beside is not None:
            self._beside.choose(self._written)

    def wait_layer(self, layer: int) -> bool:
        """See :meth:`WorkerSide.wait_layer`. All calls of a step take ``STAND_STILL_S`` at most."""
        return self._layered.wait_layer(layer)

    def layer_written(self, layer: int) -> None:
        """See :meth:`WorkerSide.layer_written`."""
        if self._beside is not None:
            self._beside.layer_written(layer)

    def forward_ended(self) -> None:
        """The step's KV is in memory: its stores may begin. Layered loads are waited for, within the same bound."""
        with self._handing:
            written, self._written = self._written, []
            if self._beside is not None:
                self._beside.step_ended()
        for opened in self._marked(written):
            self._outbox.restart(opened)
            self._enqueue(opened, self._stores, self._store_workers)
        self._layered.wait_ends()

    def take_output(self) -> ConnectorOutput:
        """Outcomes since the last call, each once, and how the pool is. Cheap."""
        return ConnectorOutput(
            outcomes=self._outbox.take(),
            pool=self._pool.state,
            problems=self._problems_lately(),
            superseded=self._pool.superseded,
            waited_s=self._layered.take_waited_s(),
            layers_missed=self._layered.take_missed(),
        )

    def set_waker(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when there is an outcome to take."""
        self._outbox.set_waker(wake)

    def close(self) -> None:
        """Every open job ends; memory is unregistered. Takes one call's deadline and a little at most. Safe twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if self._lookups is not None:
            self._lookups.close()
        self._gate.close()
        left = self._beside.close() if self._beside is not None else None
        waiting = [*self._loads.drain(), *self._stores.drain(), *([left] if left is not None else [])]
        with self._handing:
            waiting, self._written = [*waiting, *self._written], []
        for opened in waiting:
            self._outbox.end(opened, CLOSED)
        until = time.monotonic() + self._close_s
        for workers in self._threads():
            workers.stop(max(0.0, until - time.monotonic()))
        for opened in self._outbox.still_open():
            log.error("a transfer is overdue at close; its memory may still be written", job=opened.job.job_id)
            self._outbox.end(opened, CLOSED, anyway=True)
        self._outbox.parking.close()
        self._pool.close()

    # ------------------------------------------------------------------ what it says of itself

    def stats(self) -> dict[str, float]:
        """Sums since the start, see :meth:`Outbox.stats` and :meth:`LookupServer.stats`; queue lengths."""
        waiting = {"loads_waiting": float(len(self._loads)), "stores_waiting": float(len(self._stores))}
        beside = self._beside.stats() if self._beside is not None else {}
        return {**self._outbox.stats(), **waiting, **beside, **(self._lookups.stats() if self._lookups else {})}

    def health(self) -> dict[str, object]:
        """``healthy`` is about this side's own threads; an absent pool is in ``pool``, and is no problem here."""
        parts = self._parts()
        problems = self._find_problems()
        return {
            "healthy": not problems,
            "problems": problems,
            "pool": self._pool.health(),
            "thread_age_seconds": {name: age for part in parts for name, age in part.ages_s().items()},
            "thread_failures": sum(part.failures() for part in parts),
            "jobs_open": len(self._outbox.still_open()),
            "jobs_parked": len(self._outbox.parking),
        }

    def _parts(self) -> list[Workers | LookupServer | Parking]:
        parts: list[Workers | LookupServer | Parking] = [*self._threads(), self._outbox.parking]
        return parts if self._lookups is None else [*parts, self._lookups]

    def _threads(self) -> list[Workers]:
        beside = [self._beside.workers] if self._beside is not None else []
        return [self._load_workers, self._store_workers, *beside]

    def _find_problems(self) -> list[str]:
        problems = [problem for part in self._parts() for problem in part.problems()]
        if problem := self._pool.problem():
            problems.append(problem)
        return problems

    def _problems_lately(self) -> list[str]:
        """Looked for once in a while: every step asks."""
        now = time.monotonic()
        if now >= self._look_again_at:
            self._look_again_at = now + PROBLEMS_PERIOD_S
            self._problems = self._find_problems()
        return self._problems

    def check(self) -> None:
        """Assert every structural invariant."""
        for part in (self._outbox, self._loads, self._stores):
            part.check()

    # ------------------------------------------------------------------ jobs

    def _accepted(self, job: Job) -> OpenJob | None:
        """An open job to go on with; None when it has ended already."""
        opened = self._outbox.accept(job, self._pool.generation)
        layered = job.layered and job.kind is JobKind.LOAD
        if layered and (opened is None or self._layer_ranges is None):
            self._layered.miss()
        if opened is None:
            log.error("a job id was given twice: the second job is ignored", job=job.job_id)
            return None
        if layered and self._layer_ranges is not None:
            opened.layers = LayeredLoad(self._layer_ranges)
            self._layered.add(opened.layers)
        if problem := problem_of(job, self.layout):
            log.error("a job that cannot be carried out", job=job.job_id, reason=problem)
            self._outbox.end(opened, INVALID)
        elif self._closed:
            self._outbox.end(opened, CLOSED)
        elif self._pool.state is PoolState.ABSENT:
            self._outbox.end(opened, ABSENT)
        elif self._outbox.parking.full():
            self._outbox.end(opened, SHED)
        else:
            return opened
        return None

    def _marked(self, jobs: list[OpenJob]) -> list[OpenJob]:
        """Jobs whose memory comes after what the engine's stream has queued by now; without that, they end."""
        try:
            mark = self._pool.mark() if jobs else None
        except KVError as error:
            log.error("jobs not done: the engine's device failed", reason=f"{type(error).__name__}: {error}")
            for opened in jobs:
                self._outbox.end(opened, ERROR)
            return []
        for opened in jobs:
            opened.after = mark
        return jobs

    def _enqueue(self, opened: OpenJob, queue: JobQueue, workers: Workers) -> None:
        if queue.offer(opened):
            workers.wake()
        else:
            self._outbox.end(opened, CLOSED if self._closed else SHED)

    def _begin_beside(self, opened: OpenJob) -> None:
        """It does not wait for the end of the step any more."""
        with self._handing:
            self._written.remove(opened)
        self._outbox.restart(opened)

    def _again(self, opened: OpenJob) -> None:
        """A store that was given up beside the step: it is made when the step has ended, which may be now."""
        with self._handing:
            writing, opened.writing = opened.writing, None
            if writing is not None and not writing.over and not self._closed:
                self._written.append(opened)
                return
        self._outbox.restart(opened)
        self._enqueue(opened, self._stores, self._store_workers)

    def _load_step(self) -> bool:
        opened = self._loads.take()
        if opened is not None:
            self._loader.run(opened)
        return opened is not None

    def _store_step(self) -> bool:
        jobs = self._stores.take_chain(self.layout.hash_bytes)
        if jobs:
            self._storer.run(jobs)
        return bool(jobs)


def make_worker_side(
    layout: PoolLayout,
    config: PoolConfig,
    *,
    rank: int = 0,
    endpoint: str = "",
    name: str = "",
    engine_memory: EngineMemory | None = None,
) -> PoolWorkerSide:
    """The worker side of ``rank`` (its shards, see :meth:`PoolLayout.shards`). A pool that is down is no error.

    ``endpoint``: where rank 0 answers lookups (``ipc://PATH``). ``name``: shown in the pool's health. Raises
    :class:`InvalidArgument` for a configuration that names no pool, and for an endpoint that cannot be bound.
    """
    connect = partial(open_client, config, name and f"{name}/{rank}")
    return PoolWorkerSide(layout, config, rank=rank, endpoint=endpoint, connect=connect, engine_memory=engine_memory)
