"""Peers of bench/run.py: ``DIR/run.sh PEER`` starts one on loopback; a JSON line a case, maybe with its ``version``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, Case
from suite_results import Results

SHARED_MEMORY: Final = Path("/dev/shm")
PEERS: Final = ("mooncake-tcp", "mooncake-shm", "openlake", "redis-unix")
RUN_S: Final = 900
END_S: Final = 60
KILL_S: Final = 10
#: How often it is noted which files in shared memory are the peer's.
LOOK_S: Final = 1.0
#: The quickest call that each peer has for an operation; others that its driver measures are left out.
OPS: Final = {
    "put_batch_from": "store", "put_from": "store", "get_batch_into": "load", "get_into": "load",
    "put_pipeline": "store", "put": "store", "get_mget": "load", "get": "load",
    "batch_is_exist": "lookup", "exist_multi": "lookup", "exist_single": "lookup",
}  # fmt: skip


def peer_round(results: Results, script: Path, peer: str, sizes: list[int], lookups: bool) -> str:
    """One run of a peer's driver: its lines are read, its failures are said; the version that it named, or nothing."""
    if not sizes and not lookups:
        return ""
    env = {**os.environ, "SIZES": ",".join(map(str, sizes)), "BATCH": str(BATCH), "REPS": "1"}
    if not (sizes and lookups):
        env["ONLY"] = "data" if sizes else "meta"
    before, made = set(SHARED_MEMORY.iterdir()), set[Path]()
    pipe = subprocess.PIPE
    command = ["bash", str(script), peer]
    driver = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, errors = _run(driver, made)
    except subprocess.TimeoutExpired:
        print(f"{peer}: no figures within {RUN_S} s", file=sys.stderr)
        return ""
    finally:
        try:
            _end(driver)
        finally:
            for left in made - before - _mapped():  # some peers leave gigabytes behind
                if left.is_file():
                    left.unlink(missing_ok=True)
    lines = printed.splitlines()
    if not read_lines(results, lines):
        print(f"{peer}: no figures (exit {driver.returncode}): {errors.strip()[-300:]}", file=sys.stderr)
    return version_of(lines)


def _run(driver: subprocess.Popen[str], made: set[Path]) -> tuple[str, str]:
    """What it printed on either stream. ``made`` gets what its processes map in shared memory meanwhile."""
    began = time.monotonic()
    while True:
        try:
            return driver.communicate(timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() - began > RUN_S:
                raise
        made |= _mapped(driver.pid)


def _end(driver: subprocess.Popen[str]) -> None:
    """The script ends its servers when it is asked to end; what does not is killed, with all that it started."""
    driver.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        driver.communicate(timeout=END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate(timeout=KILL_S)


def read_lines(results: Results, lines: list[str]) -> int:
    """Add what they say; how many cases that were."""
    seen = 0
    for line in lines:
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        op = OPS.get(row["op"])
        if op is None or "error" in row:
            continue
        if op == "lookup":
            case = Case("lookup", "lookup", row["batch"], note="all hit")
        else:
            case = Case("blocks", op, row["batch"], row["value_size"])
        results.add_medians(row["peer"], case, row["GB_s_med"], row["p50_us_med"], row["p99_us_med"])
        seen += 1
    return seen


def version_of(lines: list[str]) -> str:
    """What the lines say of the peer's version, if they do."""
    rows = (json.loads(line) for line in lines if line.startswith("{"))
    return next((str(row["version"]) for row in rows if "version" in row), "")


def _mapped(session: int | None = None) -> set[Path]:
    """Files in shared memory that some process has mapped, or one of this session."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if session is not None and os.getsid(int(maps.parent.name)) != session:
                continue
            lines = maps.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return found
