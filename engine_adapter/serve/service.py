"""What the routes share: the engine, the model, what is in progress, and the stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.serve.engine_client import EngineClient, engine_problem
from kvstrata.engine_adapter.serve.errors import ApiError, invalid
from kvstrata.engine_adapter.serve.generation import Generation
from kvstrata.engine_adapter.serve.metrics import ServeMetrics
from kvstrata.engine_adapter.serve.requests import GenerationRequest
from kvstrata.engine_adapter.serve.served_model import ServedModel


class Service:
    """Starts generations and knows which run. ``drain``, ``wait_idle`` and ``abort_all`` are for another thread.

    ``prompts_max`` in the engine at a time: no more than it queues, so that the refusal is ours, and a 429.
    """

    def __init__(self, engine: EngineClient, model: ServedModel, metrics: ServeMetrics, prompts_max: int) -> None:
        self.engine = engine
        self.model = model
        self.metrics = metrics
        self._prompts_max = prompts_max
        self._draining = False
        self._changed = threading.Condition()
        self._active: set[Generation] = set()

    @property
    def problem(self) -> str:
        """Why no request is served now, or an empty string."""
        return engine_problem(self.engine) or ("the server is stopping" if self._draining else "")

    @contextlib.contextmanager
    def generating(
        self, prompts: Sequence[list[int]], request: GenerationRequest, sampling: SamplingParams, trace: str = ""
    ) -> Iterator[Generation]:
        """All prompts are in the engine; what still runs at the end of the ``with`` is aborted.

        Raises :class:`ApiError`: 400 for what can never fit, 429 when the engine's queue is full, 503 when it is down.
        """
        if self.problem:
            raise ApiError(503, self.problem, code="engine_unavailable")
        for prompt in prompts:
            self._refuse_overlong(len(prompt), sampling.max_tokens)
        generation = Generation(self.engine, self.model, self.metrics, len(prompts), trace)
        self._admit(generation)
        try:
            generation.start(prompts, request, sampling)
            yield generation
        finally:
            generation.close()
            with self._changed:
                self._active.discard(generation)
                self._changed.notify_all()

    @property
    def num_active(self) -> int:
        """HTTP requests that are generating."""
        with self._changed:
            return len(self._active)

    def drain(self) -> None:
        """Refuse new requests from now on; what runs goes on."""
        self._draining = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything in progress ended within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active, timeout_s)

    def abort_all(self) -> None:
        """End what is in progress: its clients get what there is, with the reason "abort"."""
        with self._changed:
            active = list(self._active)
        for generation in active:
            generation.abort()

    def _admit(self, generation: Generation) -> None:
        with self._changed:
            prompts = sum(active.num_prompts for active in self._active)
            if prompts + generation.num_prompts > self._prompts_max:
                message = f"the engine has {prompts} prompts at work or queued, and takes {self._prompts_max}"
                raise ApiError(429, message, code="engine_busy")
            self._active.add(generation)

    def _refuse_overlong(self, prompt_tokens: int, max_tokens: int) -> None:
        total, limit = prompt_tokens + max_tokens, self.model.max_model_len
        if total > limit:
            raise invalid(
                f"the model's context is {limit} tokens; {prompt_tokens} in the prompt and {max_tokens} to generate "
                f"are {total}: shorten the prompt or max_tokens",
                "prompt",
                "context_length_exceeded",
            )
