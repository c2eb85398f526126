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


@pytest.mark.parametrize(("routing", "engines"), [("round-robin", [0, 1, 1, 2]), ("sticky", [0, 0, 1, 1])])
def test_routing_depends_on_session_and_turn_alone(routing: str, engines: list[int]) -> None:
    plan = build_plan(TRACE, dataclasses.replace(OPTIONS, routing=routing), encode)  # type: ignore[arg-type]
    assert [turn.engine for turn in plan.turns] == engines


def test_nothing_left_to_send_is_an_error() -> None:
    with pytest.raises(TraceError, match="more than 1 token"):
        build_plan(TextTrace("t", TRACE.sessions[:1]), dataclasses.replace(OPTIONS, max_prompt_tokens=1), encode)
