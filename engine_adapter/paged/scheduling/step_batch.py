"""The batch of one step while it is put together, and until its results are in."""

from __future__ import annotations

from functools import partial

from kvstrata.engine_adapter.connector.base import Computed, ConnectorMeta
from kvstrata.engine_adapter.paged.cache.kv_cache_manager import KVCacheManager
from kvstrata.engine_adapter.paged.outputs import BlockIds, CachedRequest, NewRequest, SchedulerOutput
from kvstrata.engine_adapter.paged.request import Request
from kvstrata.engine_adapter.paged.scheduling.worker_view import WorkerView


class StepBatch:
    """Requests with the tokens that the step computes of each. ``budget``: tokens that are still free in it."""

    def __init__(self, step_id: int, budget: int, kv: KVCacheManager, workers: WorkerView) -> None:
        self.step_id = step_id
        self.budget = budget
        self.scheduled: list[tuple[Request, int]] = []
        self.prefill_tokens = 0
        self.short = False  #: somebody lacked blocks or tokens: nobody else is let in
        self.may_preempt = True
        #: By job id: requests whose load runs beside the step, and their local tokens.
        self.layered: dict[int, tuple[Request, int]] = {}
        self.undone: set[Request] = set()  #: those of them for which the step did nothing
        self._kv = kv
        self._workers = workers
        self._new: list[NewRequest] = []
        self._cached: list[CachedRequest] = []

    @property
    def total_tokens(self) -> int:
        return sum(count for _, count in self.scheduled)

    def put(self, request: Request, count: int, new_block_ids: BlockIds) -> None:
        """Compute the request's next ``count`` tokens, whose slots are allocated."""
        self.budget -= count
        self.scheduled.append((request, count))
        if request.num_computed_tokens < request.num_prompt_tokens:
            self.prefill_tokens += count
        if self._workers.knows(request.request_id):
            self._cached.append(self._workers.advance(request, new_block_ids))
        else:
            self._new.append(self._workers.introduce(request, self._kv.block_ids(request.request_id)))

    def computed(self) -> list[Computed]:
        """Every request, for the connector."""
        return [
            Computed(request, partial(self._kv.block_ids, request.request_id), request.num_computed_tokens + count)
            for request, count in self.scheduled
        ]

    def output(self, meta: ConnectorMeta | None) -> SchedulerOutput:
        """What the workers are told; once a step."""
        finished, preempted = self._workers.take_forgotten()
        ids = [request.request_id for request, _ in self.scheduled]
        return SchedulerOutput(
            step_id=self.step_id,
            new=self._new,
            cached=self._cached,
            num_scheduled_tokens={request.request_id: count for request, count in self.scheduled},
            finished=finished,
            preempted=preempted,
            num_common_prefix_blocks=self._kv.get_num_common_prefix_blocks(ids) if len(ids) > 1 else [],
            connector_meta=meta,
        )
