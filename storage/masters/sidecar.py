"""The node's side of its heartbeat process: starts it, leaves the time for it, starts it again if it dies."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.identity import NodeIdentity
from kvstrata.storage.masters.heartbeat import PAGE_BYTES

log = get_logger(__name__)

STOP_S: Final = 1.0
_MONOTONIC_NS: Final = struct.Struct("<Q")


class Sidecar:
    """One heartbeat process for all masters. :meth:`progress` is cheap; :meth:`tend` is for a loop.

    It is told where the ticket keys are, never what they are."""

    def __init__(self, identity: NodeIdentity, masters: tuple[str, ...], ticket_keys: Path | None = None) -> None:
        self.restarts = 0
        self._task = {
            "node_id": identity.node_id,
            "incarnation": identity.incarnation,
            "masters": list(masters),
            "ticket_keys": str(ticket_keys.absolute()) if ticket_keys is not None else None,
        }
        self._fd = os.memfd_create("kvstrata-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, PAGE_BYTES)
        self._page = mmap.mmap(self._fd, PAGE_BYTES)
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False

    def start(self) -> None:
        self.progress()
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstrata.storage.masters.heartbeat", str(self._fd), str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=[self._fd])
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._task) + "\n")
        process.stdin.flush()
        return process

    def progress(self) -> None:
        """The node's main loop has come round."""
        _MONOTONIC_NS.pack_into(self._page, 0, time.monotonic_ns())

    def tend(self) -> None:
        """Start it again if it has died."""
        if self._stopping or self._process is None or self._process.poll() is None:
            return
        log.error("heartbeat process died, starting it again", exit_code=self._process.returncode)
        self.restarts += 1
        self._close_pipe()
        self._process = self._launch()

    def problem(self) -> str:
        """Why masters do not hear of this node, or an empty string."""
        dead = not self._stopping and self._process is not None and self._process.poll() is not None
        return "heartbeat: its process is dead" if dead else ""

    @property
    def pid(self) -> int:
        """Of the running process, 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    def stop(self) -> None:
        """End it quietly: the masters were told that the node leaves. Bounded by ``STOP_S``."""
        self._stopping = True
        try:
            if self._process is not None:
                self._end(self._process)
        finally:
            self._close_pipe()
            self._process = None
            self._page.close()
            os.close(self._fd)

    def _end(self, process: subprocess.Popen[str]) -> None:
        try:
            assert process.stdin is not None
            process.stdin.write("quit\n")
            process.stdin.flush()
            process.wait(STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait(STOP_S)

    def _close_pipe(self) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # what was still to be written is for a process that is dead
