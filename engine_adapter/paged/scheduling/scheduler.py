"""What each step computes, who waits, and who gives way. No I/O: a step goes out, what the ranks did comes in.

Every step: first those who run, in the order of admission, a decode token or the next chunk of a prompt each;
then the queue, first come first served: ``local hits -> external hits -> allocate_slots``, in that order.

Nobody is stuck. The request admitted first can take the blocks of all others, and alone it fits: admission saw to
that. What remains are blocks that transfers hold for requests that are loading or gone. Preempting anyone frees
none of those, so the request keeps what it has and waits for the transfers, each of which ends by its deadline.

Blocks join the prefix cache in :meth:`Scheduler.update`, when their KV is written, and not when they are
allocated: a request admitted in the same step must not hit what is still being computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstrata.engine_adapter.connector.base import ConnectorMeta, ConnectorOutput, LoadEnd, SchedulerSide
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.config import StepConfig
from kvstrata.engine_adapter.paged.outputs import BlockIds, ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.request import Request, RequestStatus
from kvstrata.engine_adapter.paged.scheduling.admission import Admission, refusal
from kvstrata.engine_adapter.paged.scheduling.places import Places
from kvstrata.engine_adapter.paged.scheduling.reports import Reports
from kvstrata.engine_adapter.paged.scheduling.step_batch import StepBatch
from kvstrata.engine_adapter.paged.scheduling.stopping import stop_status
from kvstrata.engine_adapter.paged.scheduling.story import Event
from kvstrata.engine_adapter.paged.scheduling.worker_view import WorkerView
from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.proto.errors import Busy, InvalidArgument
from kvstrata.proto.logs import get_logger

log = get_logger(__name__)

#: Requests passed over in one step because their lookup has no answer yet.
NOT_YET_MAX: Final = 64


class Scheduler:
    """One engine's requests. ``schedule`` and ``update`` alternate; ``add_request`` and ``abort`` fit anywhere.

    Called from one thread. What ends outside a step (a refusal, an abort) is reported by the next ``update``.
    """

    def __init__(
        self,
        config: StepConfig,
        kv: KVCacheManager,
        connector: SchedulerSide | None,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.progressed = False  #: the last step changed something: another one may do more
        self.num_not_yet = 0  #: requests that the last step passed over for want of an answer from the pool
        self._kv = kv
        self._connector = connector
        self._places = Places(config.max_num_seqs)
        self._workers = WorkerView()
        self._reports = Reports(clock)
        self._batch: StepBatch | None = None
        self._step_id = 0

    # -- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue it, or refuse at once what can never fit (REJECTED; its output names the numbers).

        Raises :class:`Busy` past ``max_waiting``, :class:`InvalidArgument` for an id that is in use.
        """
        if request.request_id in self._places.by_id:
            raise InvalidArgument(f"request id {request.request_id!r} is in use: choose another, or abort it first")
        error = refusal(request, self._kv, self.max_model_len)
        if error:
            request.status = RequestStatus.REJECTED
            self._reports.stats.rejected += 1
            self._reports.end(request, error)
            return
        if self.num_waiting >= self.config.max_waiting:
            raise Busy(f"{self.num_waiting} requests wait, and max_waiting is {self.config.max_waiting}: try later")
        self._places.enter(request)
        self._reports.tell(request, f"queued: {request.num_tokens} tokens")
        if self._connector is not None:
            self._connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """End it wherever it is. An unknown id is nothing to do: it may have just finished."""
        request = self._places.by_id.get(request_id)
        if request is not None:
            self._end(request, RequestStatus.ABORTED)
            self._reports.end(request)

    # -- a step goes out

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. Its tokens, blocks and connector jobs are committed; :meth:`update` must follow."""
        assert self._batch is None, "the last step was not updated"
        self._step_id += 1
        self._reports.stats.steps += 1
        self.num_not_yet = 0
        budget = self.config.max_num_batched_tokens
        batch = self._batch = StepBatch(self._step_id, budget, self._kv, self._workers)
        self._places.seat_ready()
        self._schedule_running(batch)
        loads = 0 if batch.short else self._admit(batch)
        self.progressed = bool(batch.scheduled) or loads > 0
        self._check_progress(batch)
        meta: ConnectorMeta | None = None
        if self._connector is not None:
            meta = self._connector.build_meta(batch.computed())
        return batch.output(meta)

    def _schedule_running(self, batch: StepBatch) -> None:
        running, index = self._places.running, 0
        while index < len(running) and batch.budget > 0:  # it shrinks at its end when somebody is preempted
            request = running[index]
            count = min(request.num_tokens - request.num_computed_tokens, batch.budget)
            blocks = self._allocate(batch, request, count)
            if blocks is not None:
                batch.put(request, count, blocks)
            index += 1

    def _allocate(self, batch: StepBatch, request: Request, count: int) -> BlockIds | None:
        """Blocks for the next ``count`` tokens of a request that runs, taken from later ones if need be.

        None: it sits this step out and keeps what it has.
        """
        while (blocks := self._kv.allocate_slots(request, count, delay_cache_blocks=True)) is None:
            batch.short = True
            victim = self._places.victim(request) if batch.may_preempt else None
            if victim is None:
                return None
            free = self._kv.pool.num_free_blocks
            self._preempt(victim)
            if self._kv.pool.num_free_blocks == free and self._jobs_pending():
                # Transfers hold what it had: more victims would lose their work and free nothing either.
                batch.may_preempt = False
        return blocks

    def _preempt(self, request: Request) -> None:
        """To the front of the queue, without blocks. What it computed stays in the prefix cache until reused."""
        self._reports.tell(request, f"preempted: gives up {request.num_computed_tokens} of {request.num_tokens} tokens")
        self._reports.stats.preemptions += 1
        self._reports.stats.preempted_tokens += request.num_computed_tokens
        self._workers.preempted(request.request_id)
        self._free(request)
        self._places.send_back(request)
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        if self._connector is not None:
            self._connector.on_new_request(request)

    def _admit(self, batch: StepBatch) -> int:
        """Let waiting requests in, in order. Returns how many began to load."""
        loads = 0
        for request in list(self._places.waiting):
            if not self._places.has_seat or self.num_not_yet >= NOT_YET_MAX:
                break
            admission = self._try_admit(batch, request)
            if admission is Admission.NO_ROOM:
                batch.short = True
                break
            loads += admission is Admission.LOADS
            self.num_not_yet += admission is Admission.NOT_YET
        return loads

    def _try_admit(self, batch: StepBatch, request: Request) -> Admission:
        computed = self._kv.get_computed_blocks(request)
        local, external = computed.num_tokens, 0
        if self._connector is not None:
            answer = self._connector.get_num_new_matched_tokens(request, local)
            if answer is None:
                return Admission.NOT_YET
            external = answer
        left = request.num_tokens - local
        assert 0 <= external < left, f"{request}: {external} external of {left} tokens after the local ones"
        count = min(left - external, batch.budget)
        layered = external > 0 and count > 0 and self._loads_by_layer(request, external, count, left)
        if external and not layered:
            count = 0
        if not external and not count:
            return Admission.NO_ROOM
        blocks = self._kv.allocate_slots(
            request, count, computed=computed, num_external_tokens=external, delay_cache_blocks=True
        )
        if blocks is None:
            return Admission.NO_ROOM
        request.num_computed_tokens = local
        self._reports.lookup(request, local, pool=self._connector is not None)
        job_id = self._commit_load(request, external, layered=layered)
        if job_id is not None and not layered:
            self._places.load(request, job_id)
            return Admission.LOADS
        self._places.run(request)
        if job_id is not None:
            batch.layered[job_id] = (request, local)
            request.num_computed_tokens = local + external
        else:
            self._reports.sources(request, external=0)
            self._reports.tell(request, f"runs: {local} of {request.num_tokens} tokens were local")
        batch.put(request, count, blocks)
        return Admission.RUNS

    def _loads_by_layer(self, request: Request, external: int, count: int, left: int) -> bool:
        """Whether ``count`` tokens of it are to be computed while its load is under way. Not if it ends with this step:
        what it computes beside a load is stored only later."""
        assert self._connector is not None
        ends = external + count == left and request.num_output_tokens + 1 >= request.sampling.max_tokens
        return not ends and self._connector.loads_by_layer(request, external, count)

    def _commit_load(self, request: Request, external: int, *, layered: bool) -> int | None:
        """Tell the connector of the allocation; the job that it loads with."""
        if self._connector is None:
            return None
        tables = self._kv.block_ids(request.request_id)
        job_id = self._connector.update_state_after_alloc(request, tables, external, layered=layered)
        assert (job_id is None) == (external == 0), f"{request}: job {job_id} for {external} external tokens"
        if job_id is not None:
            how = "by layers" if layered else ""
            self._reports.tell(
                request, f"loads {external} tokens after {request.num_computed_tokens} local ones {how}, job {job_id}"
            )
        return job_id

    def _check_progress(self, batch: StepBatch) -> None:
        """Admission promised that a lone request fits: if nothing moves, something must be under way."""
        if batch.short and not self.progressed and not self._places.loading and not self._jobs_pending():
            stuck = next(iter((*self._places.running, *self._places.waiting)))
            raise AssertionError(
                f"{stuck} cannot get blocks and nothing holds them: {self._kv.pool.num_free_blocks} free "
                f"of {self._kv.pool.num_blocks}; {self.story(stuck.request_id)}"
            )

    def _jobs_pending(self) -> bool:
        return self._connector is not None and self._connector.jobs_pending() > 0

    # -- what the ranks did comes in

    def update(self, output: SchedulerOutput, ranks: Sequence[ModelRunnerOutput]) -> list[RequestOutput]:
        """Take in a step's results: one :class:`RequestOutput` for each request that got a token or ended."""
        batch, self._batch = self._batch, None
        assert batch is not None and output.step_id == batch.step_id, f"step {output.step_id} is not under way"
        assert all(rank.step_id == output.step_id for rank in ranks), "a rank answered another step"
        ends = self._connector_ends(batch, ranks)
        missed = any(rank.connector.layers_missed for rank in ranks if rank.connector is not None)
        self._settle_layered(batch, ends, missed=missed)
        for request, count in batch.scheduled:
            # Aborted while the step ran: its blocks are gone, and its id may be another's.
            if request.status is RequestStatus.RUNNING and request not in batch.undone:
                self._advance(request, count, ranks[0])
        for end in ends.values():
            self._load_ended(end)
        return self._reports.take()

    def _settle_layered(self, batch: StepBatch, ends: dict[int, LoadEnd], *, missed: bool) -> None:
        """Take the ends of the step's layered loads. Where one did not bring all, or a rank ``missed`` a layer of it
        when it read it, the step did nothing for its request; where one has not ended, the request waits for it as for
        any other load."""
        for job_id, (request, local) in batch.layered.items():
            end = ends.pop(job_id, None)
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            loaded = end.loaded_tokens if end is not None else 0
            if end is None or loaded < end.asked_tokens or missed:
                batch.undone.add(request)
                self._workers.preempted(request.request_id)  # what they know of it is wrong
                request.num_computed_tokens = local + loaded
            if end is None:
                self._places.wait_for(request, job_id)
                self._reports.tell(request, f"computed in vain: job {job_id} has not ended")
                continue
            self._kv.cache_blocks(request, local + loaded)
            late = ", in vain computed before" if missed else ""
            self._reports.tell(request, f"loaded {loaded} of {end.asked_tokens} tokens, job {job_id}{late}")
            self._reports.sources(request, external=loaded)

    def _advance(self, request: Request, count: int, rank: ModelRunnerOutput) -> None:
        request.num_computed_tokens += count
        self._kv.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens < request.num_tokens:
            return
        token = rank.sampled[request.request_id]
        request.append_output(token)
        status = stop_status(request, self.max_model_len)
        if status is not None:
            self._end(request, status)
        self._reports.token(request, token, rank.logprobs.get(request.request_id))

    def _connector_ends(self, batch: StepBatch, ranks: Sequence[ModelRunnerOutput]) -> dict[int, LoadEnd]:
        """Loads that the step's outputs end, by job id."""
        connector = self._connector
        if connector is None:
            return {}
        outputs = [rank.connector or ConnectorOutput() for rank in ranks]
        # The end of a store, too, frees blocks that somebody may wait for.
        self.progressed |= any(output.outcomes for output in outputs)
        ends = {end.job_id: end for end in connector.update_output(outputs)}
        if batch.prefill_tokens:
            seconds = max(rank.compute_s for rank in ranks)
            connector.forward_done(batch.prefill_tokens, seconds * batch.prefill_tokens / batch.total_tokens)
        return ends

    def _load_ended(self, end: LoadEnd) -> None:
        """Its whole blocks count as computed; the rest is computed in the slots it already holds."""
        request = self._places.loaded(end.job_id)
        if request is None:
            log.warning("a load ended that no request waits for", job=end.job_id, request=end.request_id)
            return
        self.progressed = True
        request.num_computed_tokens += end.loaded_tokens
        assert request.num_computed_tokens < request.num_tokens, f"{request}: {end} leaves nothing to compute"
        self._kv.cache_blocks(request, request.num_computed_tokens)
        self._reports.tell(request, f"loaded {end.loaded_tokens} of {end.asked_tokens} tokens, job {end.job_id}")
        self._reports.sources(request, external=end.loaded_tokens)

    def _end(self, request: Request, status: RequestStatus) -> None:
        self._workers.finished(request.request_id)
        self._free(request)
        self._places.leave(request)
        request.status = status

    def _free(self, request: Request) -> None:
        """The connector is told first: jobs under way keep their own references."""
        if self._connector is not None:
            self._connector.request_stopped(request)
        self._kv.free(request)

    # -- what can be asked

    @property
    def has_unfinished(self) -> bool:
        """Requests that live, or ends that no ``update`` has reported yet."""
        return bool(self._places.by_id) or self._reports.pending

    @property
    def num_running(self) -> int:
        return len(self._places.running)

    @property
    def num_waiting(self) -> int:
        return len(self._places.waiting)

    @property
    def num_loading(self) -> int:
        """Load under way, or ended while every seat was taken."""
        return len(self._places.loading) + len(self._places.ready)

    @property
    def request_ids(self) -> list[str]:
        """Of every request that lives."""
        return list(self._places.by_id)

    def story(self, request_id: str) -> list[Event]:
        """(seconds on the clock, what happened), oldest first; bounded."""
        return self._reports.story.of(request_id)

    def stats(self) -> EngineStats:
        reading = self._reports.stats.copy()
        reading.running, reading.waiting, reading.loading = self.num_running, self.num_waiting, self.num_loading
        reading.kv_usage = self._kv.usage
        reading.connector = self._connector.stats() if self._connector is not None else {}
        return reading

    def check(self) -> None:
        """Assert every structural invariant, those of the cache and the connector included."""
        self._places.check()
        self._workers.check({request.request_id for request in self._places.running})
        for request in self._places:
            assert request.num_computed_tokens < request.num_tokens, f"{request} has nothing left to compute"
        for request in self._places.waiting:
            assert request.num_computed_tokens == 0, f"{request} waits, and has no blocks"
            assert not any(self._kv.block_ids(request.request_id)), f"{request} waits, and has blocks"
        self._kv.check()
        if self._connector is not None:
            self._connector.check()
