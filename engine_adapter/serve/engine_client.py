"""What the server needs of an engine, and no more: tests stand in for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstrata.engine_adapter.paged.outputs import RequestOutput
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.paged.stats import EngineStats


class EngineClient(Protocol):
    """One engine, stepped by a thread of its own. All calls are thread-safe and return at once."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        extra_keys: Sequence[str] = (),
        trace: str = "",
        request_id: str | None = None,
        on_output: Callable[[RequestOutput], None],
    ) -> str:
        """Queue a request; its outputs go to ``on_output`` on the engine's thread, the last with a finish reason.
        ``trace``: the traceparent that it came with.

        Raises :class:`Busy` at a bound, :class:`InvalidArgument`, and :class:`Unavailable` from a dead engine.
        """
        ...

    def abort(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    def health(self) -> Mapping[str, object]: ...
    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool: ...


def engine_problem(engine: EngineClient) -> str:
    """Why the engine does not serve, or an empty string."""
    health = engine.health()
    return "" if health.get("healthy") else f"the engine does not serve: {health.get('problem') or 'see its log'}"
