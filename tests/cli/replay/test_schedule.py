from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay import ReplayOptions
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.generator import generate_trace
from kvstrata.cli.replay.schedule import Schedule, build_schedule
from kvstrata.cli.replay.traces import Request, Session, Trace
from kvstrata.proto.errors import ConfigError

COSTS = CostModel()


def plan(sessions: int = 6, seed: int = 1, **options: object) -> Schedule:
    asked = dataclasses.replace(ReplayOptions(seed=seed), **options)  # type: ignore[arg-type]
    return build_schedule(generate_trace(sessions, seed), asked, COSTS)


def described(schedule: Schedule) -> list[tuple[object, ...]]:
    return [(t.at_s, t.session, t.engine, t.salt, t.tokens_in, t.blocks.tobytes()) for t in schedule.turns]


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert described(plan(tenants=5)) == described(plan(tenants=5))
    assert described(plan()) != described(plan(seed=2))


def test_turns_are_in_time_order_and_a_session_waits_for_its_last_request() -> None:
    trace = generate_trace(5, 3)
    schedule = build_schedule(trace, ReplayOptions(think_cap_s=7.0), COSTS)
    assert [t.index for t in schedule.turns] == list(range(trace.requests))
    times = [t.at_s for t in schedule.turns]
    assert times == sorted(times)
    for number, session in enumerate(trace.sessions):
        turns = [t for t in schedule.turns if t.session == number]
        assert [t.tokens_in for t in turns] == [r.tokens_in for r in session.requests]
        for before, after, request in zip(turns, turns[1:], session.requests, strict=False):
            assert request.service_s is not None
            assert after.at_s == pytest.approx(before.at_s + request.service_s + after.think_s)
            assert after.think_s <= 7.0


def test_round_robin_spreads_requests_and_sticky_keeps_sessions() -> None:
    spread = Counter(t.engine for t in plan(engines=3).turns)
    assert max(spread.values()) - min(spread.values()) <= 1
    engines: dict[int, set[int]] = {}
    for turn in plan(engines=3, routing="sticky").turns:
        engines.setdefault(turn.session, set()).add(turn.engine)
    assert all(len(used) == 1 for used in engines.values())
    assert Counter(min(used) for used in engines.values()) == {0: 2, 1: 2, 2: 2}


def test_an_open_loop_trace_keeps_its_times() -> None:
    def session(name: str, *times: float) -> Session:
        run = np.array([[0, 1]], dtype=np.int64)
        return Session(name, tuple(Request(t, 128, 1, run) for t in times))

    trace = Trace("open", 64, False, (session("a", 5.0, 9.0), session("b", 1.0, 9.0)))
    schedule = build_schedule(trace, ReplayOptions(block_tokens=64), COSTS)
    assert [(t.at_s, t.session) for t in schedule.turns] == [(1.0, 1), (5.0, 0), (9.0, 0), (9.0, 1)]


def test_sessions_and_scale_keep_the_leading_part() -> None:
    assert plan(sessions=8).sessions == 8
    trace = generate_trace(8, 1)
    kept = build_schedule(trace, ReplayOptions(sessions=6, scale=0.5), COSTS)
    assert kept.sessions == 3
    assert len(kept.turns) == sum(len(s.requests) for s in trace.sessions[:3])
    assert build_schedule(trace, ReplayOptions(scale=1e-9), COSTS).sessions == 1


@given(st.integers(1, 2000), st.sampled_from([64, 128, 512]))
def test_the_last_token_is_always_computed(tokens_in: int, block_tokens: int) -> None:
    ids = -(-tokens_in // 64)
    request = Request(0.0, tokens_in, 1, np.array([[0, ids - 1]], dtype=np.int64))
    trace = Trace("one", 64, False, (Session("a", (request,)),))
    (turn,) = build_schedule(trace, ReplayOptions(block_tokens=block_tokens), COSTS).turns
    assert len(turn.blocks) == tokens_in // block_tokens
    assert turn.hit_limit * block_tokens <= tokens_in - 1
    assert turn.hit_limit >= len(turn.blocks) - 1


def test_tenants_are_a_few_large_ones_and_many_small() -> None:
    trace = generate_trace(200, 0)
    one_each = dataclasses.replace(
        trace, sessions=tuple(dataclasses.replace(s, requests=s.requests[:1]) for s in trace.sessions)
    )
    salts = Counter(t.salt for t in build_schedule(one_each, ReplayOptions(tenants=20), COSTS).turns)
    assert 10 <= len(salts) <= 20
    assert salts["tenant-0"] == max(salts.values())


def test_options_are_checked() -> None:
    for wrong in (
        {"engines": 0},
        {"scale": 0.0},
        {"scale": 1.5},
        {"routing": "random"},
        {"pool_bytes": 1},
        {"tenants": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ReplayOptions(**wrong)  # type: ignore[arg-type]


def test_the_generated_trace_has_the_published_statistics() -> None:
    trace = generate_trace(300, 5)
    prompts = [r.tokens_in for s in trace.sessions for r in s.requests]
    turns = [len(s.requests) for s in trace.sessions]
    assert 100_000 < np.mean(prompts) < 140_000
    assert 55 < np.mean(turns) < 80
    assert 35 < np.median(turns) < 55
    assert max(prompts) < 201_000
