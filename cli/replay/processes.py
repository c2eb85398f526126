"""Child processes of a replay: daemons of a pool of our own, and the engine stand-ins.

Each dies with this process (engines by their socket, daemons by PR_SET_PDEATHSIG), is stopped in order
with a deadline, and is known by its pid only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.proto.errors import Unavailable
from kvstrata.proto.logs import get_logger

READY_S = 30.0
STOP_S = 10.0
READY_LINE_BYTES_MAX = 1 << 16
STDERR_TAIL_BYTES = 2_000

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

_log = get_logger(__name__)


def die_with_parent() -> None:
    """For ``preexec_fn``: the kernel ends the child when this process ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass(slots=True)
class Child:
    """One child process; ``name`` is how reports call it."""

    name: str
    process: subprocess.Popen[bytes]
    errors: Path | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def died(self) -> str:
        """How it ended, empty while it lives."""
        code = self.process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"{self.name} (pid {self.pid}) was ended by {signal.Signals(-code).name}"
        return f"{self.name} (pid {self.pid}) exited with code {code}"

    def stop(self, timeout_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL past the deadline; reaps it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _log.warning("child_killed", name=self.name, pid=self.pid, timeout_s=timeout_s)
                self.process.kill()
                self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def last_words(self) -> str:
        """The end of what it wrote to stderr, for an error's text."""
        if self.errors is None or not self.errors.exists():
            return ""
        with self.errors.open("rb") as lines:
            lines.seek(max(0, self.errors.stat().st_size - STDERR_TAIL_BYTES))
            return lines.read().decode(errors="replace").strip()


def command(name: str, *arguments: str, errors: Path) -> Child:
    """Start ``kvstrata <arguments>``: stdout piped, stderr to the file ``errors``, in a session of its own.

    Ctrl-C then reaches this process alone, which stops its children in order.
    """
    with errors.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstrata.cli.app", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return Child(name, process, errors)


def ready_line(child: Child, timeout_s: float = READY_S) -> dict[str, Any]:
    """The JSON ready line of a daemon; raises :class:`Unavailable` with its last words when there is none."""
    assert child.process.stdout is not None
    descriptor = child.process.stdout.fileno()
    until = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n") and len(line) < READY_LINE_BYTES_MAX:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        piece = os.read(descriptor, 4096) if readable else b""
        if not piece:
            why = "is not ready" if not readable else "ended before it was ready"
            raise Unavailable(
                f"{child.name} {why} after {timeout_s:g} s at most: {child.last_words() or 'it said nothing'}"
            )
        line += piece
    try:
        record = json.loads(line.splitlines()[0])
    except ValueError:
        record = None
    if not isinstance(record, dict) or record.get("event") != "ready":
        raise Unavailable(f"{child.name} printed no ready line, but {line[:200]!r}")
    return record


def stop_all(children: Sequence[Child], timeout_s: float = STOP_S) -> None:
    """Stop children that have been told to end: wait for all by one deadline, then each is stopped."""
    until = time.monotonic() + timeout_s
    for child in children:
        try:
            child.process.wait(max(0.05, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("child_late", name=child.name, pid=child.pid)
        child.stop()
