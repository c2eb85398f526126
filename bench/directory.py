"""How fast and how large the master's directory is: ``python bench/directory.py [--blocks N] [--json]``.

Reports lookups a second on one core, the time of a 10,000-hash lookup, the slowest single change (a table
that grows must not make others wait), the CPU time of a change of as many hashes as one event of a snapshot has
(lookups wait for that long), how long a dropped node is in the way (at once, and in the longest of the turns that
sweep it out; CPU time, medians over ``DROPS`` nodes), and bytes a block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvstrata.master.content.misses import MissReason
from kvstrata.master.converters import HASHES_AN_EVENT
from kvstrata.master.directory.directory import Directory, TableKey
from kvstrata.master.directory.probing import Keys

TENANT = TableKey(0, 0, "tenant")
BATCH = HASHES_AN_EVENT
LOOKUP = 10_000
ROUNDS = 40
DROPS = 5

R = TypeVar("R")


def filled(blocks: int, nodes: int, seed: int) -> tuple[Directory, Keys, float, float, list[float]]:
    """A directory with ``blocks`` on ``nodes``; its keys, seconds to fill it, the slowest batch in ms, and the CPU
    time of each batch in ms."""
    directory = Directory()
    slots = [directory.take_slot() for _ in range(nodes)]
    directory.route({slot: f"host{slot}" for slot in slots})
    keys = np.random.default_rng(seed).integers(0, 2**64, size=(blocks, 2), dtype=np.uint64)
    slowest = 0.0
    held = []
    began = time.perf_counter()
    for number, start in enumerate(range(0, blocks, BATCH)):
        before, cpu = time.perf_counter(), time.thread_time()
        directory.add(slots[number % nodes], TENANT, 0, keys[start : start + BATCH])
        slowest = max(slowest, time.perf_counter() - before)
        held.append((time.thread_time() - cpu) * 1e3)
    return directory, keys, time.perf_counter() - began, slowest * 1e3, held


def median_ms(call: Callable[[int], object]) -> float:
    """Median over rounds, in milliseconds."""
    seconds = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)) * 1e3


def cpu_ms(call: Callable[[], R]) -> tuple[float, R]:
    """The CPU time of one call in milliseconds, and what it returned."""
    began = time.thread_time()
    result = call()
    return (time.thread_time() - began) * 1e3, result


def measure(blocks: int, nodes: int = 8, seed: int = 0) -> dict[str, float]:
    directory, keys, seconds, slowest_ms, held = filled(blocks, nodes, seed)
    rng = np.random.default_rng(seed + 1)
    asked = [keys[rng.integers(0, blocks, LOOKUP)] for _ in range(ROUNDS)]
    absent = [rng.integers(0, 2**64, size=(LOOKUP, 2), dtype=np.uint64) for _ in range(ROUNDS)]
    large = [keys[rng.integers(0, blocks, 1 << 16)] for _ in range(ROUNDS)]
    assert directory.lookup(0, 0, 1, "tenant", asked[0]).hit_blocks == LOOKUP
    hit_ms = median_ms(lambda number: directory.lookup(0, 0, 1, "tenant", asked[number]))
    miss_ms = median_ms(lambda number: directory.lookup(0, 0, 1, "tenant", absent[number]))
    large_ms = median_ms(lambda number: directory.lookup(0, 0, 1, "tenant", large[number]))
    nbytes = directory.nbytes
    drops, turns, dropped = [], [], 0
    for slot in range(min(DROPS, nodes)):
        drop_ms, blocks_gone = cpu_ms(lambda slot=slot: directory.drop_slot(slot, MissReason.NODE_LOST))  # type: ignore[misc]
        dropped += blocks_gone
        drops.append(drop_ms)
        steps = []
        while directory.sweeping:
            steps.append(cpu_ms(lambda: directory.turn(0.0))[0])
        turns.append(max(steps))
    return {
        "blocks": blocks,
        "bytes_a_block": nbytes / blocks,
        "lookup_10000_hits_ms": hit_ms,
        "lookup_10000_misses_ms": miss_ms,
        "million_lookups_a_second": (1 << 16) / large_ms / 1e3,
        "million_adds_a_second": blocks / seconds / 1e6,
        "slowest_change_ms": slowest_ms,
        "event_p50_cpu_ms": float(np.percentile(held, 50)),
        "event_p99_cpu_ms": float(np.percentile(held, 99)),
        "drop_node_cpu_ms": float(np.median(drops)),
        "longest_sweep_turn_cpu_ms": float(np.median(turns)),
        "dropped_blocks": dropped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2_000_000, 10_000_000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(blocks) for blocks in arguments.blocks]
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name}={value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
