"""On what a run of bench/run.py was: the machine, how busy it was, and the versions of all that took part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

#: More than this much of each core is wanted by others: the figures are not worth keeping.
BUSY: Final = 0.5
OURS: Final = ("kvstrata", "numpy", "protobuf", "xxhash")


def machine() -> dict[str, Any]:
    """What it is, for the JSON and the page."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def busy() -> str:
    """Why figures of now are worth little; empty on a quiet machine."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY * cpus:
        return ""
    return f"other processes want this machine's {cpus} cores (load {load:.1f}): its figures are not worth keeping"


def versions() -> dict[str, str]:
    """By name, of what is measured here; peers' drivers say their own."""
    found = {name: importlib.metadata.version(name) for name in OURS}
    found["commit"] = _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    return found


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _field(path: Path, name: str) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
