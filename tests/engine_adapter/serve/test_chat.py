"""``/v1/chat/completions``: conversations in, messages out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvstrata.engine_adapter.paged.text.chat import render_chat

Events = Callable[[httpx.Response], list[dict[str, Any]]]


def test_a_conversation_is_answered(bench: Any) -> None:
    body = bench.chat().json()
    assert (body["object"], body["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 12
    assert bytes(bench.engine.submitted[0][0]).decode() == render_chat([{"role": "user", "content": "hi"}])


def test_every_role_and_text_parts(bench: Any) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    assert bench.chat(messages=messages).status_code == 200
    plain = [("system", "be brief"), ("user", "ab"), ("assistant", "c"), ("tool", "d")]
    expected = render_chat([{"role": role, "content": content} for role, content in plain])
    assert bytes(bench.engine.submitted[0][0]).decode() == expected


def test_an_answer_may_fill_the_context_unless_it_is_bounded(bench: Any) -> None:
    bench.chat()
    prompt, sampling, _ = bench.engine.submitted[0]
    assert sampling.max_tokens == 4096 - len(prompt)
    bench.chat(max_tokens=7)
    bench.chat(max_tokens=7, max_completion_tokens=8)
    assert [given[1].max_tokens for given in bench.engine.submitted[1:]] == [7, 8]


def test_a_stream_says_who_speaks_first(bench: Any, read_events: Events) -> None:
    got = read_events(bench.chat(stream=True, stream_options={"include_usage": True}))
    assert got[0]["object"] == "chat.completion.chunk"
    deltas = [event["choices"][0]["delta"] for event in got[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""} and not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
    assert got[-2]["choices"][0]["finish_reason"] == "stop" and got[-1]["usage"]["completion_tokens"] == 12


def test_an_answer_of_nothing(bench: Any, read_events: Events) -> None:
    bench.engine.answer = b""
    assert bench.chat().json()["choices"][0]["message"]["content"] == ""
    got = read_events(bench.chat(stream=True))
    assert got[0]["choices"][0]["delta"]["role"] == "assistant"
    assert got[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


def test_log_probabilities(bench: Any) -> None:
    bench.engine.answer = b"ab"
    content = bench.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert bench.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "length >= 1"),
        ([{"role": "pirate", "content": "x"}], "pirate"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ("hi", "array"),
        ([{"role": "user", "content": 5}], "content"),
    ],
)
def test_a_wrong_conversation_is_refused_by_name(bench: Any, messages: object, said: str) -> None:
    answer = bench.chat(messages=messages)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert not bench.engine.submitted
