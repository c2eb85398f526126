"""Ours, the rooflines and the peers, in turns, in one run: ``python bench/run.py`` or ``./dev bench``.

Every round runs every system once, so that a machine whose speed drifts slows all of them; the table
quotes medians over rounds and the ratios between them. Peers are optional: ``--peers DIR`` names a folder
with a ``run.sh PEER`` that prints one JSON line a case (see docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from cases import BATCH, LOOKUPS, SIZES, Round, summarise
from rooflines import memcpy_round, socket_round

SHARED_MEMORY = Path("/dev/shm")
Key = tuple[str, str, int, int]
PEER_OPS = {
    "put_batch_from": "store", "put_from": "store", "get_batch_into": "load", "get_into": "load",
    "put_pipeline": "store", "put": "store", "get_mget": "load", "get": "load",
    "batch_is_exist": "lookup", "exist_multi": "lookup", "exist_single": "lookup",
}  # fmt: skip


class Results:
    """Rounds by case, and peers' own median rows."""

    def __init__(self) -> None:
        self.rounds: dict[Key, list[Round]] = defaultdict(list)
        self.peer_rows: dict[Key, list[dict[str, float]]] = defaultdict(list)

    def add(self, system: str, op: str, block_bytes: int, batch: int, one: Round) -> None:
        self.rounds[(system, op, block_bytes, batch)].append(one)

    def rows(self) -> list[dict[str, object]]:
        ours = [summarise(*key, rounds).as_dict() for key, rounds in self.rounds.items()]
        return ours + [self._peer_row(key, rows) for key, rows in self.peer_rows.items()]

    @staticmethod
    def _peer_row(key: Key, rows: list[dict[str, float]]) -> dict[str, object]:
        system, op, block_bytes, batch = key
        middle = {
            name: statistics.median(row[name] for row in rows) for name in ("GB_s_med", "p50_us_med", "p99_us_med")
        }
        return {
            "system": system, "op": op, "block_bytes": block_bytes, "batch": batch,
            "gb_s": middle["GB_s_med"], "p50_us": middle["p50_us_med"], "p99_us": middle["p99_us_med"],
            "cpu_s_per_gib": None, "rounds": len(rows),
        }  # fmt: skip


def our_round(results: Results, master: str, sizes: list[int], lookups: list[int]) -> None:
    """kvstrata over each transport, and from memory the node can map."""
    from kvstrata_bench import Bench

    for system, transport, memory in (
        ("kvstrata-shm", "shm", "numpy"),
        ("kvstrata-shm-alloc", "shm", "shared"),
        ("kvstrata-tcp", "tcp", "numpy"),
    ):
        bench = Bench(master, transport, memory)
        for size in sizes:
            for batch in (1, BATCH):
                stored, loaded = bench.data_rounds(size, batch)
                results.add(system, "store", size, batch, stored)
                results.add(system, "load", size, batch, loaded)
        if transport == "shm" and memory == "numpy":
            for count in lookups:
                results.add("kvstrata", "lookup", 0, count, bench.lookup_round(count))
        bench.close()


def roofline_round(results: Results, sizes: list[int]) -> None:
    for size in sizes:
        for batch in (1, BATCH):
            results.add("memcpy", "load", size, batch, memcpy_round(size, batch, hashed=False))
            results.add("memcpy+xxh3", "store", size, batch, memcpy_round(size, batch, hashed=True))
            for op in ("load", "store"):
                results.add("socket", op, size, batch, socket_round(size, batch, op, hashed=False))
                results.add("socket+xxh3", op, size, batch, socket_round(size, batch, op, hashed=True))


def peer_round(results: Results, script: Path, peer: str, sizes: list[int]) -> None:
    """One run of a peer's driver; its lines are read, its failures are said."""
    env = {**os.environ, "SIZES": ",".join(map(str, sizes)), "BATCH": str(BATCH), "REPS": "3"}
    before = set(SHARED_MEMORY.iterdir())
    done = subprocess.run(
        ["bash", str(script), peer], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    for left in set(SHARED_MEMORY.iterdir()) - before:  # some peers leave gigabytes behind
        left.unlink(missing_ok=True)
    seen = 0
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        row = json.loads(line)
        op = PEER_OPS.get(row["op"])
        if op and "error" not in row:
            key = (row["peer"], op, row["value_size"], row["batch"])
            if op != "lookup" or row["op"] != "batch_get_replica_desc":
                results.peer_rows[key].append(row)
                seen += 1
    if not seen:
        print(f"{peer}: no figures (exit {done.returncode}): {done.stderr.strip()[-300:]}", file=sys.stderr)


def say(rows: list[dict[str, object]]) -> None:
    """One table a case: systems side by side."""
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "block", "batch", "system", "GB/s", "p50 us", "p99 us", "CPU s/GiB", "rounds")
    order = sorted(
        rows, key=lambda r: (str(r["op"]), int(str(r["block_bytes"])), int(str(r["batch"])), str(r["system"]))
    )
    for row in order:
        names = ("op", "block_bytes", "batch", "system", "gb_s", "p50_us", "p99_us", "cpu_s_per_gib", "rounds")
        table.add_row(*(str(row[name]) for name in names))
    Console(width=130).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="block bytes, comma-separated")
    parser.add_argument("--lookups", default=",".join(map(str, LOOKUPS)))
    parser.add_argument("--peers", type=Path, help="folder with run.sh and drivers of other systems")
    parser.add_argument("--peer", action="append", default=[], help="a peer to run (may be repeated)")
    parser.add_argument("--dram", default="6GiB")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "latest.json")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    lookups = [int(count) for count in options.lookups.split(",") if count]
    results = Results()
    steps: list[tuple[str, Callable[[], None]]] = [("rooflines", lambda: roofline_round(results, sizes))]
    from kvstrata_bench import pool

    def ours() -> None:
        with pool(options.dram) as master:
            our_round(results, master, sizes, lookups)

    steps.append(("kvstrata", ours))
    for peer in options.peer:
        script = options.peers / "run.sh"
        steps.append((peer, lambda peer=peer, script=script: peer_round(results, script, peer, sizes)))  # type: ignore[misc]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.platform(), "python": platform.python_version()}
    for number in range(options.rounds):
        for name, step in steps:
            start = time.monotonic()
            step()
            print(f"round {number + 1}/{options.rounds} {name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
        rows = results.rows()
        options.out.write_text(json.dumps({"machine": machine, "rounds": number + 1, "rows": rows}, indent=1))
    say(results.rows())
    print(f"written: {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
