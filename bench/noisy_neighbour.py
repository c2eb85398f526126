"""A noisy neighbour on a real pool: ``python bench/noisy_neighbour.py --trace FILE [--json]``.

The trace's sessions belong to Zipf tenants, each with a quota of its own, and are replayed twice on fresh
pools of real processes: once alone, once while one more tenant stores 100 times its limit, as fast as a
process of its own can. Shown: each tenant's hit rate with and without the neighbour, and the neighbour's
usage, sampled from the nodes while it floods. Exits 1 when a hit rate moved by more than a point, or a
sample was above the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.cli.replay.blocks import HASH_BYTES
from kvstrata.cli.replay.coordinator import SETTLE_S
from kvstrata.cli.replay.costs import CostModel
from kvstrata.cli.replay.engine import Engine
from kvstrata.cli.replay.messages import Setup, Work
from kvstrata.cli.replay.options import ReplayOptions
from kvstrata.cli.replay.pool import OwnPool
from kvstrata.cli.replay.replay import load_trace
from kvstrata.cli.replay.schedule import Schedule, build_schedule
from kvstrata.client import Client
from kvstrata.client.admin import AdminClient
from kvstrata.proto import control_pb2 as control
from kvstrata.storage.slab import slot_size

NEIGHBOUR = "noisy-neighbour"
#: Blocks of one store of the neighbour.
FLOOD_BLOCKS = 64
POINTS_MAX = 1.0
SAMPLE_S = 0.02


@dataclass(slots=True)
class Run:
    """Blocks asked and hit by tenant; the neighbour's bytes in each sample, all nodes together."""

    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    hit: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    samples: list[int] = field(default_factory=list)
    flooded_bytes: int = 0
    wrong_bytes: int = 0

    def rates(self) -> dict[str, float]:
        return {salt: 100 * self.hit[salt] / asked for salt, asked in self.asked.items() if asked}


def quotas(schedule: Schedule, share: float, block_bytes: int) -> dict[str, int]:
    """Bytes for each tenant: ``share`` of all the distinct blocks it will ever store."""
    blocks: dict[str, set[int]] = defaultdict(set)
    for turn in schedule.turns:
        blocks[turn.salt].update(turn.blocks.tolist())
    slot = slot_size(block_bytes)
    return {salt: max(8, round(share * len(held))) * slot for salt, held in blocks.items()}


def replayed(schedule: Schedule, options: ReplayOptions, limits: Mapping[str, int], noisy_limit: int | None) -> Run:
    """One run on a pool of its own; ``noisy_limit`` None leaves the neighbour out."""
    run = Run()
    node_bytes = (options.pool_bytes or 0) // options.nodes
    pool = OwnPool(options.nodes, node_bytes, options.seed)
    try:
        with AdminClient(pool.masters) as admin:
            for salt, limit in limits.items():
                admin.set_tenant(control.TenantPolicy(salt=salt, dram_limit=limit, dram_floor=limit))
            if noisy_limit is not None:
                admin.set_tenant(control.TenantPolicy(salt=NEIGHBOUR, dram_limit=noisy_limit))
            nodes = [node.http for node in admin.nodes()]
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(nodes, run.samples, over))
        sampler.start()
        flood = None if noisy_limit is None else _flood_process(pool.masters, noisy_limit, options.block_bytes)
        try:
            _serve(schedule, options, pool.masters, run)
        finally:
            if flood is not None:
                flood.terminate()
                printed = flood.communicate(timeout=30)[0].split()
                run.flooded_bytes = int(printed[-1]) if printed else 0
            over.set()
            sampler.join()
    finally:
        pool.close()
    return run


def _serve(schedule: Schedule, options: ReplayOptions, masters: str, run: Run) -> None:
    longest = max(len(turn.blocks) for turn in schedule.turns)
    setup = Setup(0, masters, "bench/noisy", options.block_bytes, options.block_tokens, 0, min(longest, 256), SETTLE_S)
    with Client(masters, verify="always") as client:
        engine = Engine(setup, client)
        for turn in schedule.turns:
            body = turn.blocks.tobytes() + schedule.hashes[turn.blocks].tobytes()
            done = engine.serve(Work(turn.index, turn.salt, turn.hit_limit, 0, body))
            run.asked[turn.salt] += turn.hit_limit
            run.hit[turn.salt] += done.pool_blocks
            run.wrong_bytes += done.wrong_bytes


def _sample(nodes: Sequence[str], samples: list[int], over: threading.Event) -> None:
    while not over.wait(SAMPLE_S):
        total = 0
        for node in nodes:
            with urllib.request.urlopen(f"http://{node}/tenants?salt={NEIGHBOUR}", timeout=5) as answer:
                total += sum(row["dram_bytes"] for row in json.load(answer)["tenants"])
        samples.append(total)


def _flood_process(masters: str, limit: int, block_bytes: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--flood", masters, "--limit", str(limit), "--block-bytes", str(block_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def flood(masters: str, limit: int, block_bytes: int) -> None:
    """Store 100 times ``limit``, then go on until told to stop; prints the bytes stored."""
    with Client(masters) as client:
        namespace = client.namespace("bench/noisy", block_bytes=block_bytes, block_tokens=512, hash_bytes=HASH_BYTES)
        region = client.allocate(FLOOD_BLOCKS * block_bytes)
        blocks = region.rows(namespace)
        rng = np.random.default_rng(1)
        stored = 0
        started = time.monotonic()
        while stored < 100 * limit and time.monotonic() - started < 600:
            hashes = rng.integers(0, 256, FLOOD_BLOCKS * HASH_BYTES, dtype=np.uint8).tobytes()
            result = client.store(namespace, NEIGHBOUR, hashes, blocks)
            stored += int(result.stored.sum()) * slot_size(block_bytes)
            print(stored, flush=True)


def measure(trace: Path, sessions: int, tenants: int, share: float, bytes_per_token: int, seed: int) -> dict[str, Any]:
    options = ReplayOptions(
        trace=trace, sessions=sessions, tenants=tenants, bytes_per_token=bytes_per_token, engines=1, nodes=2, seed=seed,
        private_tokens=0,
    )  # fmt: skip
    schedule = build_schedule(load_trace(options), options, CostModel())
    limits = quotas(schedule, share, options.block_bytes)
    noisy = max(32 * slot_size(options.block_bytes), round(0.02 * sum(limits.values())))
    pool_bytes = round(1.1 * (sum(limits.values()) + noisy)) + (64 << 20)
    sized = ReplayOptions(**{**_fields(options), "pool_bytes": pool_bytes})
    alone = replayed(schedule, sized, limits, None)
    beside = replayed(schedule, sized, limits, noisy)
    before, after = alone.rates(), beside.rates()
    moved = {salt: after[salt] - before[salt] for salt in before}
    worst = max(moved, key=lambda salt: abs(moved[salt]))
    total = sum(alone.asked.values())
    return {
        "requests": len(schedule.turns),
        "tenants": len(limits),
        "hit_rate_alone": 100 * sum(alone.hit.values()) / total,
        "hit_rate_beside": 100 * sum(beside.hit.values()) / total,
        "worst_tenant": worst,
        "worst_points": moved[worst],
        "neighbour_limit_bytes": noisy,
        "neighbour_stored_times_limit": beside.flooded_bytes / noisy,
        "samples": len(beside.samples),
        "greatest_sample_bytes": max(beside.samples, default=0),
        "samples_above_limit": sum(sample > noisy for sample in beside.samples),
        "wrong_bytes": alone.wrong_bytes + beside.wrong_bytes,
    }


def _fields(options: ReplayOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a block trace, as `kvstrata replay` takes it")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--tenants", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.5, help="quota of a tenant, as a part of all its blocks")
    parser.add_argument("--bytes-per-token", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--flood", metavar="MASTERS", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--block-bytes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        flood(given.flood, given.limit, given.block_bytes)
        return 0
    if given.trace is None:
        parser.error("--trace is needed")
    report = measure(given.trace, given.sessions, given.tenants, given.share, given.bytes_per_token, given.seed)
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
    broken = abs(report["worst_points"]) > POINTS_MAX or report["samples_above_limit"] or report["wrong_bytes"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
