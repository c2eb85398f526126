"""What the scheduler tells the outside: outputs to callers, counters to operators, a story to whoever asks why."""

from __future__ import annotations

from collections.abc import Callable

from kvstrata.engine_adapter.paged.outputs import RequestOutput, TokenLogprobs
from kvstrata.engine_adapter.paged.request import Request
from kvstrata.engine_adapter.paged.scheduling.stopping import FINISH_REASONS
from kvstrata.engine_adapter.paged.scheduling.story import Story
from kvstrata.engine_adapter.paged.stats import EngineStats


class Reports:
    """Collects :class:`RequestOutput` until they are taken; counts each thing once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stats = EngineStats()
        self.story = Story()
        self._clock = clock
        self._outputs: list[RequestOutput] = []

    @property
    def pending(self) -> bool:
        """Whether there are outputs to take."""
        return bool(self._outputs)

    def take(self) -> list[RequestOutput]:
        taken, self._outputs = self._outputs, []
        return taken

    def tell(self, request: Request, event: str) -> None:
        self.story.tell(request.request_id, self._clock(), event)

    def token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """It got a token, and may have ended with it."""
        self.stats.generation_tokens += 1
        if request.num_output_tokens == 1:
            self.tell(request, "first token")
        self._report(request, [token_id], [logprobs] if logprobs is not None else [])

    def end(self, request: Request, error: str = "") -> None:
        """It ended without a token."""
        self._report(request, [], [], error)

    def lookup(self, request: Request, local: int, *, pool: bool) -> None:
        """Its cached tokens were counted, at its first admission: a resumed one finds its own blocks."""
        if request.num_local_cached_tokens is not None:
            return
        request.num_local_cached_tokens = local
        self.stats.prefix_cache_queries += request.num_tokens
        self.stats.prefix_cache_hits += local
        if pool:
            self.stats.external_prefix_cache_queries += request.num_tokens - local

    def sources(self, request: Request, external: int) -> None:
        """Once a request, too: where its prompt's KV comes from is known."""
        if request.num_preemptions == 0:
            request.num_external_cached_tokens = external
            self.stats.count_prompt(request)

    def _report(self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs], error: str = "") -> None:
        reason = FINISH_REASONS[request.status] if request.finished else None
        if reason is not None:
            self.stats.count_finished(reason)
            self.tell(request, f"finished: {reason} {error}".rstrip())
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                new_token_ids=tokens,
                finish_reason=reason,
                error=error,
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=request.num_local_cached_tokens or 0,
                num_external_cached_tokens=request.num_external_cached_tokens,
                logprobs=logprobs,
            )
        )
