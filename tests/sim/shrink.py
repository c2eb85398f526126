"""A failing plan cut down to a short one that fails in the same way: delta debugging over its actions."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from tests.sim.plan import Action, Plan
from tests.sim.runner import Result, run


def sort_of(problem: str) -> str:
    """What is the same about two failures: the words, without what is named in them."""
    return re.sub(r"[0-9a-f]{6}|[\d.]+|node-\S+|master-\S+|client-\S+|\{.*?\}|\[.*?\]", "_", problem)[:60]


def shrunk(result: Result, seconds: float = 120.0) -> Result:
    """The shortest story found within so much time that ends as ``result`` does."""
    until = time.monotonic() + seconds
    plan, wanted = result.plan, sort_of(result.problem)
    best = result
    # What came after the end of the story had no part in it.
    best = _try(best, plan, [action for action in plan.actions if action.at <= result.seconds], wanted) or best
    size = max(1, len(best.plan.actions) // 2)
    while size and time.monotonic() < until:
        start, cut = 0, False
        while start < len(best.plan.actions) and time.monotonic() < until:
            actions = best.plan.actions
            shorter = _try(best, plan, [*actions[:start], *actions[start + size :]], wanted)
            if shorter is not None:
                best, cut = shorter, True
            else:
                start += size
        if not cut:
            size //= 2
    return best


def _try(best: Result, plan: Plan, actions: list[Action], wanted: str) -> Result | None:
    if len(actions) == len(best.plan.actions):
        return None
    result = run(replace(plan, actions=tuple(actions)))
    return result if result.problem and sort_of(result.problem) == wanted else None
