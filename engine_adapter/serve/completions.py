"""``POST /v1/completions``: one answer, or a stream of events, for one prompt or many."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from kvstrata.engine_adapter.serve.choice import ChosenToken, Delta
from kvstrata.engine_adapter.serve.generation import sampling_params
from kvstrata.engine_adapter.serve.prompts import completion_prompts
from kvstrata.engine_adapter.serve.requests import CompletionRequest, parse
from kvstrata.engine_adapter.serve.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, usage
from kvstrata.engine_adapter.serve.service import Service
from kvstrata.engine_adapter.serve.token_text import completion_logprobs

#: OpenAI's, for this route.
MAX_TOKENS_DEFAULT: Final = 16


class CompletionJob:
    """A validated request and its tokens. Made outside of the event loop: a long prompt takes a while."""

    def __init__(self, service: Service, body: bytes, response_id: str, trace: str = "") -> None:
        """``trace``: the request's traceparent. Raises :class:`ApiError` for whatever is wrong with ``body``."""
        self.request = parse(body, CompletionRequest)
        service.model.refuse_other(self.request.model)
        self.prompts = completion_prompts(self.request.prompt, service.model.tokenizer)
        left = service.model.max_model_len - max(len(prompt) for prompt in self.prompts)
        max_tokens = self.request.max_tokens or max(min(MAX_TOKENS_DEFAULT, left), 1)
        logprobs = 0 if self.request.logprobs is None else max(self.request.logprobs, 1)
        self.sampling = sampling_params(self.request, max_tokens, logprobs)
        self._service = service
        self._trace = trace
        self._id = f"cmpl-{response_id}"
        self._created = int(time.time())

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        texts = [""] * len(self.prompts)
        tokens: list[list[ChosenToken]] = [[] for _ in self.prompts]
        with self._service.generating(self.prompts, self.request, self.sampling, self._trace) as generation:
            async for index, delta in generation.deltas():
                texts[index] += delta.text
                tokens[index] += delta.tokens
            choices = [
                CompletionChoice(
                    index=index, text=text, logprobs=self._logprobs(tokens[index]), finish_reason=choice.finish_reason
                )
                for index, (text, choice) in enumerate(zip(texts, generation.choices, strict=True))
            ]
            return self._json(choices, usage(generation.choices))

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as events, each JSON; the usage last where it was asked for."""
        with self._service.generating(self.prompts, self.request, self.sampling, self._trace) as generation:
            async for index, delta in generation.deltas():
                yield self._json([self._chunk(index, delta)], None if self.request.include_usage else UNSET)
            if self.request.include_usage:
                yield self._json([], usage(generation.choices))

    def _chunk(self, index: int, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=index, text=delta.text, logprobs=self._logprobs(delta.tokens), finish_reason=delta.finish_reason
        )

    def _logprobs(self, tokens: list[ChosenToken]) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        return completion_logprobs(self._service.model.tokenizer, tokens, self.request.logprobs)

    def _json(self, choices: list[CompletionChoice], used: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            Completion(id=self._id, created=self._created, model=self._service.model.name, choices=choices, usage=used)
        )
