"""``kvstrata top``: frames of documents, and the command against a real master and a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from kvstrata.cli.top_screen import frame, safe, sparkline
from kvstrata.master.daemon import Master, MasterConfig
from tests import command_line
from tests.e2e import status_documents as documents

ANSWER_S = 30.0


def drawn(document: dict[str, Any], height: int | None = None, width: int = 150, **more: Any) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(frame(document, height, **more))
    return out.getvalue().splitlines()


def test_what_matters_is_on_top() -> None:
    lines = drawn(documents.trouble(), 40)
    assert lines[0].startswith("IN TROUBLE  prod-eu-1  10.0.0.2:7400 leads, epoch 7")
    top = "\n".join(lines[:14])
    for needed in (
        "node node-05 is missing",
        "nodes 6 of 8 active",
        "hit rate 52% this minute, 83% this hour, asked here",
        "its node was lost 30%",
    ):
        assert needed in top
    body = "\n".join(lines)
    assert "search         at its limit" in body and "node-04  active, draining" in body and "(3 times)" in body


@pytest.mark.parametrize("height", [24, 40, 60])
@pytest.mark.parametrize("which", ["healthy", "empty", "trouble", "standby", "hostile"])
def test_a_frame_keeps_to_its_terminal(which: str, height: int) -> None:
    document = getattr(documents, which)()
    for width in (60, 100, 200):
        lines = drawn(document, height, width)
        assert all(len(line) <= width for line in lines)
        assert len(lines) <= max(height, 26), (width, len(lines))


def test_without_a_height_all_of_it_is_there() -> None:
    body = "\n".join(drawn(documents.hostile(40, 50)))
    assert "nodes (" not in body and "39 " in body


def test_what_is_stale_says_since_when() -> None:
    lines = drawn(documents.healthy(), 40, problem="connection refused", stale_s=75.0)
    assert lines[1] == "STALE for 75 s: connection refused"


@pytest.mark.parametrize("name", documents.HOSTILE)
def test_a_terminal_gets_no_control_characters(name: str) -> None:
    shown = safe(name)
    assert shown.isprintable() and len(shown) <= 40 and "\u202e" not in shown
    body = "\n".join(drawn(documents.hostile(), 60))
    assert "\x1b" not in body and "\x07" not in body and "\u202e" not in body


def test_markup_in_names_is_text() -> None:
    document = documents.healthy()
    document["nodes"][0]["node_id"] = "[bold red]x[/]"
    assert any("[bold red]x[/]" in line for line in drawn(document, 40))


def test_sparklines() -> None:
    assert sparkline([0.0, None, 0.5, 1.0], 1.0) == "▁ ▄█" and sparkline([], 1.0) == ""


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    with Master(MasterConfig("127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0", None, seed=1)) as running:
        yield running


def command(master: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "kvstrata.cli.app", "top", "--master", master, *options]


def run(master: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(master, *options), capture_output=True, text=True, timeout=ANSWER_S, check=False)


def test_into_a_pipe_it_is_one_frame(master: Master) -> None:
    done = run(master.endpoints.channel)
    assert done.returncode == 0 and done.stdout.startswith("NEEDS ATTENTION") and "\x1b" not in done.stdout
    assert "no node has attached" in done.stdout


def test_as_json_it_is_the_document(master: Master) -> None:
    document = json.loads(command_line.run("top", "--master", master.endpoints.channel, "--json").stdout)
    assert document["schema"] == 1 and document["cluster_id"] == master.hub.cluster_id


def test_nobody_there() -> None:
    done = command_line.run("top", "--master", "127.0.0.1:1", "--once")
    assert done.returncode == 3 and "no master at 127.0.0.1:1" in done.stderr


def test_in_a_terminal_it_is_live_until_q(master: Master) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        command(master.endpoints.channel, "--seconds", "0.5"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    try:
        seen, deadline = b"", time.monotonic() + ANSWER_S
        while seen.count(b"NEEDS ATTENTION") < 3:  # a frame, and others after it
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 65536)
        assert b"\x1b[?1049h" in seen  # on a screen of its own
        os.write(ours, b"q")
        while b"\x1b[?1049l" not in seen:
            assert select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 65536)
        assert process.wait(ANSWER_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
