from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.cli.paged_replay.plan import Plan, Turn
from kvstrata.cli.paged_replay.simulator import cache_each, one_cache

Prompts = list[list[list[int]]]
prompts = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4), min_size=1, max_size=4
)


def brute_force(turns: Sequence[Turn], block: int, cache_of: Callable[[Turn], int]) -> list[int]:
    """Compare every prompt with every earlier one, token by token."""
    hits = []
    for place, turn in enumerate(turns):
        tokens, best = turn.tokens.tolist(), 0
        for earlier in turns[:place]:
            if cache_of(earlier) == cache_of(turn):
                other, same = earlier.tokens.tolist(), 0
                while same < min(len(tokens), len(other)) and tokens[same] == other[same]:
                    same += 1
                # Only full blocks of the earlier prompt were kept.
                best = max(best, same // block * block)
        hits.append(min(best, (len(tokens) - 1) // block * block))
    return hits


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sessions=prompts, block=st.integers(1, 5))
def test_hits_are_those_of_comparing_all_prompts(make_plan: Callable[..., Plan], sessions: Prompts, block: int) -> None:
    turns = make_plan(sessions).turns
    assert one_cache(turns, block).tolist() == brute_force(turns, block, lambda turn: 0)
    assert cache_each(turns, block).tolist() == brute_force(turns, block, lambda turn: turn.engine)


def test_the_last_token_is_always_computed(make_plan: Callable[..., Plan]) -> None:
    turns = make_plan([[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5]]]).turns
    assert one_cache(turns, 4).tolist() == [0, 0, 4]
    assert one_cache(turns, 2).tolist() == [0, 2, 4]
