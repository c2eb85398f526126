"""The scheduler's half of the connector: what to ask the pool for, what to load, what to offer it, what to hold.

Sans-IO but for the lookup client it is given. It composes the job ledger, the load-or-compute policy, the memory of
offered blocks and the store planner, and keeps one :class:`TrackedRequest` a request, from when it is queued until it
stops. Nothing here knows an engine beyond the contracts in ``base.py`` and ``layout.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvstrata.engine_adapter.connector.base import (
    BlockHolder,
    BlockIds,
    Computed,
    ConnectorMeta,
    ConnectorOutput,
    ConnectorRequest,
    GroupBlocks,
    Job,
    JobKind,
    LoadEnd,
    PoolState,
)
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.counters import Counters
from kvstrata.engine_adapter.connector.external_hits import ExternalHits
from kvstrata.engine_adapter.connector.hits import LoadRows, pools_prefixes
from kvstrata.engine_adapter.connector.jobs import JobEnd, JobLedger
from kvstrata.engine_adapter.connector.layered import layered_group
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.lookups import LookupClient, Lookups
from kvstrata.engine_adapter.connector.offers import OfferedBlocks, OfferKey
from kvstrata.engine_adapter.connector.policy import Decision, LoadOrCompute
from kvstrata.engine_adapter.connector.store_planner import StorePlanner
from kvstrata.engine_adapter.connector.tracked import OpenLoad, OpenStore, TrackedRequest
from kvstrata.proto.logs import get_logger

log = get_logger("kvstrata.connector")


def make_scheduler_side(
    layout: PoolLayout, config: PoolConfig, endpoint: str, holder: BlockHolder
) -> PoolSchedulerSide:
    """The scheduler side with a lookup socket of its own. ``endpoint``: of rank 0's lookup server."""
    lookups = LookupClient(endpoint, hash_bytes=layout.hash_bytes, deadline_ms=config.lookup_deadline_ms)
    return PoolSchedulerSide(layout, config, lookups, holder)


class PoolSchedulerSide:
    """Implements :class:`~kvstrata.engine_adapter.connector.base.SchedulerSide`. Used from one thread."""

    def __init__(
        self,
        layout: PoolLayout,
        config: PoolConfig,
        lookups: Lookups,
        holder: BlockHolder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.config = config
        self.policy = LoadOrCompute(
            config.load_policy, config.load_deadline_ms / 1000, layout.aligned_tokens, config.layered_loads
        )
        self.ledger = JobLedger(layout.ranks, holder, clock)
        self.offers = OfferedBlocks()
        self._clock = clock
        self._lookups = lookups
        self._planner = StorePlanner(layout, self.offers, store_decode=config.store_decode)
        self._counters = Counters()
        self._hits = ExternalHits(layout, lookups, self.policy, self.offers, self._counters, clock)
        self._requests: dict[str, TrackedRequest] = {}
        self._loads: dict[int, OpenLoad] = {}
        self._stores: dict[int, OpenStore] = {}
        self._unsent: list[Job] = []
        self._lives = 0
        self._reset_due = False
        self._stale_jobs = 0  # jobs up to this id are of older weights
        self._superseded = False
        self._waited_s = 0.0  # of the newest step, for layered loads
        self._missed = False  # of the newest step: it read a layer that was not there
        self._late: set[int] = set()  # layered loads that did not end with their step
        self._problems: list[str] = []
        self._usable = pools_prefixes(layout)
        self._by_layer = layered_group(layout) is not None
        # Stores may hold half of the cache at most: the engine has to go on while a pool is slow to take them.
        self._store_blocks_max = min(config.store_pending_blocks_max, (layout.num_blocks - 1) // 2)
        if not self._usable:
            log.warning("pool unused: a group of layers has a state that no prefix of tokens determines")

    # ---------------------------------------------------------------- lookups and loads

    def on_new_request(self, request: ConnectorRequest) -> None:
        """See :meth:`SchedulerSide.on_new_request`."""
        state = self._begin(request)
        if self._may_load(state) and self._hits.limit(request) > 0:
            self._hits.ask(state, request)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int | None:
        """See :meth:`SchedulerSide.get_num_new_matched_tokens`. 0 after a load: what it did not bring is computed."""
        self._hits.poll()
        state = self._requests.get(request.request_id) or self._begin(request)
        if not self._may_load(state) or self._hits.limit(request) <= num_computed_tokens:
            return 0
        return self._hits.tokens_to_load(state, request, num_computed_tokens)

    def loads_by_layer(self, request: ConnectorRequest, num_external: int, rest_tokens: int) -> bool:
        """See :meth:`SchedulerSide.loads_by_layer`. Not while another load is under way: it would have to wait."""
        if not self._by_layer or self.ledger.pending_blocks(JobKind.LOAD):
            return False
        match = self._requests[request.request_id].match
        assert match is not None and 0 < num_external <= match.choice.tokens, f"{num_external} external tokens"
        rows = LoadRows(self.layout, match.local_tokens, match.local_tokens + num_external)
        return self.policy.layered(rows.nbytes, rest_tokens)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: BlockIds, num_external: int, *, layered: bool = False
    ) -> int | None:
        """Open the load job that the next :meth:`build_meta` carries; its blocks are held from now on."""
        if num_external == 0:
            return None
        state = self._requests[request.request_id]
        match = state.match
        assert match is not None and not state.loaded, f"{request.request_id!r}: a load that was not offered"
        assert 0 < num_external <= match.choice.tokens, f"{num_external} external tokens of {match}"
        rows = LoadRows(self.layout, match.local_tokens, match.local_tokens + num_external)
        groups = rows.groups(request.block_hashes, block_ids)
        job = self._open(JobKind.LOAD, request, groups, layered=layered)
        explored = match.choice.decision is Decision.EXPLORE
        self._loads[job.job_id] = OpenLoad(request.request_id, state.life, rows, explored, layered)
        self._unsent.append(job)
        state.load_job, state.loaded = job.job_id, True
        self._counters.add("loads")
        self._counters.add("loads_layered", layered)
        self._counters.add("load_tokens_asked", num_external)
        return job.job_id

    def _may_load(self, state: TrackedRequest) -> bool:
        return (
            self._usable
            and not (state.loaded or state.stale)
            and self.policy.pool_ready
            and self.policy.policy != "never"
        )

    def _begin(self, request: ConnectorRequest) -> TrackedRequest:
        assert request.request_id not in self._requests, f"{request.request_id!r} is queued twice"
        self._lives += 1
        groups = len(self.layout.groups)
        state = TrackedRequest(request.request_id, self._lives, [0] * groups, [0] * groups)
        self._requests[request.request_id] = state
        return state

    def _live(self, request_id: str, life: int) -> TrackedRequest | None:
        state = self._requests.get(request_id)
        return state if state is not None and state.life == life else None

    # ---------------------------------------------------------------- the step

    def build_meta(self, computed: Sequence[Computed]) -> ConnectorMeta | None:
        """The loads that were accepted since the last step, and the blocks that this step completes."""
        self._hits.poll()
        reset, self._reset_due = self._reset_due, False
        loads, self._unsent = self._unsent, []
        stores = list(self._store_jobs(computed)) if self.config.store and self._usable else []
        for request, _, _ in computed:
            if (state := self._requests.get(request.request_id)) is not None:
                state.computed = True
        return ConnectorMeta(loads=loads, stores=stores, reset=reset) if loads or stores or reset else None

    def _store_jobs(self, computed: Sequence[Computed]) -> Iterator[Job]:
        for request, tables, tokens in computed:
            state = self._requests.get(request.request_id) or self._begin(request)
            self._planner.set_limits(state, request, tokens)
            room = self._store_blocks_max - self.ledger.pending_blocks(JobKind.STORE)
            if room <= 0 or not self.policy.pool_ready or state.stale:
                continue
            if state.load_job is not None:
                continue  # a layered load: what hangs on it is offered when it is known to have come
            runs = self._planner.take(state, request.block_hashes, tables, room)
            if runs:
                yield self._store(state, request, runs)

    def _store(self, state: TrackedRequest, request: ConnectorRequest, runs: list[GroupBlocks]) -> Job:
        job = self._open(JobKind.STORE, request, runs)
        keys = [key for run in runs for key in self._keys(run)]
        indices = [run.first_index + row for run in runs for row in range(len(run.block_ids))]
        self.offers.offered(keys)
        self._stores[job.job_id] = OpenStore(state.request_id, state.life, keys, indices)
        self._counters.add("stores")
        self._counters.add("store_blocks_offered", len(keys))
        return job

    def _open(
        self, kind: JobKind, request: ConnectorRequest, groups: list[GroupBlocks], *, layered: bool = False
    ) -> Job:
        deadline_s = self.config.load_deadline_ms / 1000
        name, salt, trace = request.request_id, request.cache_salt, request.trace
        return self.ledger.open(kind, name, salt, groups, deadline_s, layered=layered, trace=trace)

    def _keys(self, blocks: GroupBlocks) -> list[OfferKey]:
        width = self.layout.hash_bytes
        return [
            OfferKey(blocks.group, blocks.hashes[start : start + width])
            for start in range(0, len(blocks.hashes), width)
        ]

    def update_output(self, outputs: Sequence[ConnectorOutput]) -> list[LoadEnd]:
        """One output a rank, in the order of ranks (or none at all). See :meth:`SchedulerSide.update_output`."""
        self._hits.poll()
        assert len(outputs) in (0, self.ledger.ranks), f"{len(outputs)} outputs of {self.ledger.ranks} ranks"
        if outputs:
            self._pool_is(all(output.pool is PoolState.READY for output in outputs))
            self._superseded_is(any(output.superseded for output in outputs))
            self._problems = [f"rank {rank}: {text}" for rank, output in enumerate(outputs) for text in output.problems]
        self._waited_s = max((output.waited_s for output in outputs), default=0.0)
        self._missed = any(output.layers_missed for output in outputs)
        self._counters.add("load_waited_seconds", self._waited_s)
        loads: list[LoadEnd] = []
        for rank, output in enumerate(outputs):
            for outcome in output.outcomes:
                end = self.ledger.outcome(rank, outcome)
                if end is None:
                    continue
                if end.job.kind is JobKind.STORE:
                    self._store_ended(end)
                elif (load_end := self._load_ended(end)) is not None:
                    loads.append(load_end)
        if self._waited_s:
            self._late.update(job_id for job_id, load in self._loads.items() if load.layered)
        for job in self.ledger.newly_overdue():
            log.error("job overdue: its blocks stay held", job=job.job_id, kind=job.kind.name, request=job.request_id)
        return loads

    def _pool_is(self, ready: bool) -> None:
        before, self.policy.pool_ready = self.policy.pool_ready, ready
        if before and not ready:
            self._counters.add("pool_lost")
            log.warning("pool absent: serving without it")
        elif ready and not before:
            log.info("pool is back")
            self.offers.pool_returned()
            for state in self._requests.values():
                state.offer_again()

    def _superseded_is(self, superseded: bool) -> None:
        before, self._superseded = self._superseded, superseded
        if superseded and not before:
            log.warning("the pool's blocks are of other weights than this engine's: it neither finds nor adds any")

    def _load_ended(self, end: JobEnd) -> LoadEnd | None:
        end = self._judged(end)
        load = self._loads.pop(end.job.job_id)
        asked, loaded = load.rows.end - load.rows.begin, load.rows.loaded_tokens(end.done)
        self.policy.load_ended(
            asked_tokens=asked,
            loaded_tokens=loaded,
            nbytes=end.bytes_moved,
            seconds=end.seconds,
            explored=load.explored,
            now=self._clock(),
        )
        if load.layered:
            late = self._missed or end.job.job_id in self._late
            self._late.discard(end.job.job_id)
            # Of a late one nothing ran beside the step that anybody keeps.
            self.policy.beside.ended(end.seconds, end.seconds if late else self._waited_s)
            self._counters.add("loads_layered_failed", late or loaded < asked)
        state = self._live(load.request_id, load.life)
        self._counters.load_ended(end, asked, loaded, wanted=state is not None)
        self._note_missing(end, state)
        if state is None:
            return None
        assert state.load_job == end.job.job_id, self.ledger.story(end.job.job_id)
        state.load_job = None
        return LoadEnd(job_id=end.job.job_id, request_id=load.request_id, asked_tokens=asked, loaded_tokens=loaded)

    def _judged(self, end: JobEnd) -> JobEnd:
        """A job of older weights has done nothing, whatever the ranks say: they may not have heard of the reset."""
        if end.job.job_id > self._stale_jobs:
            return end
        return replace(end, done=bytes(len(end.done)))

    def _note_missing(self, end: JobEnd, state: TrackedRequest | None) -> None:
        """Blocks that were not loaded are to be stored when they have been computed."""
        at = 0
        for blocks in end.job.groups:
            done = end.done[at : at + len(blocks.block_ids)]
            at += len(done)
            if 0 not in done:
                continue
            self.offers.missing(key for key, loaded in zip(self._keys(blocks), done, strict=True) if not loaded)
            if state is not None and state.question is not None and state.question.ended:
                rows = range(blocks.first_index, blocks.first_index + len(done))
                for row, loaded in zip(rows, done, strict=True):
                    state.question.present[blocks.group][row] &= loaded

    def _store_ended(self, end: JobEnd) -> None:
        store = self._stores.pop(end.job.job_id)
        self._counters.store_ended(end)
        # A store that failed because the pool is away says nothing about its blocks.
        stale = end.job.job_id <= self._stale_jobs
        self.offers.ended(store.keys, self._judged(end).done, blame=self.policy.pool_ready and not stale)
        state = self._live(store.request_id, store.life)
        if state is None:
            return
        for key, index, stored in zip(store.keys, store.indices, end.done, strict=True):
            if not stored and self.offers.wanted(key, 0):
                state.cursor[key.group] = min(state.cursor[key.group], index)

    # ---------------------------------------------------------------- the rest of the contract

    def reset(self) -> None:
        """See :meth:`SchedulerSide.reset`. The ranks hear of it with the next step's meta."""
        self._reset_due = True
        self._stale_jobs = self.ledger.newest
        self._counters.add("resets")
        self.offers.pool_returned()
        for state in self._requests.values():
            state.reset()
        log.info("the engine's weights are new: the pool's namespaces are opened anew")

    def request_stopped(self, request: ConnectorRequest) -> None:
        """Forget it. A load that no rank was told of is cancelled; all other jobs go on until they are terminal."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._counters.add("store_blocks_skipped", state.skipped)
        unsent = [job for job in self._unsent if job.job_id == state.load_job]
        for job in unsent:
            self._unsent.remove(job)
            self.ledger.cancel(job.job_id)
            del self._loads[job.job_id]
            self._counters.add("loads_cancelled")

    def forward_done(self, tokens: int, seconds: float) -> None:
        """See :meth:`SchedulerSide.forward_done`."""
        self.policy.forward_done(tokens, seconds)

    def jobs_pending(self) -> int:
        """Jobs not yet terminal on every rank, overdue ones too; and one more while a reset is due."""
        return len(self.ledger) + self._reset_due

    def fileno_or_none(self) -> int | None:
        """The lookup client's descriptor: readable when an answer has arrived, not when a deadline passes."""
        return self._lookups.fileno()

    def problems(self) -> list[str]:
        """See :meth:`SchedulerSide.problems`."""
        return self._problems

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges: see docs/engine.md."""
        latency_s, seconds_a_byte = self.policy.load_seconds.line()
        return {
            **self._counters.snapshot(),
            **self._lookups.stats(),
            "outcomes_unknown": float(self.ledger.unknown_outcomes),
            "outcomes_malformed": float(self.ledger.malformed_outcomes),
            "loads_overdue": float(self.ledger.overdue_jobs),
            "jobs_pending": float(len(self.ledger)),
            "load_blocks_held": float(self.ledger.pending_blocks(JobKind.LOAD)),
            "store_blocks_held": float(self.ledger.pending_blocks(JobKind.STORE)),
            "pool_ready": float(self.policy.pool_ready),
            "weights_superseded": float(self._superseded),
            "load_latency_s": latency_s,
            "load_bytes_s": 1.0 / seconds_a_byte if seconds_a_byte else 0.0,
            "load_yield": self.policy.load_yield,
            "load_waited_share": self.policy.beside.waited_share,
            "prefill_tokens_s": self.policy.prefill_tokens_s,
        }

    def check(self) -> None:
        """Assert every structural invariant, of the parts too."""
        for part in (self.ledger, self.policy, self.offers):
            part.check()
        assert len(self._loads) + len(self._stores) == len(self.ledger)
        assert all(job_id in self.ledger for job_id in (*self._loads, *self._stores))
        assert {job.job_id for job in self._unsent} | self._late <= set(self._loads)
        assert self.offers.in_flight() == self.ledger.pending_blocks(JobKind.STORE) <= self._store_blocks_max
        for request_id, state in self._requests.items():
            assert state.request_id == request_id and state.life <= self._lives
            assert state.load_job is None or (state.loaded and self._loads[state.load_job].life == state.life)
        live = [job_id for job_id, load in self._loads.items() if self._live(load.request_id, load.life)]
        assert sorted(live) == sorted(s.load_job for s in self._requests.values() if s.load_job is not None)

    def close(self) -> None:
        """Release every hold, whether its job ended or not: the workers must be gone, or be going, by now."""
        abandoned = self.ledger.abandon()
        if abandoned:
            log.info("closed with jobs under way", jobs=abandoned)
        self._loads.clear()
        self._stores.clear()
        self._late.clear()
        self._unsent.clear()
        self._requests.clear()
        self._hits.close()
