"""What the server refuses, with which status, and that nothing stays behind in the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvstrata.engine_adapter.serve import app as app_module
from kvstrata.proto.errors import Busy, Corrupt, InvalidArgument, Unavailable

Events = Callable[[httpx.Response], list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a" * 4000}, "prompt"),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_fields_are_named(bench: Any, fields: dict[str, object], param: str) -> None:
    answer = bench.complete(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), answer.text
    assert error["message"] and set(error) == {"message", "type", "param", "code"}
    assert not bench.engine.submitted


def test_what_clients_send_and_nobody_needs_is_ignored(bench: Any) -> None:
    harmless = {"n": 1, "echo": False, "presence_penalty": 0.0, "logit_bias": None, "metadata": {"a": 1}, "store": True}
    assert bench.complete(**harmless).status_code == 200
    assert (
        bench.chat(tools=[{"type": "function"}], tool_choice="auto", response_format={"type": "text"}).status_code
        == 200
    )


def test_a_missing_prompt_is_named(bench: Any) -> None:
    error = bench.post("/v1/completions", {"model": "tiny"}).json()["error"]
    assert error["param"] == "prompt"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'"x"', b"null", b'{"prompt": "\xff"}'])
def test_a_body_that_is_no_request(bench: Any, body: bytes) -> None:
    answer = bench.request("POST", "/v1/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_text_that_is_no_unicode(bench: Any) -> None:
    answer = bench.request("POST", "/v1/completions", content=rb'{"prompt": "\ud800"}')
    assert answer.status_code == 400, answer.text


def test_a_body_past_the_bound(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BODY_BYTES_MAX", 1000)
    declared = bench.complete(prompt="x" * 1000)
    body = json.dumps({"prompt": "x" * 1000}).encode()

    async def undeclared() -> Any:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    streamed = bench.request("POST", "/v1/completions", content=undeclared())
    assert declared.status_code == streamed.status_code == 413
    assert declared.json()["error"]["code"] == "request_too_large"


def test_an_unknown_model_or_path_or_method(bench: Any) -> None:
    answer = bench.complete(model="gpt-9")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert "'tiny'" in answer.json()["error"]["message"]
    assert bench.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert bench.get("/v1/completions").status_code == 405


def test_a_prompt_beyond_the_context_says_the_numbers(bench: Any) -> None:
    error = bench.complete(prompt="a" * 4000, max_tokens=97).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("4096", "4000", "97", "4097"))
    assert bench.complete(prompt="a" * 4000, max_tokens=96).status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Busy("4096 requests wait"), 429),
        (Unavailable("rank 1 is gone"), 503),
        (InvalidArgument("no"), 400),
        (Corrupt("odd"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(bench: Any, refusal: Exception, status: int, stream: bool) -> None:
    bench.engine.refuse = refusal
    answer = bench.complete(stream=stream)
    assert answer.status_code == status and str(refusal) in answer.json()["error"]["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert bench.service.num_active == 0


def test_a_batch_is_in_the_engine_whole_or_not_at_all(bench: Any) -> None:
    bench.engine.refuse, bench.engine.refuse_from, bench.engine.hold = Busy("full"), 2, True
    assert bench.complete(prompt=["a", "b", "c"]).status_code == 429
    assert set(bench.engine.callbacks) <= set(bench.engine.aborted) and len(bench.engine.callbacks) == 2


def test_more_prompts_than_the_engine_queues(bench: Any) -> None:
    bench.engine.hold = True

    async def ask() -> None:
        body = {"prompt": ["a"] * 128, "max_tokens": 1}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(bench.app), base_url="http://engine") as client:
            first = asyncio.ensure_future(client.post("/v1/completions", json=body))
            async with asyncio.timeout(5):
                while len(bench.engine.callbacks) < 128:
                    await asyncio.sleep(0.001)
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and "128" in refused.json()["error"]["message"]
            assert refused.json()["error"]["code"] == "engine_busy"
            for request_id in bench.engine.callbacks:
                bench.engine.give(request_id, [65], "length")
            assert (await first).status_code == 200
            bench.engine.hold = False
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_can_never_fit_is_the_clients_matter(bench: Any, stream: bool) -> None:
    bench.engine.answer, bench.engine.finish, bench.engine.error = b"", "error", "needs 99 blocks, the cache has 8"
    answer = bench.complete(stream=stream)
    assert answer.status_code == 400 and "99 blocks" in answer.json()["error"]["message"]


def test_an_engine_that_dies_is_the_servers_matter(bench: Any, read_events: Events) -> None:
    bench.engine.problem = "rank 0 ended"
    answer = bench.complete()
    assert answer.status_code == 503 and "rank 0 ended" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "server_error"


def test_an_error_in_the_middle_of_a_stream_is_an_event(bench: Any, read_events: Events) -> None:
    bench.engine.finish, bench.engine.error = "error", "the rank is gone"
    got = read_events(bench.complete(stream=True))
    assert got[0]["choices"][0]["text"] == "h" and got[-1]["error"]["message"] == "the rank is gone"
    assert bench.service.num_active == 0


def test_the_key(make_bench: Any) -> None:
    bench = make_bench(api_key="s3cret")
    assert bench.complete().status_code == 401
    wrong = bench.post("/v1/completions", {"prompt": "a"}, headers={"authorization": "Bearer s3cre"})
    right = bench.post("/v1/completions", {"prompt": "a"}, headers={"authorization": "bearer s3cret"})
    assert (wrong.status_code, right.status_code) == (401, 200)
    assert wrong.json()["error"]["code"] == "invalid_api_key" and "www-authenticate" in wrong.headers
    for path in ("/v1/models", "/v1/models/tiny"):
        assert bench.get(path).status_code == 401
    assert bench.post("/tokenize", {"prompt": "a"}).status_code == 401
    for path in ("/health", "/readyz", "/metrics", "/version"):
        assert bench.get(path).status_code == 200, "probes and scrapers have no key"


def test_a_defect_is_an_error_object_and_not_a_traceback(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(bench.engine, "submit", broken)
    answer = bench.complete()
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text and bench.service.num_active == 0
