"""A daemon's log lines in another process's stderr: whole, once, with who says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstrata.cli.relay import Relay, attributed


def test_a_line_is_copied_once_and_when_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node-0.log"
    relay = Relay("node-0", file, as_json=False)
    relay.poll()
    with file.open("a") as log:
        for piece, copied in (("one\nt", "[node-0] one\n"), ("wo", ""), ("\n", "[node-0] two\n"), ("end", "")):
            log.write(piece)
            log.flush()
            relay.poll()
            assert capsys.readouterr().err == copied
    relay.poll(last=True)
    assert capsys.readouterr().err == "[node-0] end\n"


def test_lines_of_an_earlier_run_are_kept_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "master.log"
    file.write_text("before\n")
    relay = Relay("master", file, as_json=False)
    file.write_text("now\n")
    relay.poll()
    assert capsys.readouterr().err == "[master] now\n"
    assert (tmp_path / "master.log.1").read_text() == "before\n"


def test_events_are_written_for_the_reader_they_are_for() -> None:
    line = json.dumps({"event": "attached", "level": "info", "timestamp": "T", "logger": "x", "session": 4})
    assert attributed("node-1", line, as_json=False) == "[node-1] T info    attached  session=4"
    assert json.loads(attributed("node-1", line, as_json=True)) == {"process": "node-1", **json.loads(line)}
    assert json.loads(attributed("node-1", "oops", as_json=True)) == {"process": "node-1", "event": "oops"}
    assert attributed("node-1", "[1]", as_json=False) == "[node-1] [1]"
