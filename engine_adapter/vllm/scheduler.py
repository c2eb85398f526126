"""The scheduler's half in vLLM's scheduler: its requests, steps and outputs, as the core takes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol

from kvstrata.engine_adapter.connector.base import BlockIds, Computed, ConnectorOutput, SchedulerSide
from kvstrata.engine_adapter.vllm.adapters import AdapterDigests
from kvstrata.engine_adapter.vllm.messages import RankReport, StepMeta, decode_report, encode
from kvstrata.engine_adapter.vllm.requests import RequestView, VllmRequest

#: Prefill tokens of a step that is measured.
MEASURED_TOKENS_MIN: Final = 64


class BlockState(Protocol):
    """What is read of ``KVConnectorBlockState``."""

    def get_block_ids(self, req_id: str) -> BlockIds | None: ...


class Step(Protocol):
    """What is read of ``vllm.v1.core.sched.output.SchedulerOutput``."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: set[str] | None
    kv_connector_block_state: BlockState | None


class StepPlanner:
    """Used from vLLM's scheduler thread only. ``aligned_tokens``: local hits that are no multiple get nothing more.

    All loads are asynchronous, none is layered. vLLM computes a request anew in the step after a synchronous load has
    failed, into the same blocks, and has no way to hear that the load is not over yet and may still write to them.
    """

    def __init__(self, side: SchedulerSide, *, aligned_tokens: int, ranks: int) -> None:
        self._side = side
        self._aligned = aligned_tokens
        self._adapters = AdapterDigests()
        self._requests: dict[str, RequestView] = {}
        self._last = [ConnectorOutput()] * ranks

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: VllmRequest) -> None:
        """It was queued: its lookup begins now."""
        self.request_finished(request)
        view = self._added(request)
        self._side.on_new_request(view)

    def get_num_new_matched_tokens(self, request: VllmRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens, whether they come asynchronously: whenever there are any); (None, False): ask again."""
        view = self._view(request)
        if request.skip_reading_prefix_cache or num_computed_tokens % self._aligned:
            return 0, False
        tokens = self._side.get_num_new_matched_tokens(view, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: VllmRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        """A load begins, unless no external tokens are wanted (as after a load, and where another one loads)."""
        if num_external_tokens:
            self._side.update_state_after_alloc(self._view(request), block_ids, num_external_tokens)

    def request_finished(self, request: VllmRequest) -> None:
        """Its blocks may be freed: jobs under way hold their own references."""
        view = self._requests.pop(request.request_id, None)
        if view is not None:
            self._side.request_stopped(view)

    def _view(self, request: VllmRequest) -> RequestView:
        """Its view; a preemption since the last call ends what was known of it."""
        view = self._requests.get(request.request_id)
        if view is None:
            view = self._added(request)
        elif view.preemptions != request.num_preemptions:
            self._side.request_stopped(view)
            view.preemptions = request.num_preemptions
        return view

    def _added(self, request: VllmRequest) -> RequestView:
        view = RequestView(request, self._adapters.digest(request.lora_request))
        self._requests[request.request_id] = view
        return view

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, step: Step) -> StepMeta:
        """Loads that were accepted, blocks that this step completes."""
        for request_id in step.preempted_req_ids or ():
            if (view := self._requests.get(request_id)) is not None:
                self._view(view.request)
        computed, prefill = [], 0
        for request_id, tokens in step.num_scheduled_tokens.items():
            view = self._view(self._requests[request_id].request)
            tables = partial(_tables, step.kv_connector_block_state, request_id)
            computed.append(Computed(view, tables, view.num_computed_tokens + tokens))
            if view.num_computed_tokens + 1 < view.num_tokens:
                prefill += tokens
        meta = self._side.build_meta(computed)
        total = sum(step.num_scheduled_tokens.values())
        # A step that mostly decodes, or computes little, says nothing of how fast prefill is.
        measured = prefill if prefill >= MEASURED_TOKENS_MIN and 2 * prefill >= total else 0
        return StepMeta(jobs=encode(meta) if meta is not None else b"", tokens=total, prefill_tokens=measured)

    def update_connector_output(self, reports: Mapping[int, bytes]) -> None:
        """What the ranks of one step say; a rank that says nothing is as it was."""
        decoded = {rank: decode_report(data) for rank, data in reports.items()}
        outputs = []
        for rank, last in enumerate(self._last):
            output = (
                decoded[rank].output if rank in decoded else ConnectorOutput(pool=last.pool, superseded=last.superseded)
            )
            self._last[rank] = output
            outputs.append(output)
        self._side.update_output(outputs)
        self._measure(decoded.get(0))

    def _measure(self, report: RankReport | None) -> None:
        if report is not None and report.prefill_tokens:
            self._side.forward_done(report.prefill_tokens, report.forward_s)

    def reset(self) -> None:
        """The pool's namespaces are opened anew, at its weight epoch of then; the ranks hear of it in the next step."""
        self._side.reset()
        self._adapters.reset()

    def has_pending_work(self) -> bool:
        """Jobs whose end has to be taken from the ranks yet, or a reset that they wait for: the engine must go on
        stepping."""
        return self._side.jobs_pending() > 0

    def stats(self) -> dict[str, float]:
        return self._side.stats()

    def close(self) -> None:
        self._side.close()
        self._requests.clear()


def _tables(state: BlockState | None, request_id: str) -> BlockIds:
    tables = state.get_block_ids(request_id) if state is not None else None
    assert tables is not None, f"{request_id!r} is scheduled, and vLLM has no block table of it"
    return tables
