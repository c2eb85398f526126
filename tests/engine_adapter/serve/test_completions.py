"""``/v1/completions``: what goes to the engine, what comes back, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Events = Callable[[httpx.Response], list[dict[str, Any]]]


def test_a_prompt_is_answered_with_its_usage(bench: Any) -> None:
    bench.engine.local, bench.engine.external = 1, 0
    answer = bench.complete()
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "tiny", "cmpl-")
    assert body["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 1},
        "kvstrata": {"local_cached_tokens": 1, "external_cached_tokens": 0},
    }


def test_local_and_external_hits_are_told_apart(bench: Any) -> None:
    bench.engine.local, bench.engine.external = 16, 32
    used = bench.complete(prompt="x" * 64).json()["usage"]
    assert used["prompt_tokens_details"] == {"cached_tokens": 48}
    assert used["kvstrata"] == {"local_cached_tokens": 16, "external_cached_tokens": 32}


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [b"hi"]),
        ([104, 105], [b"hi"]),
        (["hi", "you"], [b"hi", b"you"]),
        ([[104], [105, 106]], [b"h", b"ij"]),
    ],
)
def test_every_shape_of_a_prompt(bench: Any, prompt: object, tokens: list[bytes]) -> None:
    body = bench.complete(prompt=prompt).json()
    assert [given[0] for given in bench.engine.submitted] == [list(token) for token in tokens]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(tokens)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_what_a_request_says_reaches_the_engine(bench: Any) -> None:
    options = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 9, "stop_token_ids": [3, 4], "ignore_eos": True}
    bench.complete(**options, max_tokens=5, cache_salt="tenant", logprobs=2)
    _, sampling, salt = bench.engine.submitted[0]
    assert salt == "tenant" and sampling.max_tokens == 5
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.25, 0.5, 7, 9)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((3, 4), True, 2)


def test_defaults_are_openais(bench: Any) -> None:
    bench.post("/v1/completions", {"prompt": "a", "temperature": None, "stop": None, "seed": None, "n": 1, "user": "u"})
    bench.post("/v1/completions", {"prompt": "a", "top_k": -1, "seed": -1})
    (_, first, salt), (_, second, _) = bench.engine.submitted
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, salt) == (16, 1.0, 1.0, 0, "")
    assert first.seed != second.seed == (1 << 64) - 1 and second.top_k == 0


def test_the_default_length_fits_what_is_left(bench: Any) -> None:
    assert bench.post("/v1/completions", {"prompt": "a" * 4090}).status_code == 200
    assert bench.engine.submitted[0][1].max_tokens == 6


def test_a_stream_joins_to_the_whole_answer(bench: Any, read_events: Events) -> None:
    got = read_events(bench.complete(stream=True))
    assert "".join(event["choices"][0]["text"] for event in got) == "hello world"
    assert [event["choices"][0]["finish_reason"] for event in got] == [None] * (len(got) - 1) + ["stop"]
    assert len({event["id"] for event in got}) == 1 and not any("usage" in event for event in got)


def test_a_stream_ends_with_usage_where_it_is_asked_for(bench: Any, read_events: Events) -> None:
    got = read_events(bench.complete(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in got[:-1])
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 12


def test_a_streamed_batch_says_whose_text_it_is(bench: Any, read_events: Events) -> None:
    texts = ["", ""]
    for event in read_events(bench.complete(prompt=["a", "b"], stream=True)):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == ["hello world"] * 2


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_no_half_characters_in_a_stream(bench: Any, read_events: Events, chunk: int) -> None:
    text = "naïve – 漢字 🙂"
    bench.engine.answer, bench.engine.chunk = text.encode(), chunk
    pieces = [event["choices"][0]["text"] for event in read_events(bench.complete(stream=True))]
    assert "".join(pieces) == text and not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_work(bench: Any, read_events: Events, chunk: int, stream: bool) -> None:
    bench.engine.chunk = chunk
    answer = bench.complete(
        stop=["o w", "zzz"], stream=stream, stream_options={"include_usage": True} if stream else None
    )
    if stream:
        got = read_events(answer)
        text = "".join(choice["text"] for event in got for choice in event["choices"])
        reason, used = got[-2]["choices"][0]["finish_reason"], got[-1]["usage"]
    else:
        body = answer.json()
        text, reason, used = body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]
    assert (text, reason) == ("hell", "stop")
    assert used["completion_tokens"] == len("hello w"), "tokens after the stop string count for nothing"
    assert len(bench.engine.aborted) == 1


def test_a_stop_token_is_counted_and_not_shown(bench: Any) -> None:
    bench.engine.answer = b"done"
    body = bench.complete().json()
    assert body["choices"][0]["text"] == "done" and body["usage"]["completion_tokens"] == 5
    bench.engine.answer, bench.engine.finish = b"done!", "stop"
    assert bench.complete(stop_token_ids=[ord("!")]).json()["choices"][0]["text"] == "done"


def test_the_length_is_a_reason(bench: Any) -> None:
    choice = bench.complete(max_tokens=5).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")


def test_log_probabilities(bench: Any, read_events: Events) -> None:
    bench.engine.answer = "aé".encode()
    body = bench.complete(logprobs=2).json()
    shown = body["choices"][0]["logprobs"]
    assert shown["tokens"] == ["a", "token_id:195", "token_id:169"] and shown["text_offset"] == [0, 1, 1]
    assert shown["token_logprobs"] == [-0.5] * 3 and shown["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert bench.complete(logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}] * 3
    streamed = [event["choices"][0]["logprobs"] for event in read_events(bench.complete(logprobs=1, stream=True))]
    assert [token for part in streamed for token in part["tokens"]] == shown["tokens"]
