"""The end of vLLM's processes, at once and with all that they leave behind."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = "/dev/shm/"


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill it and the processes that it started. What they share by a name is removed: killed, they cannot do it."""
    shared: set[str] = set()
    if process.poll() is None:
        own = psutil.Process(process.pid)
        for each in [own, *own.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                shared |= {entry.path for entry in each.memory_maps() if entry.path.startswith(SHARED)}
                each.kill()
    process.wait(10)
    for name in shared:
        Path(name).unlink(missing_ok=True)
