"""Recorded text traffic: what an agent really sent, and what came back.

A line is ``{"agent": name, "session": id, "timestamp": microseconds, "input": prompt text, "output": text}``,
gzip or plain. Lines need not be in order: a session's requests are ordered by their timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from kvstrata.cli.replay.traces import REQUESTS_MAX, TraceError, trace_lines


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt. ``think_s``: seconds from the request before it (0 for a session's first)."""

    prompt: str
    output: str
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TextSession:
    """Requests of one agent run, in the order they were sent."""

    name: str
    agent: str
    requests: tuple[TextRequest, ...]


@dataclass(frozen=True, slots=True)
class TextTrace:
    """A whole trace, sessions in order of their first request."""

    name: str
    sessions: tuple[TextSession, ...]

    def chosen(self, agent: str | None, count: int | None) -> TextTrace:
        """The first ``count`` sessions of ``agent``. Raises :class:`TraceError` when there are none."""
        kept = [session for session in self.sessions if agent in (None, session.agent)]
        if not kept:
            agents = ", ".join(sorted({session.agent for session in self.sessions}))
            raise TraceError(f"{self.name} has no session of agent {agent!r}: its agents are {agents}")
        return TextTrace(self.name, tuple(kept[:count]))


class _Line(msgspec.Struct, frozen=True):
    agent: str
    session: str
    timestamp: int
    input: str
    output: str


def is_text_trace(path: Path) -> bool:
    """Whether the file's first line holds text rather than block ids. Raises :class:`TraceError` when unreadable."""
    for line in trace_lines(path):
        try:
            return "input" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            return False
    return False


def read_text_trace(path: Path) -> TextTrace:
    """Read a file of text lines.

    Raises :class:`TraceError` for a file that cannot be opened, is empty, or has a bad line; the text names it.
    """
    sessions: dict[tuple[str, str], list[_Line]] = {}
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(trace_lines(path), start=1):
        if number > REQUESTS_MAX:
            raise TraceError(f"{path}, line {number}: a trace may have at most {REQUESTS_MAX} requests")
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        sessions.setdefault((record.agent, record.session), []).append(record)
    if not sessions:
        raise TraceError(f"{path} has no requests")
    by_start = sorted(sessions.values(), key=lambda lines: min(line.timestamp for line in lines))
    return TextTrace(path.name.removesuffix(".gz").removesuffix(".jsonl"), tuple(_session(lines) for lines in by_start))


def _session(lines: Sequence[_Line]) -> TextSession:
    ordered = sorted(lines, key=lambda line: line.timestamp)
    gaps = [0.0] + [(b.timestamp - a.timestamp) / 1e6 for a, b in pairwise(ordered)]
    requests = tuple(TextRequest(line.input, line.output, gap) for line, gap in zip(ordered, gaps, strict=True))
    return TextSession(ordered[0].session, ordered[0].agent, requests)
