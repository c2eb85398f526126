"""Peers of bench/run.py: ``DIR/run.sh PEER`` starts one on loopback and prints a JSON line a case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, Case
from suite_results import Results

SHARED_MEMORY: Final = Path("/dev/shm")
PEERS: Final = ("mooncake-tcp", "mooncake-shm", "openlake", "redis-unix")
RUN_S: Final = 900
END_S: Final = 60
#: The quickest call that each peer has for an operation; others that its driver measures are left out.
OPS: Final = {
    "put_batch_from": "store", "put_from": "store", "get_batch_into": "load", "get_into": "load",
    "put_pipeline": "store", "put": "store", "get_mget": "load", "get": "load",
    "batch_is_exist": "lookup", "exist_multi": "lookup", "exist_single": "lookup",
}  # fmt: skip


def peer_round(results: Results, script: Path, peer: str, sizes: list[int], lookups: bool) -> None:
    """One run of a peer's driver; its lines are read, its failures are said."""
    if not sizes and not lookups:
        return
    env = {**os.environ, "SIZES": ",".join(map(str, sizes)), "BATCH": str(BATCH), "REPS": "1"}
    if not (sizes and lookups):
        env["ONLY"] = "data" if sizes else "meta"
    before = set(SHARED_MEMORY.iterdir())
    pipe = subprocess.PIPE
    driver = subprocess.Popen(["bash", str(script), peer], env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        printed, errors = driver.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        print(f"{peer}: no figures within {RUN_S} s", file=sys.stderr)
        return
    finally:
        if driver.poll() is None:  # the script ends its servers when it is asked to end, not when it is killed
            driver.terminate()
            driver.communicate(timeout=END_S)
    for left in set(SHARED_MEMORY.iterdir()) - before - _mapped():  # some peers leave gigabytes behind
        left.unlink(missing_ok=True)
    if not read_lines(results, printed.splitlines()):
        print(f"{peer}: no figures (exit {driver.returncode}): {errors.strip()[-300:]}", file=sys.stderr)


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


def _mapped() -> set[Path]:
    """Files in shared memory that some process has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return found
