"""Recorded traffic: read a trace file, say exactly what is wrong with a bad line.

A line is ``{"t": seconds, "session": id or null, "in": prompt tokens, "out": output tokens, "block": tokens
in a trace block, "runs": [[first, last], ...]}``; ``runs`` is a run-length form of the prompt's block ids,
ends included. Traces whose lines carry ``think``
(seconds of user or tool time before a request) were captured a session at a time and are replayed
closed-loop; the others have absolute times and are replayed open-loop.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import ConfigError

#: Bounds, so that a hostile or broken line costs an error and not the machine's memory.
LINE_BYTES_MAX = 1 << 22
PROMPT_TOKENS_MAX = 1 << 24
REQUESTS_MAX = 1 << 22
BLOCK_ID_MAX = (1 << 62) - 1

_T = TypeVar("_T")

_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ConfigError):
    """A trace file that cannot be replayed; the text names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a session. ``runs`` is int64 [k, 2]: first and last trace block id, both included."""

    at_s: float
    tokens_in: int
    tokens_out: int
    runs: npt.NDArray[np.int64]
    think_s: float = 0.0
    service_s: float | None = None

    def trace_ids(self) -> npt.NDArray[np.int64]:
        """The prompt's trace block ids, int64 [ids]; the last may stand for a partial block."""
        if len(self.runs) == 1:
            return np.arange(self.runs[0, 0], self.runs[0, 1] + 1, dtype=np.int64)
        lengths = self.runs[:, 1] - self.runs[:, 0] + 1
        starts = np.repeat(self.runs[:, 0] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
        ids: npt.NDArray[np.int64] = starts + np.arange(len(starts), dtype=np.int64)
        return ids


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user or agent, in time order."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace. ``closed_loop``: times are relative to the session and a request waits for the one before."""

    name: str
    block_tokens: int
    closed_loop: bool
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)


def read_trace(path: Path) -> Trace:
    """Read a ``.jsonl`` or gzip file (told by its content, not its name).

    Raises :class:`TraceError` for a file that cannot be opened, is empty, or has a bad line.
    """
    sessions: dict[str, list[Request]] = {}
    block_tokens = 0
    closed_loop: bool | None = None
    for number, line in enumerate(trace_lines(path), start=1):
        if number > REQUESTS_MAX:
            raise TraceError(f"{path}, line {number}: a trace may have at most {REQUESTS_MAX} requests")
        try:
            parsed = _Line.parse(line)
            block_tokens = _same("block", block_tokens or parsed.block_tokens, parsed.block_tokens)
            closed_loop = _same("think", parsed.has_think if closed_loop is None else closed_loop, parsed.has_think)
        except _BadLine as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        # A request without a session is a session of its own.
        name = parsed.session if parsed.session is not None else f"line {number}"
        sessions.setdefault(name, []).append(parsed.request)
    if not sessions:
        raise TraceError(f"{path}: the file has no requests")
    return Trace(
        name=path.name.removesuffix(".gz").removesuffix(".jsonl"),
        block_tokens=block_tokens,
        closed_loop=bool(closed_loop),
        sessions=tuple(
            # The sort is stable: agents of one session may start together, and stay in the file's order.
            Session(name, tuple(sorted(requests, key=lambda request: request.at_s)))
            for name, requests in sessions.items()
        ),
    )


def trace_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, gzip or plain, each at most ``LINE_BYTES_MAX``. Raises :class:`TraceError`."""
    try:
        with path.open("rb") as raw:
            if raw.peek(2)[:2] != _GZIP_MAGIC:
                yield from _bounded_lines(path, raw)
                return
            with gzip.open(raw) as unpacked:
                yield from _bounded_lines(path, unpacked)
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path}: not a whole gzip file ({error}); get it again") from None
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from None


def _bounded_lines(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(LINE_BYTES_MAX + 1)
        except (EOFError, zlib.error) as error:
            raise TraceError(f"{path}, line {number}: the gzip data ends or breaks here ({error})") from None
        if not line:
            return
        if len(line) > LINE_BYTES_MAX:
            raise TraceError(f"{path}, line {number}: longer than {LINE_BYTES_MAX} bytes")
        yield line


class _BadLine(Exception):
    """What is wrong with a line, without where it is."""


@dataclass(frozen=True, slots=True)
class _Line:
    session: str | None
    block_tokens: int
    has_think: bool
    request: Request

    @classmethod
    def parse(cls, line: bytes) -> _Line:
        record = _record(line)
        block_tokens = _integer(record, "block", 1, PROMPT_TOKENS_MAX)
        tokens_in = _integer(record, "in", 1, PROMPT_TOKENS_MAX)
        think = _seconds(record, "think") if "think" in record else None
        request = Request(
            at_s=_seconds(record, "t"),
            tokens_in=tokens_in,
            tokens_out=_integer(record, "out", 0, PROMPT_TOKENS_MAX),
            runs=_runs(record, tokens_in, block_tokens),
            think_s=think or 0.0,
            service_s=_seconds(record, "api") if "api" in record else None,
        )
        return cls(_session(record), block_tokens, think is not None, request)


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _BadLine("not a JSON object")
    if "input" in record and "runs" not in record:
        raise _BadLine("this trace has prompt text, not block ids; replay its block form (with 'runs') instead")
    return record


def _field(record: dict[str, Any], name: str) -> Any:
    try:
        return record[name]
    except KeyError:
        raise _BadLine(f"'{name}' is missing") from None


def _integer(record: dict[str, Any], name: str, low: int, high: int) -> int:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadLine(f"'{name}' must be an integer, not {value!r:.40}")
    if not low <= value <= high:
        raise _BadLine(f"'{name}' is {value}: it must be between {low} and {high}")
    return value


def _seconds(record: dict[str, Any], name: str) -> float:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadLine(f"'{name}' must be a number of seconds, not {value!r:.40}")
    if not (math.isfinite(value) and value >= 0):
        raise _BadLine(f"'{name}' is {value}: it must be a finite number of seconds, 0 or more")
    return float(value)


def _session(record: dict[str, Any]) -> str | None:
    value = _field(record, "session")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _BadLine(f"'session' must be a string, an integer or null, not {value!r:.40}")
    return str(value)


def _runs(record: dict[str, Any], tokens_in: int, block_tokens: int) -> npt.NDArray[np.int64]:
    value = _field(record, "runs")
    if not isinstance(value, list):
        raise _BadLine("'runs' must be a list of [first, last] pairs")
    ids = 0
    for position, run in enumerate(value):
        if not (isinstance(run, list) and len(run) == 2 and all(type(end) is int for end in run)):
            raise _BadLine(f"run {position} of 'runs' must be a [first, last] pair of integers, not {run!r:.40}")
        first, last = run
        if not 0 <= first <= last <= BLOCK_ID_MAX:
            raise _BadLine(f"run {position} of 'runs' is [{first}, {last}]: it must rise, from 0 to {BLOCK_ID_MAX}")
        ids += last - first + 1
    # The last id may stand for a partial block, or be left out.
    full, partial = divmod(tokens_in, block_tokens)
    if not full <= ids <= full + (partial > 0):
        raise _BadLine(f"'runs' names {ids} blocks, but {tokens_in} tokens are {full} full blocks of {block_tokens}")
    return np.array(value, dtype=np.int64).reshape(-1, 2)


def _same(name: str, expected: _T, found: _T) -> _T:
    if expected != found:
        raise _BadLine(
            f"'{name}' differs from the lines before: a trace has one block size, and think time on all or no lines"
        )
    return found
