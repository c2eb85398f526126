"""The prompts of one HTTP request on their way through the engine."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.paged.text.tokenizer import Detokenizer
from kvstrata.engine_adapter.serve.choice import Choice, Delta
from kvstrata.engine_adapter.serve.engine_client import EngineClient, engine_problem
from kvstrata.engine_adapter.serve.errors import ApiError, from_engine, invalid
from kvstrata.engine_adapter.serve.mailbox import Mailbox
from kvstrata.engine_adapter.serve.metrics import ServeMetrics
from kvstrata.engine_adapter.serve.requests import GenerationRequest
from kvstrata.engine_adapter.serve.served_model import ServedModel
from kvstrata.proto.errors import KVError


class Generation:
    """The prompts of one HTTP request, in the engine until :meth:`close`. ``trace``: its traceparent, "" without."""

    def __init__(
        self, engine: EngineClient, model: ServedModel, metrics: ServeMetrics, num_prompts: int, trace: str = ""
    ) -> None:
        self.id = uuid.uuid4().hex
        self.num_prompts = num_prompts
        self.choices: list[Choice] = []
        self._engine = engine
        self._model = model
        self._metrics = metrics
        self._trace = trace
        self._arrived_s = time.monotonic()
        self._first_token_s: list[float | None] = []
        self._mailbox = Mailbox()
        self._running: dict[int, str] = {}

    def start(self, prompts: Sequence[list[int]], request: GenerationRequest, sampling: SamplingParams) -> None:
        """Submit all prompts or none. Raises :class:`ApiError` as the engine refuses."""
        self.choices = [Choice(Detokenizer(self._model.tokenizer), request.stops) for _ in prompts]
        self._first_token_s = [None] * len(prompts)
        try:
            for index, prompt in enumerate(prompts):
                self._submit(index, prompt, sampling, request.cache_salt or "")
        except KVError as error:
            self.close()
            raise from_engine(error) from error

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the prompt, what came), until all prompts have ended.

        Raises :class:`ApiError` when one ends by an error.
        """
        unfinished = len(self.choices)
        while unfinished:
            for mail in await self._mailbox.take():
                choice = self.choices[mail.index]
                if choice.finished:
                    continue
                delta = choice.push(mail.output)
                self._measure(mail.index, choice, mail.at_s)
                if choice.finish_reason == "error":
                    raise self._failure(choice)
                if delta.finish_reason is not None:
                    unfinished -= 1
                    self._end(mail.index, choice)
                if delta.text or delta.tokens or delta.finish_reason is not None:
                    yield mail.index, delta

    def abort(self) -> None:
        """Ask the engine to end all of it; the deltas then end with the reason "abort". From any thread."""
        for request_id in list(self._running.values()):
            self._engine.abort(request_id)

    def _submit(self, index: int, prompt: list[int], sampling: SamplingParams, cache_salt: str) -> None:
        request_id = f"{self.id}-{index}"
        self._engine.submit(
            prompt,
            sampling,
            cache_salt=cache_salt,
            trace=self._trace,
            request_id=request_id,
            on_output=lambda output: self._mailbox.put(index, output),
        )
        self._running[index] = request_id

    def _measure(self, index: int, choice: Choice, at_s: float) -> None:
        if self._first_token_s[index] is None and choice.num_output_tokens:
            self._first_token_s[index] = at_s
            self._metrics.first_token(at_s - self._arrived_s)
        if choice.finish_reason is not None:
            self._metrics.finished(choice, at_s - self._arrived_s)

    def _end(self, index: int, choice: Choice) -> None:
        request_id = self._running.pop(index)
        if choice.stopped_early:
            self._engine.abort(request_id)

    def _failure(self, choice: Choice) -> ApiError:
        problem = engine_problem(self._engine)
        if problem:
            return ApiError(503, problem, code="engine_unavailable")
        return invalid(choice.error or "the engine refused the request", "prompt")

    def close(self) -> None:
        """Nobody reads any more: what still runs is aborted, and its outputs are dropped."""
        self._mailbox.close()
        self.abort()
        for index in self._running:
            if not self.choices[index].finished:
                self._metrics.dropped()
        self._running.clear()


def sampling_params(request: GenerationRequest, max_tokens: int, logprobs: int) -> SamplingParams:
    """OpenAI's defaults (temperature 1) where the request says nothing; without a seed each request draws its own."""
    seed = secrets.randbits(63) if request.seed is None else request.seed & ((1 << 64) - 1)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        seed=seed,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )
