"""A scripted engine behind the real application, and ways to talk to it without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from kvstrata.engine_adapter.paged.outputs import RequestOutput, TokenLogprobs
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.paged.stats import EngineStats
from kvstrata.engine_adapter.paged.text.tokenizer import ByteTokenizer
from kvstrata.engine_adapter.serve.app import AppOptions, serve_app
from kvstrata.engine_adapter.serve.metrics import ServeMetrics
from kvstrata.engine_adapter.serve.served_model import ServedModel
from kvstrata.engine_adapter.serve.service import Service
from kvstrata.proto.errors import KVError

PROMPTS_MAX = 200
CREATED = 1_700_000_000


class ScriptedEngine:
    """Answers every prompt with ``answer`` and EOS at once, ``chunk`` tokens an output; holds its requests if told."""

    def __init__(self) -> None:
        self.answer: Sequence[int] = b"hello world"
        self.chunk = 1
        self.finish: str | None = None  #: ends at the last token of the answer for this reason
        self.error = ""
        self.local, self.external = 0, 0
        self.hold = False
        self.refuse: KVError | None = None
        self.refuse_from = 0  #: the first submit that is refused
        self.problem = ""
        self.resets = self.external_resets = 0
        self.in_use = False
        self.current = EngineStats()
        self.submitted: list[tuple[list[int], SamplingParams, str]] = []
        self.traces: list[str] = []
        self.aborted: list[str] = []
        self.asked = threading.Event()
        self.callbacks: dict[str, Callable[[RequestOutput], None]] = {}

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
        if self.refuse is not None and len(self.submitted) >= self.refuse_from:
            raise self.refuse
        assert request_id is not None and request_id not in self.callbacks
        self.submitted.append((list(prompt_token_ids), sampling.validated(), cache_salt))
        self.traces.append(trace)
        self.callbacks[request_id] = on_output
        self.asked.set()
        if not self.hold:
            self.play(request_id)
        return request_id

    def play(self, request_id: str) -> None:
        """All of the answer."""
        prompt, sampling, _ = self.submitted[list(self.callbacks).index(request_id)]
        tokens = [*self.answer, ByteTokenizer.EOS][: sampling.max_tokens]
        reason = "length" if len(tokens) == sampling.max_tokens else "stop"
        if self.finish is not None:
            tokens, reason = list(self.answer), self.finish
        pieces = [tokens[at : at + self.chunk] for at in range(0, len(tokens), self.chunk)] or [[]]
        for number, piece in enumerate(pieces):
            self.give(request_id, piece, reason if number == len(pieces) - 1 else None, len(prompt), sampling.logprobs)

    def give(self, request_id: str, tokens: list[int], reason: str | None, prompt: int = 1, logprobs: int = 0) -> None:
        values = [TokenLogprobs(-0.5, [(token + rank, -0.5 - rank) for rank in range(logprobs)]) for token in tokens]
        self.callbacks[request_id](
            RequestOutput(
                request_id=request_id,
                new_token_ids=tokens,
                finish_reason=reason,
                error=self.error,
                num_prompt_tokens=prompt,
                num_local_cached_tokens=self.local,
                num_external_cached_tokens=self.external,
                logprobs=values if logprobs else [],
            )
        )

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return self.current

    def health(self) -> Mapping[str, object]:
        return {"healthy": not self.problem, "problem": self.problem}

    def reset_prefix_cache(self, *, reset_external: bool = False) -> bool:
        self.resets += 1
        self.external_resets += reset_external
        return not self.in_use


class Bench:
    """The application over a scripted engine; ``post`` and ``get`` run one request to its end."""

    def __init__(self, options: AppOptions) -> None:
        self.engine = ScriptedEngine()
        self.model = ServedModel("tiny", 4096, ByteTokenizer(), CREATED)
        self.service = Service(self.engine, self.model, ServeMetrics("tiny", self.engine.stats), PROMPTS_MAX)
        self.app: Starlette = serve_app(self.service, options)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    def post(self, path: str, body: Mapping[str, object], **more: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def complete(self, **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 100, **fields})

    def chat(self, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """What a stream held, without its ``[DONE]``, which must be there."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture
def bench() -> Bench:
    return Bench(AppOptions())


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    return lambda **options: Bench(AppOptions(**options))


@pytest.fixture
def read_events() -> Callable[[httpx.Response], list[dict[str, Any]]]:
    return events
