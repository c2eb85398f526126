"""``POST /v1/chat/completions``: the next message of a conversation, whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType

from kvstrata.engine_adapter.serve.choice import ChosenToken, Delta
from kvstrata.engine_adapter.serve.generation import sampling_params
from kvstrata.engine_adapter.serve.prompts import chat_prompt
from kvstrata.engine_adapter.serve.requests import ChatCompletionRequest, parse
from kvstrata.engine_adapter.serve.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Usage,
    usage,
)
from kvstrata.engine_adapter.serve.service import Service
from kvstrata.engine_adapter.serve.token_text import chat_logprobs


class ChatJob:
    """A validated request and its tokens. Made outside of the event loop: a long conversation takes a while."""

    def __init__(self, service: Service, body: bytes, response_id: str, trace: str = "") -> None:
        """``trace``: the request's traceparent. Raises :class:`ApiError` for whatever is wrong with ``body``."""
        self.request = parse(body, ChatCompletionRequest)
        model = service.model
        model.refuse_other(self.request.model)
        self.prompt = chat_prompt(self.request.messages, model.tokenizer)
        # Without a limit an answer may fill the context.
        left = max(model.max_model_len - len(self.prompt), 1)
        max_tokens = self.request.max_completion_tokens or self.request.max_tokens or left
        logprobs = max(self.request.top_logprobs or 0, 1) if self.request.logprobs else 0
        self.sampling = sampling_params(self.request, max_tokens, logprobs)
        self._service = service
        self._trace = trace
        self._id = f"chatcmpl-{response_id}"
        self._created = int(time.time())

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        text = ""
        tokens: list[ChosenToken] = []
        with self._service.generating([self.prompt], self.request, self.sampling, self._trace) as generation:
            async for _, delta in generation.deltas():
                text += delta.text
                tokens += delta.tokens
            choice = ChatChoice(
                message=ChatAnswer(content=text),
                logprobs=self._logprobs(tokens),
                finish_reason=generation.choices[0].finish_reason,
            )
            answer = ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._service.model.name,
                choices=[choice],
                usage=usage(generation.choices),
            )
            return msgspec.json.encode(answer)

    async def events(self) -> AsyncGenerator[bytes]:
        """The answer as events: who speaks, then what is said, then the usage where it was asked for."""
        later = None if self.request.include_usage else UNSET
        opened = False
        with self._service.generating([self.prompt], self.request, self.sampling, self._trace) as generation:
            async for _, delta in generation.deltas():
                if not opened:
                    opened = True
                    yield self._json([ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))], later)
                yield self._json([self._chunk(delta)], later)
            if self.request.include_usage:
                yield self._json([], usage(generation.choices))

    def _chunk(self, delta: Delta) -> ChatChunkChoice:
        content = delta.text if delta.text or delta.finish_reason is None else None
        return ChatChunkChoice(
            delta=ChatDelta(content=content), logprobs=self._logprobs(delta.tokens), finish_reason=delta.finish_reason
        )

    def _logprobs(self, tokens: list[ChosenToken]) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(self._service.model.tokenizer, tokens, self.request.top_logprobs or 0))

    def _json(self, choices: list[ChatChunkChoice], used: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(
            ChatCompletionChunk(
                id=self._id, created=self._created, model=self._service.model.name, choices=choices, usage=used
            )
        )
