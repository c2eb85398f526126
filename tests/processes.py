"""Processes that tests have started, and whether they are still there."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
