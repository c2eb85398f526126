"""Small plans without a tokenizer, and outcomes without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvstrata.cli.paged_replay.plan import Plan, Turn

MakePlan = Callable[..., Plan]


@pytest.fixture
def make_plan() -> MakePlan:
    """A plan from prompts of token ids, session by session; turns go round the engines."""

    def make(sessions: Sequence[Sequence[Sequence[int]]], engines: int = 2, think_s: float = 0.0) -> Plan:
        made, index = [], 0
        for number, prompts in enumerate(sessions):
            turns = []
            for place, prompt in enumerate(prompts):
                tokens = np.array(prompt, dtype="<u4")
                turns.append(Turn(index, number, (number + place) % engines, tokens, 2, think_s if place else 0.0))
                index += 1
            made.append(tuple(turns))
        return Plan("small", tuple(made), 0)

    return make
