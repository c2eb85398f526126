from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstrata.cli.replay.processes import Child, command, ready_line, stop_all
from kvstrata.proto.errors import Unavailable

Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run a line of Python as a child with piped stdout."""
    children: list[Child] = []

    def run(code: str) -> Child:
        errors = tmp_path / f"{len(children)}.log"
        with errors.open("wb") as stream:
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stream)
        children.append(Child(f"child {len(children)}", process, errors))
        return children[-1]

    yield run
    for child in children:
        child.stop(0.5)
        assert child.process.returncode is not None


SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); {SLEEP}"


def test_a_ready_line_is_parsed_while_the_child_runs_on(start: Start) -> None:
    child = start(f'print(\'{{"event": "ready", "channel": "a:1"}}\', flush=True); {SLEEP}')
    assert ready_line(child)["channel"] == "a:1"
    assert child.died() == ""


def test_a_child_that_ends_before_it_is_ready_says_why(start: Start) -> None:
    child = start("import sys; sys.stderr.write('port 7 is in use'); sys.exit(2)")
    with pytest.raises(Unavailable, match=r"child 0 ended before it was ready.*port 7 is in use"):
        ready_line(child)


def test_a_silent_child_is_given_up_at_the_deadline(start: Start) -> None:
    with pytest.raises(Unavailable, match=r"child 0 is not ready after 0\.2 s"):
        ready_line(start(SLEEP), timeout_s=0.2)


@pytest.mark.parametrize("line", ["hello", "[]", '{\\"event\\": \\"other\\"}'])
def test_another_first_line_is_refused(start: Start, line: str) -> None:
    with pytest.raises(Unavailable, match="printed no ready line"):
        ready_line(start(f'print("{line}", flush=True); {SLEEP}'))


def test_deaths_are_told_by_signal_and_code(start: Start) -> None:
    killed, failed = start(SLEEP), start("raise SystemExit(3)")
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(5)
    failed.process.wait(5)
    assert killed.died() == f"child 0 (pid {killed.pid}) was ended by SIGKILL"
    assert failed.died() == f"child 1 (pid {failed.pid}) exited with code 3"


def test_a_child_that_ignores_sigterm_is_killed(start: Start) -> None:
    child = start(DEAF)
    assert child.process.stdout is not None
    child.process.stdout.readline()
    child.stop(0.2)
    assert "SIGKILL" in child.died()


def test_all_are_stopped_by_one_deadline(start: Start) -> None:
    children = [start(SLEEP), start(SLEEP)]
    stop_all(children, 0.1)
    assert all("SIGTERM" in child.died() for child in children)


def test_a_daemons_error_is_in_the_text(tmp_path: Path) -> None:
    child = command("master", "master", "--listen", "nonsense", errors=tmp_path / "log")
    with pytest.raises(Unavailable, match="nonsense"):
        ready_line(child)
    child.stop()
