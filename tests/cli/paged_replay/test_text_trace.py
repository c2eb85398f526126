from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kvstrata.cli.paged_replay.conversation import generate_conversations
from kvstrata.cli.paged_replay.text_trace import is_text_trace, read_text_trace
from kvstrata.cli.replay.traces import TraceError

Write = Callable[..., Path]


def line(session: str, at_us: int, prompt: str = "p", agent: str = "a") -> str:
    record = {"agent": agent, "session": session, "timestamp": at_us, "input": prompt, "output": "o", "session_id": "x"}
    return json.dumps(record)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*lines: str) -> Path:
        path = tmp_path / "small.jsonl.gz"
        path.write_bytes(gzip.compress("".join(f"{text}\n" for text in lines).encode()))
        return path

    return write


def test_requests_are_ordered_by_time_and_sessions_by_their_start(write: Write) -> None:
    trace = read_text_trace(
        write(line("late", 9_000_000), line("early", 3_500_000, "second"), line("early", 2_000_000, "first"))
    )
    assert trace.name == "small"
    assert [session.name for session in trace.sessions] == ["early", "late"]
    assert [(r.prompt, r.think_s) for r in trace.sessions[0].requests] == [("first", 0.0), ("second", 1.5)]


def test_one_name_of_two_agents_is_two_sessions_and_agents_can_be_chosen(write: Write) -> None:
    trace = read_text_trace(write(line("s", 1), line("s", 2, agent="b"), line("t", 3, agent="b")))
    assert [(s.agent, s.name) for s in trace.sessions] == [("a", "s"), ("b", "s"), ("b", "t")]
    assert [s.name for s in trace.chosen("b", None).sessions] == ["s", "t"]
    assert [s.name for s in trace.chosen("b", 1).sessions] == ["s"]
    assert len(trace.chosen(None, None).sessions) == 3
    with pytest.raises(TraceError, match="its agents are a, b"):
        trace.chosen("c", None)


@pytest.mark.parametrize("bad", ["{", "[]", '{"agent": "a"}', line("s", 1).replace("1", '"x"', 1)])
def test_a_bad_line_is_named(bad: str, write: Write) -> None:
    with pytest.raises(TraceError, match="line 2"):
        read_text_trace(write(line("s", 1), bad))


def test_a_file_without_requests_is_an_error(write: Write, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        read_text_trace(write())
    with pytest.raises(TraceError, match="nowhere"):
        is_text_trace(tmp_path / "nowhere")


def test_kinds_of_traces_are_told_apart_by_their_first_line(write: Write, tmp_path: Path) -> None:
    assert is_text_trace(write(line("s", 1)))
    assert not is_text_trace(write())
    other = tmp_path / "other.jsonl"
    for text in ('{"t": 0, "runs": []}', "garbage", "[1]"):
        other.write_text(text)
        assert not is_text_trace(other)


def test_generated_conversations_grow_share_their_system_prompt_and_repeat_by_seed() -> None:
    trace = generate_conversations(3, 4, seed=7, system_chars=500, turn_chars=100)
    assert trace == generate_conversations(3, 4, seed=7, system_chars=500, turn_chars=100)
    assert trace != generate_conversations(3, 4, seed=8, system_chars=500, turn_chars=100)
    assert [len(session.requests) for session in trace.sessions] == [4, 4, 4]
    for session in trace.sessions:
        prompts = [request.prompt for request in session.requests]
        assert all(later.startswith(earlier) and later != earlier for earlier, later in pairwise(prompts))
    first = [session.requests[0].prompt for session in trace.sessions]
    assert len(set(first)) == 3 and len({prompt[:500] for prompt in first}) == 1
