"""What an engine counts. Names follow vLLM's metrics; token counts are in tokens, since the engine started."""

from __future__ import annotations

import msgspec

from kvstrata.engine_adapter.paged.request import Request

COMPUTED, LOCAL, EXTERNAL = "computed", "local_cache_hit", "external_kv_transfer"


class EngineStats(msgspec.Struct, kw_only=True):
    """One reading. ``running`` to ``kv_usage`` are of the moment, the rest only grows."""

    running: int = 0
    waiting: int = 0
    loading: int = 0  #: hold blocks for a load under way, or just ended
    kv_usage: float = 0.0  #: 0 to 1: blocks that requests or transfers hold
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0  #: tokens after the local hits, of requests that the pool was asked for
    external_prefix_cache_hits: int = 0  #: tokens that were loaded: what a load promised and did not bring is none
    prompt_tokens: int = 0
    prompt_tokens_by_source: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys((COMPUTED, LOCAL, EXTERNAL), 0)
    )
    generation_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  #: whose KV a preemption gave up; what is still cached by then is found again
    finished: dict[str, int] = {}  #: by finish reason
    rejected: int = 0  #: of the finished: could never fit
    steps: int = 0
    connector: dict[str, float] = {}

    def copy(self) -> EngineStats:
        """A reading that does not change any more."""
        return msgspec.structs.replace(
            self, prompt_tokens_by_source=dict(self.prompt_tokens_by_source), finished=dict(self.finished)
        )

    def count_prompt(self, request: Request) -> None:
        """Its cached tokens are known now: each prompt token has one source."""
        local, external = request.num_local_cached_tokens or 0, request.num_external_cached_tokens
        self.external_prefix_cache_hits += external
        self.prompt_tokens += request.num_prompt_tokens
        self.prompt_tokens_by_source[LOCAL] += local
        self.prompt_tokens_by_source[EXTERNAL] += external
        self.prompt_tokens_by_source[COMPUTED] += request.num_prompt_tokens - local - external

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
