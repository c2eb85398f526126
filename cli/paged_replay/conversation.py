"""A coding agent's conversations as text, for a machine without recorded traffic: seeded, so the same each time.

Sessions share their system prompt; each turn repeats the whole conversation and adds a tool call and what it
returned, as agents do.
"""

from __future__ import annotations

import random

from kvstrata.cli.paged_replay.text_trace import TextRequest, TextSession, TextTrace

_NOUNS = ("parser", "cache", "queue", "worker", "index", "buffer", "token", "reader", "socket", "planner", "ledger")
_VERBS = ("load", "store", "merge", "split", "open", "close", "flush", "trim", "reset", "check", "visit", "bind")
_KINDS = ("int", "str", "bytes", "float", "bool", "list", "dict", "None")


def generate_conversations(
    sessions: int, turns: int, seed: int, *, system_chars: int = 3_000, turn_chars: int = 1_500
) -> TextTrace:
    """``sessions`` conversations of ``turns`` requests; sizes in characters (one byte each), give or take a line."""
    rng = random.Random(seed)
    system = "system: You are a coding agent. Tools and their manuals follow.\n" + _code(rng, system_chars)
    return TextTrace(
        name=f"generated-{sessions}x{turns}",
        sessions=tuple(_session(rng, number, turns, system, turn_chars) for number in range(sessions)),
    )


def _session(rng: random.Random, number: int, turns: int, system: str, turn_chars: int) -> TextSession:
    text = f"{system}user: In task {rng.randrange(10**6)}, {rng.choice(_VERBS)} the {rng.choice(_NOUNS)}.\n"
    requests: list[TextRequest] = []
    for _ in range(turns):
        reply = f"Let me {rng.choice(_VERBS)} {_name(rng)} and see.\n"
        requests.append(TextRequest(text, reply, think_s=rng.uniform(0.5, 5.0) if requests else 0.0))
        listing = _code(rng, round(turn_chars * rng.uniform(0.5, 1.5)))
        text += f"assistant: {reply}tool: $ cat {_name(rng)}.py\n{listing}"
    return TextSession(f"session-{number}", "generated", tuple(requests))


def _code(rng: random.Random, chars: int) -> str:
    lines: list[str] = []
    length = 0
    while length < chars:
        argument = f"{rng.choice(_NOUNS)}: {rng.choice(_KINDS)}"
        lines.append(f"    def {_name(rng)}(self, {argument}) -> {rng.choice(_KINDS)}:\n")
        lines.append(f"        return self.{rng.choice(_NOUNS)}.{_name(rng)}({rng.randrange(1000)})\n")
        length += len(lines[-1]) + len(lines[-2])
    return "".join(lines)


def _name(rng: random.Random) -> str:
    return f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}_{rng.randrange(100)}"
