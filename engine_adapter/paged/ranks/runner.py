"""Turns a scheduler's step into a batch for the model, and its logits into tokens. Keeps what a rank must know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig, SlidingWindowSpec
from kvstrata.engine_adapter.paged.model.attention import KV
from kvstrata.engine_adapter.paged.model.rows import F32, Batch
from kvstrata.engine_adapter.paged.outputs import (
    BlockIds,
    CachedRequest,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from kvstrata.engine_adapter.paged.ranks.batch_parts import Part, build_batch
from kvstrata.engine_adapter.paged.ranks.block_table import BlockTable
from kvstrata.engine_adapter.paged.ranks.kv_memory import layer_places
from kvstrata.engine_adapter.paged.ranks.sampling import log_probabilities, sample
from kvstrata.engine_adapter.paged.request import SamplingParams


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: Batch, kv: Sequence[KV], before_reading: Callable[[int], object] | None = None) -> F32:
        """Write the KV of the batch's tokens; logits float32 [len(batch.logits_rows), vocab]. ``before_reading(layer)``
        is called before the layer's KV is read."""
        ...


@dataclass(slots=True)
class _Running:
    """A request as this rank knows it. ``row`` in the block tables."""

    row: int
    token_ids: list[int]
    num_computed_tokens: int
    sampling: SamplingParams


class ModelRunner:
    """One rank's runner. Not thread-safe. What the scheduler says is taken at its word, and held against what is
    known here: a step that does not fit raises AssertionError with the numbers."""

    def __init__(
        self,
        model: Model,
        config: KVCacheConfig,
        kv: Sequence[KV],
        *,
        max_num_seqs: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._kv = kv
        self._clock = clock
        self._layer_group = [group for group, _ in layer_places(config)]
        self._layer_slot = [slot for _, slot in layer_places(config)]
        self._tables = [
            BlockTable(max_num_seqs, -(-config.max_model_len // spec.block_size), spec.block_size)
            for spec in (group.spec for group in config.groups)
        ]
        self._windows = [
            group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else 0 for group in config.groups
        ]
        self._none_common = [0] * len(self._tables)
        self._running: dict[str, _Running] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def execute(
        self,
        output: SchedulerOutput,
        wait_layer: Callable[[int], bool] | None = None,
        layer_written: Callable[[int], object] | None = None,
    ) -> ModelRunnerOutput:
        """Compute the step's tokens; sample for every request whose last known token was among them.

        ``wait_layer``, of :class:`WorkerSide`: before each layer's KV is read; its time does not count as computing.
        ``layer_written``: when each layer's KV is written.
        """
        self._update(output)
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput(step_id=output.step_id)
        self._leave_windows(output)
        parts = self._parts(output)
        # Where a window has been left behind, tables of different lengths do not start alike any more.
        common = [
            0 if window else blocks
            for window, blocks in zip(self._windows, output.num_common_prefix_blocks or self._none_common, strict=True)
        ]
        batch = build_batch(parts, self._tables, self._layer_group, common)
        started = self._clock()
        if wait_layer is not None:
            logits, waited = self._forward_beside_loads(batch, wait_layer, layer_written)
        elif layer_written is not None:
            written = layer_written
            logits = self._model.forward(batch, self._kv, lambda layer: written(self._layer_slot[layer]))
            waited = 0.0
        else:
            logits, waited = self._model.forward(batch, self._kv), 0.0
        seconds = self._clock() - started - waited
        for part in parts:
            self._running[part.request_id].num_computed_tokens = part.end
        tokens, logprobs = self._sample([part.request_id for part in parts if part.samples], logits)
        return ModelRunnerOutput(step_id=output.step_id, sampled=tokens, logprobs=logprobs, compute_s=seconds)

    def _forward_beside_loads(
        self, batch: Batch, wait_layer: Callable[[int], bool], layer_written: Callable[[int], object] | None
    ) -> tuple[F32, float]:
        """Logits, and the seconds of waiting."""
        waited = 0.0

        def wait(layer: int) -> None:
            nonlocal waited
            if layer_written is not None:
                layer_written(self._layer_slot[layer])
            started = self._clock()
            wait_layer(self._layer_slot[layer])
            waited += self._clock() - started

        # A load that fails leaves anything: whatever is computed from it is not kept.
        with np.errstate(all="ignore"):
            return self._model.forward(batch, self._kv, wait), waited

    def _sample(self, request_ids: Sequence[str], logits: F32) -> tuple[dict[str, int], dict[str, TokenLogprobs]]:
        """A token for each request from its row of logits."""
        tokens: dict[str, int] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        for request_id, row in zip(request_ids, logits, strict=True):
            request = self._running[request_id]
            tokens[request_id] = sample(row, request.sampling, len(request.token_ids))
            if request.sampling.logprobs:
                logprobs[request_id] = log_probabilities(row, tokens[request_id], request.sampling.logprobs)
        return tokens, logprobs

    def check(self) -> None:
        """Assert that rows are held once, and that computed tokens have blocks."""
        held = [request.row for request in self._running.values()]
        assert sorted(held + self._free_rows) == list(range(len(held) + len(self._free_rows))), "a row is lost"
        for request_id, request in self._running.items():
            assert request.num_computed_tokens <= len(request.token_ids), f"{request_id}: computed what is not known"
            for table in self._tables:
                room = table.num_blocks(request.row) * table.block_size
                assert request.num_computed_tokens <= room, f"{request_id}: {request.num_computed_tokens} in {room}"

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def _update(self, output: SchedulerOutput) -> None:
        # One that never ran here may have been finished: it was aborted while it waited.
        for request_id in (*output.finished, *output.preempted):
            self._forget(request_id)
        for new in output.new:
            self._add(new)
        for cached in output.cached:
            self._extend(cached)

    def _forget(self, request_id: str) -> None:
        request = self._running.pop(request_id, None)
        if request is None:
            return
        for table in self._tables:
            table.clear(request.row)
        self._free_rows.append(request.row)

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self._running:
            raise AssertionError(f"request {new.request_id!r} is new and already known")
        if not self._free_rows:
            raise AssertionError(f"request {new.request_id!r}: all {len(self._running)} rows are taken")
        row = self._free_rows.pop()
        self._running[new.request_id] = _Running(row, list(new.token_ids), new.num_computed_tokens, new.sampling)
        self._append_blocks(new.request_id, row, new.block_ids)

    def _extend(self, cached: CachedRequest) -> None:
        request = self._known(cached.request_id)
        if cached.num_computed_tokens != request.num_computed_tokens:
            raise AssertionError(
                f"request {cached.request_id!r}: {cached.num_computed_tokens} tokens computed, "
                f"{request.num_computed_tokens} known here"
            )
        request.token_ids.extend(cached.new_token_ids)
        self._append_blocks(cached.request_id, request.row, cached.new_block_ids)

    def _append_blocks(self, request_id: str, row: int, block_ids: BlockIds) -> None:
        if len(block_ids) != len(self._tables):
            raise AssertionError(f"request {request_id!r}: blocks of {len(block_ids)} of {len(self._tables)} groups")
        for table, ids in zip(self._tables, block_ids, strict=True):
            table.append(row, ids)

    def _known(self, request_id: str) -> _Running:
        request = self._running.get(request_id)
        if request is None:
            raise AssertionError(f"request {request_id!r} is not known: {len(self._running)} are")
        return request

    def _leave_windows(self, output: SchedulerOutput) -> None:
        """The scheduler has freed what lies before a window, so its bytes may be another request's by now."""
        for table, window in zip(self._tables, self._windows, strict=True):
            if window:
                for request_id in output.num_scheduled_tokens:
                    request = self._known(request_id)
                    first_needed = max(0, request.num_computed_tokens - window + 1)
                    table.skip(request.row, first_needed // table.block_size)

    def _parts(self, output: SchedulerOutput) -> list[Part]:
        parts = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._known(request_id)
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            if count < 1 or end > len(request.token_ids):
                raise AssertionError(
                    f"request {request_id!r}: {count} tokens after {start} computed, of {len(request.token_ids)} known"
                )
            samples = end == len(request.token_ids)
            parts.append(Part(request_id, request.row, start, request.token_ids[start:end], samples))
        return parts
