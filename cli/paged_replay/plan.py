"""From text to turns: which tokens reach which engine, the same in every case and whatever the timing.

Round-robin sends a session's successive turns round all engines, in an order of the session's own (two sessions in
one order would meet at the same engine turn after turn, and the others stand idle); sticky gives all of them to one.
Neither depends on the order in which requests happen to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstrata.cli.paged_replay.messages import TOKEN_DTYPE, Tokens
from kvstrata.cli.paged_replay.options import PagedOptions
from kvstrata.cli.paged_replay.text_trace import TextTrace
from kvstrata.cli.replay.traces import TraceError

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request, placed. ``tokens`` is the prompt; ``output_tokens`` are generated."""

    index: int
    session: int
    engine: int
    tokens: Tokens
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Sessions of turns, in the order they start. ``skipped`` prompts were empty or longer than allowed."""

    trace_name: str
    sessions: tuple[tuple[Turn, ...], ...]
    skipped: int

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, session after session; a turn's place is its index."""
        return tuple(turn for session in self.sessions for turn in session)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, output included."""
        return max(len(turn.tokens) + turn.output_tokens for turn in self.turns)


def build_plan(trace: TextTrace, options: PagedOptions, encode: Encode) -> Plan:
    """Tokenise and place every request. Raises :class:`TraceError` when none is left."""
    sessions: list[tuple[Turn, ...]] = []
    index = skipped = 0
    for text_session in trace.sessions:
        number = len(sessions)
        order = _order(options, number)
        turns: list[Turn] = []
        for request in text_session.requests:
            tokens = np.array(encode(request.prompt), dtype=TOKEN_DTYPE)
            if not 1 <= len(tokens) <= options.max_prompt_tokens:
                skipped += 1
                continue
            turns.append(
                Turn(
                    index=index,
                    session=number,
                    engine=order[len(turns) % len(order)],
                    tokens=tokens,
                    output_tokens=max(1, min(options.output_tokens, len(encode(request.output)))),
                    think_s=min(request.think_s, options.think_cap_s) if turns else 0.0,
                )
            )
            index += 1
        if turns:
            sessions.append(tuple(turns))
    if not sessions:
        raise TraceError(
            f"all {skipped} prompts of {trace.name} are empty or have more than {options.max_prompt_tokens} tokens"
        )
    return Plan(trace.name, tuple(sessions), skipped)


def _order(options: PagedOptions, session: int) -> list[int]:
    """The engines that the session goes round."""
    if options.routing == "sticky":
        return [session % options.engines]
    order: list[int] = np.random.default_rng((options.seed, session)).permutation(options.engines).tolist()
    return order
