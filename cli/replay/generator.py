"""A synthetic coding-agent trace, for a checkout without trace files.

Drawn to match what is published about recorded coding-agent traffic (callanjfox/kv-cache-tester): prompts of
120 K tokens on average, 65 turns a session (half have more than 42), a few hundred to a few thousand tokens
added a turn, 9 s a request, think time of seconds with a long tail, tool and system prompts shared between
sessions, and contexts that are compacted when they are full. An infinite cache serves about 96 % of it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np

from kvstrata.cli.replay.traces import Request, Session, Trace

BLOCK_TOKENS = 64
#: System prompts (agent versions with their tools) that sessions share, by a Zipf law.
SYSTEM_PROMPTS = 12
CONTEXT_TOKENS_MAX = 200_000
TURNS_MAX = 600


def generate_trace(sessions: int, seed: int) -> Trace:
    """A closed-loop trace of ``sessions`` sessions, the same for the same seed."""
    source = _Source(random.Random(seed))
    return Trace(
        name=f"generated-{sessions}",
        block_tokens=BLOCK_TOKENS,
        closed_loop=True,
        sessions=tuple(Session(f"session-{number}", source.session()) for number in range(sessions)),
    )


@dataclass(slots=True)
class _Source:
    """Draws sessions, and hands out block ids that no other prefix has."""

    rng: random.Random
    next_id: int = 0
    systems: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [self.fresh(_blocks(self.rng.uniform(9_000, 20_000))) for _ in range(SYSTEM_PROMPTS)]

    def fresh(self, blocks: int) -> list[list[int]]:
        """One run of ids never used before."""
        first, self.next_id = self.next_id, self.next_id + blocks
        return [[first, self.next_id - 1]]

    def session(self) -> tuple[Request, ...]:
        weights = [1 / (number + 1) for number in range(SYSTEM_PROMPTS)]
        system = self.rng.choices(self.systems, weights)[0]
        turns = min(TURNS_MAX, max(3, round(self.log_normal(median=44, mean=66))))
        # Half of the sessions are resumed: they start with a long history in the first prompt.
        history = self.rng.uniform(20_000, 150_000) if self.rng.random() < 0.55 else self.log_normal(9_000, 16_000)
        runs = system + self.fresh(_blocks(history))
        at_s, requests = 0.0, []
        for turn in range(turns):
            think_s = self.think_s() if turn else 0.0
            service_s = min(120.0, self.log_normal(median=7.0, mean=9.0))
            at_s += think_s
            requests.append(self.request(at_s, runs, think_s, service_s))
            at_s += service_s
            runs = self.grown(system, runs)
        return tuple(requests)

    def request(self, at_s: float, runs: list[list[int]], think_s: float, service_s: float) -> Request:
        tokens_in = _ids(runs) * BLOCK_TOKENS + self.rng.randrange(BLOCK_TOKENS)
        tokens_out = max(1, round(self.log_normal(median=250, mean=440)))
        return Request(at_s, tokens_in, tokens_out, np.array(runs, dtype=np.int64), think_s, service_s)

    def grown(self, system: list[list[int]], runs: list[list[int]]) -> list[list[int]]:
        """The next turn's context: the last one and what the turn added, or a summary where that is too long."""
        added = self.fresh(_blocks(self.log_normal(median=850, mean=2_600)))
        if (_ids(runs) + _ids(added)) * BLOCK_TOKENS > CONTEXT_TOKENS_MAX:
            return system + self.fresh(_blocks(self.rng.uniform(20_000, 60_000)))
        if runs[-1][1] + 1 == added[0][0]:
            return [*runs[:-1], [runs[-1][0], added[-1][1]]]
        return runs + added

    def think_s(self) -> float:
        return min(20_000.0, self.log_normal(median=9.0, mean=60.0))

    def log_normal(self, median: float, mean: float) -> float:
        """A log-normal draw with this median and mean."""
        return self.rng.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))


def _blocks(tokens: float) -> int:
    return max(1, round(tokens / BLOCK_TOKENS))


def _ids(runs: list[list[int]]) -> int:
    return sum(last - first + 1 for first, last in runs)
