"""Stopwatches around the two seams of an engine: it is given what it would have, and computes the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstrata.cli.paged_replay.spans import Spans
from kvstrata.engine_adapter.connector.base import (
    BlockIds,
    Computed,
    ConnectorMeta,
    ConnectorOutput,
    ConnectorRequest,
    LoadEnd,
    SchedulerSide,
)
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.paged.cache.kv_cache_spec import KVCacheConfig
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Connect, Engine
from kvstrata.engine_adapter.paged.outputs import ModelRunnerOutput, SchedulerOutput
from kvstrata.engine_adapter.paged.ranks.executor import Executor
from kvstrata.engine_adapter.paged.text.tokenizer import Tokenizer


class TimedConnector:
    """A scheduler side that notes when a lookup is waited for, and how long loads take."""

    def __init__(self, inner: SchedulerSide, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    def on_new_request(self, request: ConnectorRequest) -> None:
        self._inner.on_new_request(request)

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int | None:
        matched = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if matched is None:
            self._spans.asked(request.request_id)
        else:
            self._spans.answered(request.request_id)
        return matched

    def loads_by_layer(self, request: ConnectorRequest, num_external: int, rest_tokens: int) -> bool:
        return self._inner.loads_by_layer(request, num_external, rest_tokens)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: BlockIds, num_external: int, *, layered: bool = False
    ) -> int | None:
        job_id = self._inner.update_state_after_alloc(request, block_ids, num_external, layered=layered)
        if job_id is not None:
            self._spans.load_started(request.request_id)
        return job_id

    def build_meta(self, computed: Sequence[Computed]) -> ConnectorMeta | None:
        return self._inner.build_meta(computed)

    def update_output(self, outputs: Sequence[ConnectorOutput]) -> list[LoadEnd]:
        ends = self._inner.update_output(outputs)
        for end in ends:
            self._spans.load_ended(end.request_id)
        return ends

    def request_stopped(self, request: ConnectorRequest) -> None:
        self._inner.request_stopped(request)

    def forward_done(self, tokens: int, seconds: float) -> None:
        self._inner.forward_done(tokens, seconds)

    def reset(self) -> None:
        self._inner.reset()

    def jobs_pending(self) -> int:
        return self._inner.jobs_pending()

    def fileno_or_none(self) -> int | None:
        return self._inner.fileno_or_none()

    def problems(self) -> list[str]:
        return self._inner.problems()

    def stats(self) -> dict[str, float]:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()


class TimedExecutor:
    """An executor that notes for whom a step computed, and how long."""

    def __init__(self, inner: Executor, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    @property
    def kv_config(self) -> KVCacheConfig:
        return self._inner.kv_config

    @property
    def layout(self) -> PoolLayout:
        return self._inner.layout

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def max_model_len(self) -> int:
        return self._inner.max_model_len

    def execute(self, output: SchedulerOutput) -> list[ModelRunnerOutput]:
        started = self._spans.clock()
        ranks = self._inner.execute(output)
        self._spans.computed(list(output.num_scheduled_tokens), self._spans.clock() - started)
        return ranks

    def wake_fds(self) -> list[int]:
        return self._inner.wake_fds()

    def close(self) -> None:
        self._inner.close()


class TimedEngine(Engine):
    """An engine with stopwatches on both seams; ``spans`` is what they show."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer,
        connect: Connect | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spans = self.spans = Spans(clock)
        timed = None if connect is None else lambda holder: TimedConnector(connect(holder), spans)
        super().__init__(config, TimedExecutor(executor, spans), tokenizer, timed, clock=clock)
