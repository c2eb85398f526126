from __future__ import annotations

import dataclasses

import pytest

from kvstrata.cli.paged_replay import PagedOptions
from kvstrata.cli.paged_replay.plan import build_plan
from kvstrata.cli.paged_replay.text_trace import TextRequest, TextSession, TextTrace
from kvstrata.cli.replay.traces import TraceError

TRACE = TextTrace(
    "t",
    (
        TextSession("one", "a", (TextRequest("abc", "xy"), TextRequest("abcdef", "", 5.0), TextRequest("x" * 50, "y"))),
        TextSession("empty", "a", (TextRequest("", "y"),)),
        TextSession("two", "a", (TextRequest("b", "y" * 9), TextRequest("bc", "y", 0.5))),
    ),
)
OPTIONS = PagedOptions(engines=3, max_prompt_tokens=10, output_tokens=4, think_cap_s=1.0)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_turns_have_the_prompts_tokens_and_bounded_outputs() -> None:
    plan = build_plan(TRACE, OPTIONS, encode)
    assert [turn.tokens.tolist() for turn in plan.turns] == [encode(text) for text in ("abc", "abcdef", "b", "bc")]
    assert [turn.index for turn in plan.turns] == [0, 1, 2, 3]
    assert [turn.output_tokens for turn in plan.turns] == [2, 1, 4, 1]
    assert [turn.think_s for turn in plan.turns] == [0.0, 1.0, 0.0, 0.5]
    assert (plan.skipped, plan.prompt_tokens, plan.max_model_len) == (2, 12, 7)


def test_sticky_keeps_a_session_on_one_engine() -> None:
    plan = build_plan(TRACE, dataclasses.replace(OPTIONS, routing="sticky"), encode)
    assert [turn.engine for turn in plan.turns] == [0, 0, 1, 1]


def test_round_robin_goes_round_all_engines_in_an_order_of_each_sessions_own() -> None:
    sessions = tuple(TextSession(str(i), "a", (TextRequest("a", "b"),) * 8) for i in range(12))
    options = dataclasses.replace(OPTIONS, routing="round-robin", engines=4)
    plan = build_plan(TextTrace("many", sessions), options, encode)
    orders = [[turn.engine for turn in session] for session in plan.sessions]
    for order in orders:
        assert sorted(order[:4]) == [0, 1, 2, 3] and order[4:] == order[:4]
    assert len({tuple(order) for order in orders}) > 3, "sessions that go the same way would meet at every turn"
    assert build_plan(TextTrace("many", sessions), options, encode).turns[5].engine == plan.turns[5].engine


def test_nothing_left_to_send_is_an_error() -> None:
    with pytest.raises(TraceError, match="more than 1 token"):
        build_plan(TextTrace("t", TRACE.sessions[:1]), dataclasses.replace(OPTIONS, max_prompt_tokens=1), encode)
