"""Logs: the host's own logging until configured, lines on stderr then, and never a flood."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto import logs


@pytest.fixture(autouse=True)
def fresh_output(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An output of this test's own: nothing configured, nothing suppressed."""
    monkeypatch.setattr(logs, "_output", logs._Output())
    yield


def passed(limiter: logs.RateLimiter, event: str = "e") -> dict[str, object] | None:
    try:
        return dict(limiter(None, "info", {"logger": "l", "event": event}))
    except structlog.DropEvent:
        return None


def test_a_burst_passes_then_one_a_second_which_says_how_many_were_held_back() -> None:
    now = [0.0]
    limiter = logs.RateLimiter(lambda: now[0])
    assert sum(passed(limiter) is not None for _ in range(100)) == logs.BURST
    now[0] += logs.EVERY_S
    assert passed(limiter) == {"logger": "l", "event": "e", "suppressed": 100 - logs.BURST}
    assert passed(limiter) is None
    assert passed(limiter, "another") == {"logger": "l", "event": "another"}


@given(st.lists(st.floats(0, 5), max_size=200))
def test_every_event_passes_or_is_counted_and_the_rate_is_bounded(pauses: list[float]) -> None:
    now = [0.0]
    limiter = logs.RateLimiter(lambda: now[0])
    shown = counted = 0
    for pause in pauses:
        now[0] += pause
        if event := passed(limiter):
            shown += 1
            counted += int(str(event.get("suppressed", 0)))
    now[0] += 10 * logs.EVERY_S
    last = passed(limiter) or {}
    counted += int(str(last.get("suppressed", 0)))
    assert shown + counted == len(pauses)
    assert shown <= logs.BURST + sum(pauses) / logs.EVERY_S + 1


def test_a_library_leaves_its_events_to_the_host(caplog: pytest.LogCaptureFixture) -> None:
    log = logs.get_logger("kvstrata.somewhere")
    with caplog.at_level(logging.WARNING, "kvstrata"):
        log.info("too quiet")
        log.warning("heard", node="n1")
    assert [(r.name, r.getMessage()) for r in caplog.records] == [("kvstrata.somewhere", "event='heard' node='n1'")]


def test_a_daemon_writes_json_lines_from_its_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    early = logs.get_logger("kvstrata.early")
    logs.configure("json", "warning")
    early.info("too quiet")
    try:
        raise ValueError("boom")
    except ValueError:
        early.error("failed", exc_info=True, path=logs)
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["logger"]) == ("failed", "error", "kvstrata.early")
    assert "ValueError: boom" in event["exception"] and event["timestamp"].endswith("Z")


def test_text_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")
    logs.get_logger("kvstrata.x").info("served", blocks=3)
    assert "served" in (said := capsys.readouterr().err) and "blocks=3" in said and not said.startswith("{")


def test_a_stderr_that_is_gone_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stderr", Gone())
    logs.configure("json")
    logs.get_logger("kvstrata.x").error("nobody hears this")
