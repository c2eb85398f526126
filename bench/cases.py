"""The case table: what is measured, the same for every system, and how a measurement is taken.

A case is (operation, block bytes, blocks a call). Each is repeated ``rounds`` times; a row keeps the
median over rounds, so that one noisy round does not count. Rows carry CPU seconds a GiB of this process.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
BATCH = 64
LOOKUPS = (1, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one system. ``gb_s``: 10^9 bytes a second; latencies in microseconds a call."""

    system: str
    op: str
    block_bytes: int
    batch: int
    gb_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_gib: float
    rounds: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class Round:
    """Latencies of one round's calls, the bytes they moved, the CPU this process burnt."""

    seconds: list[float]
    nbytes: int
    cpu_seconds: float


def measure(calls: Sequence[Callable[[], object]], nbytes: int) -> Round:
    """Run the calls one after the other."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Round(seconds, nbytes, cpu)


def summarise(system: str, op: str, block_bytes: int, batch: int, rounds: Sequence[Round]) -> Row:
    """Medians over rounds."""
    gib = max(rounds[0].nbytes, 1) / (1 << 30)
    return Row(
        system=system,
        op=op,
        block_bytes=block_bytes,
        batch=batch,
        gb_s=round(statistics.median(r.nbytes / sum(r.seconds) for r in rounds) / 1e9, 3),
        p50_us=round(statistics.median(_quantile(r.seconds, 0.5) for r in rounds) * 1e6, 1),
        p99_us=round(statistics.median(_quantile(r.seconds, 0.99) for r in rounds) * 1e6, 1),
        cpu_s_per_gib=round(statistics.median(r.cpu_seconds for r in rounds) / gib, 4),
        rounds=len(rounds),
    )


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]


def calls_for(block_bytes: int, batch: int) -> int:
    """How many calls a round makes: enough to time, bounded in bytes."""
    return max(4, min(512, (256 << 20) // (block_bytes * batch)))
