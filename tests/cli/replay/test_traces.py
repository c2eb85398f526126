from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstrata.cli.replay import TraceError
from kvstrata.cli.replay import traces as traces_module
from kvstrata.cli.replay.traces import read_trace

GOOD: dict[str, Any] = {"t": 0.0, "session": "a", "in": 130, "out": 5, "block": 64, "runs": [[3, 4]]}
WriteTrace = Callable[..., Path]


def test_reads_sessions_in_time_order_and_expands_runs(write_trace: WriteTrace) -> None:
    later = {**GOOD, "t": 5.0, "runs": [[3, 4], [9, 9]]}
    trace = read_trace(write_trace([later, {**GOOD, "session": "b"}, GOOD]))
    assert [session.name for session in trace.sessions] == ["a", "b"]
    first, second = trace.sessions[0].requests
    assert (first.at_s, second.at_s, trace.closed_loop, trace.requests) == (0.0, 5.0, False, 3)
    assert second.trace_ids().tolist() == [3, 4, 9]
    assert first.trace_ids().dtype == np.int64


def test_requests_without_a_session_are_sessions_of_their_own(write_trace: WriteTrace) -> None:
    trace = read_trace(write_trace([{**GOOD, "session": None}] * 3))
    assert len(trace.sessions) == 3


def test_think_time_makes_a_trace_closed_loop(write_trace: WriteTrace) -> None:
    trace = read_trace(write_trace([{**GOOD, "think": 3, "api": 1.5}]))
    request = trace.sessions[0].requests[0]
    assert trace.closed_loop
    assert (request.think_s, request.service_s) == (3.0, 1.5)


def test_gzip_is_told_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "trace.data"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read_trace(path).requests == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"in": "many"}, "'in' must be an integer"),
        ({"in": True}, "'in' must be an integer"),
        ({"in": 0}, "'in' is 0"),
        ({"out": -1}, "'out' is -1"),
        ({"block": 1 << 40}, "'block' is"),
        ({"t": float("nan")}, "'t' is nan"),
        ({"t": -1}, "'t' is -1"),
        ({"t": None}, "'t' must be a number"),
        ({"session": 1.5}, "'session' must be"),
        ({"runs": 7}, "'runs' must be a list"),
        ({"runs": [[1]]}, "run 0 of 'runs' must be"),
        ({"runs": [[1, True]]}, "run 0 of 'runs' must be"),
        ({"runs": [[4, 3]]}, "run 0 of 'runs' is [4, 3]"),
        ({"runs": [[0, 10**15]]}, "130 tokens are 2 full blocks"),
        ({"runs": [[0, 0]]}, "'runs' names 1 blocks"),
        ({"block": 32}, "differs from the lines before"),
        ({"think": 1}, "think time on all or no lines"),
        ({"think": -1}, "'think' is -1"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(write_trace: WriteTrace, change: dict[str, Any], says: str) -> None:
    bad = {**GOOD, **change}
    if "block" in change and change["block"] == 32:
        bad["runs"] = [[0, 3]]
    path = write_trace([GOOD, bad])
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("missing", ["t", "session", "in", "out", "block", "runs"])
def test_a_missing_field_is_named(write_trace: WriteTrace, missing: str) -> None:
    with pytest.raises(TraceError, match=f"line 1: '{missing}' is missing"):
        read_trace(write_trace([{name: value for name, value in GOOD.items() if name != missing}]))


@pytest.mark.parametrize("line", ["{", "[1]", "", "\x00\x01", "[" * 100_000])
def test_a_line_that_is_no_object_is_named(write_trace: WriteTrace, line: str) -> None:
    with pytest.raises(TraceError, match=r"line 2: not (a )?JSON"):
        read_trace(write_trace([GOOD, line]))


def test_a_text_trace_is_told_from_a_broken_one(write_trace: WriteTrace) -> None:
    with pytest.raises(TraceError, match="prompt text, not block ids"):
        read_trace(write_trace([{"session": "a", "timestamp": 1, "input": "Hello", "output": "Hi"}]))


def test_an_overlong_line_is_refused_before_it_is_read(
    write_trace: WriteTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces_module, "LINE_BYTES_MAX", 200)
    with pytest.raises(TraceError, match="line 2: longer than 200 bytes"):
        read_trace(write_trace([GOOD, " " * 300]))


def test_a_cut_gzip_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    lines = b"".join(json.dumps({**GOOD, "t": t * 1.37}).encode() + b"\n" for t in range(5000))
    path.write_bytes(gzip.compress(lines)[:-2000])
    with pytest.raises(TraceError, match=r"line \d+: the gzip data ends or breaks here"):
        read_trace(path)


def test_garbage_after_a_gzip_magic_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "garbage.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(range(7, 60)))
    with pytest.raises(TraceError, match=r"garbage\.gz"):
        read_trace(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*No such file"):
        read_trace(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path)
