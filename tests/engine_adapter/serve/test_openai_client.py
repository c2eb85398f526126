"""The official ``openai`` client against the server on a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.proto.errors import Busy
from kvstrata.transfer.web import WebServer

openai = pytest.importorskip("openai")


@pytest.fixture
def client(make_bench: Any) -> Iterator[Any]:
    bench = make_bench(api_key="k")
    bench.engine.local, bench.engine.external = 1, 1
    server = WebServer(bench.app, "127.0.0.1:0").start()
    with openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="k", max_retries=0, timeout=10) as client:
        client.bench = bench
        yield client
    server.stop()


def test_it_talks_to_us(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    whole = client.completions.create(model="tiny", prompt="hi!", max_tokens=50, logprobs=1)
    assert whole.choices[0].text == "hello world" and whole.choices[0].logprobs.tokens[0] == "h"
    assert whole.usage.prompt_tokens_details.cached_tokens == 2 and whole.usage.total_tokens == 15
    assert whole.usage.kvstrata == {"local_cached_tokens": 1, "external_cached_tokens": 1}
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], extra_body={"cache_salt": "tenant-a", "top_k": 3}
    )
    assert chat.choices[0].message.content == "hello world" and chat.choices[0].finish_reason == "stop"
    assert client.bench.engine.submitted[-1][2] == "tenant-a"


def test_it_reads_our_streams(client: Any) -> None:
    with client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello world" and chunks[-1].usage.completion_tokens == 12
    with client.completions.create(model="tiny", prompt="hi", max_tokens=50, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello world"


def test_it_knows_our_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="n with this value") as refused:
        client.completions.create(model="tiny", prompt="a", n=2)
    assert refused.value.param == "n" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    client.bench.engine.refuse = Busy("full")
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="a", stream=True)


def test_leaving_a_stream_aborts_its_request(client: Any) -> None:
    engine = client.bench.engine
    engine.hold = True
    service = client.bench.service

    def first_token() -> None:
        assert engine.asked.wait(10)
        engine.give(next(iter(engine.callbacks)), [65], None)

    giver = threading.Thread(target=first_token)
    giver.start()
    with client.completions.create(model="tiny", prompt="a", max_tokens=50, stream=True) as stream:
        assert next(iter(stream)).choices[0].text == "A"
    giver.join()
    assert service.wait_idle(10) and engine.aborted == list(engine.callbacks)
