"""What is measured, and how: calls one after the other, and the CPU time of all who took part."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SIZES: Final = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
BATCH: Final = 64
LOOKUPS: Final = (1, 1_000, 10_000)
#: The end of the note of what is measured cold.
FIRST_LOADS: Final = "first loads"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: ``op`` ("load", "store", "lookup") of so many blocks a call. ``kind``: the table it is in."""

    kind: str
    op: str
    blocks: int
    block_bytes: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        what = (
            f"{self.op} {self.blocks} x {size_name(self.block_bytes)}" if self.block_bytes else f"lookup {self.blocks}"
        )
        return f"{what}, {self.note}" if self.note else what


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


@dataclass(slots=True)
class Round:
    """Seconds of one round's calls, the bytes they moved, CPU seconds of this process and of others by their role.

    ``began``, ``ended``: of ``time.monotonic()``, the same clock in all processes.
    """

    seconds: list[float]
    nbytes: int
    cpu_seconds: float
    others: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    at_once: int = 1

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second: over the calls' own time, or from the first begin to the last end of several clients."""
        taken = self.ended - self.began if self.at_once > 1 else sum(self.seconds)
        return self.nbytes / taken / 1e9


def measure(calls: Sequence[Callable[[], object]], nbytes: int, pids: Mapping[str, int] | None = None) -> Round:
    """Run the calls one after the other. ``pids``: processes whose CPU time counts, by role."""
    watch = CpuWatch(pids or {})
    own, began = time.process_time(), time.monotonic()
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    ended, cpu = time.monotonic(), time.process_time() - own
    return Round(seconds, nbytes, cpu, watch.seconds(), began, ended)


def joined(rounds: Sequence[Round], others: dict[str, float], at_once: int = 1) -> Round:
    """Several rounds as one: one after the other, or of so many clients ``at_once``."""
    return Round(
        [seconds for one in rounds for seconds in one.seconds],
        sum(one.nbytes for one in rounds),
        sum(one.cpu_seconds for one in rounds),
        others,
        min(one.began for one in rounds),
        max(one.ended for one in rounds),
        at_once,
    )


class CpuWatch:
    """CPU seconds of other processes since it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._before = {role: cpu_seconds(pid) for role, pid in pids.items()}

    def seconds(self) -> dict[str, float]:
        return {role: cpu_seconds(pid) - self._before[role] for role, pid in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """What a process has run, and the children that it has now. Raises ``ProcessLookupError`` when it is gone."""
    total = cpu_ns(pid) / 1e9
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                total += cpu_seconds(int(child))
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return total


def cpu_ns(pid: int) -> int:
    """Nanoseconds that a process has run, with all threads that it has had: what clock_getcpuclockid(3) names."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))]
