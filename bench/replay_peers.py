"""Recorded traffic on ours and on Mooncake Store in turns: the same engines, private caches, trace and pool size.

``python bench/replay_peers.py TRACE... [--mooncake SITE_PACKAGES]``: each trace is replayed as ``kvstrata replay`` does
it, on a pool of ours through shared memory, and then by the same engine stand-ins on Mooncake's. Hit rates are of
tokens. A request's time to its first token is modelled from what it hit, with the same costs for all; only its lookup
and load are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from mooncake_servers import MooncakeServers
from replay_mooncake import SHM
from suite_machine import busy, machine, versions

from kvstrata.cli.replay.coordinator import ENGINE_COMMAND, Coordinator
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.pool import OwnPool
from kvstrata.cli.replay.replay import console_progress, load_trace
from kvstrata.cli.replay.result import ReplayResult, assemble
from kvstrata.cli.replay.schedule import Schedule, build_schedule

SYSTEMS: Final = ("kvstrata", "mooncake-shm", "mooncake-tcp")
HEAD: Final = (
    "trace", "pool", "hit rate", "private caches alone", "of an endless pool", "TTFT p50 / mean, s",
    "private caches alone, s", "lookup + load p50 / p99, ms", "loads, GB/s", "stores, GB/s",
    "wrong bytes", "not served",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A pool that engines are to use: its address, what starts an engine there, and the blocks that it holds."""

    masters: str
    engine: tuple[str, ...]
    blocks: int
    losses: Callable[[], list[str]]


@contextmanager
def place(system: str, options: ReplayOptions, packages: Path) -> Iterator[Place]:
    """Start it and stop it: each has the bytes that ours has for the same blocks."""
    if system == "kvstrata":
        ours = OwnPool.of(options)
        try:
            yield Place(ours.masters, ENGINE_COMMAND, ours.blocks(options.block_bytes), ours.losses)
        finally:
            ours.close()
        return
    script = str(Path(__file__).with_name("replay_mooncake.py"))
    with MooncakeServers(packages, options.pool_blocks * options.block_bytes) as servers:
        address = f"{SHM}{servers.holder}" if system == "mooncake-shm" else servers.master
        engine = (sys.executable, script, str(packages))
        yield Place(address, engine, options.pool_blocks, servers.losses)


def replayed(system: str, schedule: Schedule, options: ReplayOptions, packages: Path) -> ReplayResult:
    """One replay of the whole schedule."""
    costs, group = CostModel(), f"kvstrata.replay/{uuid.uuid4().hex}"
    with place(system, options, packages) as pool, console_progress() as progress:
        coordinator = Coordinator(schedule, options, pool.masters, group, pool.engine)
        try:
            measured = coordinator.run(progress)
        finally:
            coordinator.close()
        losses = pool.losses()
    return assemble(options, costs, schedule, pool.blocks, measured, losses)


def row(system: str, result: ReplayResult) -> dict[str, Any]:
    """What is said of one replay; rates 0 to 1, seconds, bytes."""
    cases, traffic = result.cases, result.traffic
    calls_ms = 1e3 * result.pool_calls_s
    return {
        "trace": result.schedule.trace_name,
        "requests": len(result.schedule.turns),
        "sessions": result.schedule.sessions,
        "prompt_tokens": result.schedule.tokens_in,
        "pool": system,
        "pool_blocks": result.pool_blocks,
        "hit_rate": cases.pool.hits.rate(),
        "private_rate": cases.private.hits.rate(),
        "ceiling_rate": cases.ceiling.hits.rate(),
        "ttft_p50_s": float(np.median(result.measured_ttft_s)),
        "ttft_mean_s": float(np.mean(result.measured_ttft_s)),
        "private_ttft_p50_s": float(np.median(cases.private.latencies.ttft_s)),
        "private_ttft_mean_s": float(np.mean(cases.private.latencies.ttft_s)),
        "calls_p50_ms": float(np.percentile(calls_ms, 50)),
        "calls_p99_ms": float(np.percentile(calls_ms, 99)),
        "load_gb_s": traffic.load_gb_s,
        "store_gb_s": traffic.store_gb_s,
        "seconds": traffic.seconds,
        "wrong_bytes": traffic.wrong_bytes,
        "failed_requests": traffic.failed_requests,
        "reasons": traffic.reasons,
        "faults": list(result.faults),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for one in rows:
        missed = sum(one["reasons"].values())
        cells = (
            f"{one['trace']}, {one['requests']:,} requests",
            one["pool"],
            f"{one['hit_rate']:.1%}",
            f"{one['private_rate']:.1%}",
            f"{one['ceiling_rate']:.1%}",
            f"{one['ttft_p50_s']:.2f} / {one['ttft_mean_s']:.2f}",
            f"{one['private_ttft_p50_s']:.2f} / {one['private_ttft_mean_s']:.2f}",
            f"{one['calls_p50_ms']:.2f} / {one['calls_p99_ms']:.2f}",
            f"{one['load_gb_s']:.2f}",
            f"{one['store_gb_s']:.2f}",
            f"{one['wrong_bytes']}",
            f"{missed:,}" + (f", {one['failed_requests']} failed" if one["failed_requests"] else ""),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="files of recorded traffic")
    parser.add_argument(
        "--mooncake", type=Path, help="site-packages of an environment with Mooncake; without, ours alone"
    )
    parser.add_argument("--pool", action="append", choices=SYSTEMS, help="only these pools (repeat it)")
    parser.add_argument("--sessions", type=int, help="the first so many sessions of each trace")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--private-tokens", type=int, default=500_000, help="in each engine's own cache")
    parser.add_argument("--pool-tokens", type=int, default=4_000_000, help="that the pool has room for")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--bytes-per-token", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there as well")
    asked = parser.parse_args()
    systems = asked.pool or list(SYSTEMS if asked.mooncake else SYSTEMS[:1])
    if asked.mooncake is None and systems != ["kvstrata"]:
        parser.error("--pool mooncake-... needs --mooncake SITE_PACKAGES")
    if warning := busy():
        print(warning, file=sys.stderr)
    rows = []
    for turn, trace in enumerate(asked.traces):
        options = ReplayOptions(
            trace=trace,
            engines=asked.engines,
            private_tokens=asked.private_tokens,
            pool_bytes=asked.pool_tokens * asked.bytes_per_token,
            block_tokens=asked.block_tokens,
            bytes_per_token=asked.bytes_per_token,
            sessions=asked.sessions,
            seed=asked.seed,
        )
        schedule = build_schedule(load_trace(options), options, CostModel())
        for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
            result = replayed(system, schedule, options, asked.mooncake or Path())
            rows.append(row(system, result))
            print(
                f"{trace.name} on {system}: hits {rows[-1]['hit_rate']:.1%}, {result.traffic.seconds:.0f} s",
                file=sys.stderr,
            )
            for fault in (*result.faults, *result.errors[:1]):
                print(f"  {fault}", file=sys.stderr)
    print(table(sorted(rows, key=lambda one: (one["trace"], SYSTEMS.index(one["pool"])))))
    if asked.json is not None:
        told = {"machine": machine(), "versions": versions(), "options": {k: str(v) for k, v in vars(asked).items()}}
        asked.json.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    return 1 if any(one["wrong_bytes"] or one["failed_requests"] for one in rows if one["pool"] == "kvstrata") else 0


if __name__ == "__main__":
    sys.exit(main())
