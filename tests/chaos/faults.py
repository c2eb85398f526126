"""What goes wrong, when and to whom: drawn from a seed, done to a cluster, and written down.

At any time at most one master and half of the nodes are away, so that there is a pool to speak of.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cluster import Cluster, PlacedDaemon, Request

#: A new fault begins after so many seconds, and lasts so many.
EVERY_S = (1.5, 4.0)
LASTS_S = (0.3, 5.0)
#: A victim counts as one for so long after it is back: its breaker closes, it attaches, it says what it holds.
AFTERMATH_S = 3.0


@dataclass(slots=True)
class Fault:
    """``addresses``: where the victim could be reached before and after; monotonic seconds."""

    victim: str
    kind: str
    began: float
    ends: float
    addresses: frozenset[str]

    def __str__(self) -> str:
        return f"{self.kind} {self.victim} for {self.ends - self.began:.1f} s"

    def touches(self, request: Request) -> bool:
        return bool(self.addresses & request.touched)

    def overlaps(self, request: Request) -> bool:
        return request.began < self.ends + AFTERMATH_S and request.began + request.seconds > self.began


class Storm:
    """Does faults to a cluster for a while. ``calm`` does none, and burns what starting processes costs."""

    def __init__(self, cluster: Cluster, seed: int, *, calm: bool = False, scratch: Path | None = None) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._random = random.Random(seed)
        self._calm, self._scratch = calm, scratch
        self._active: list[Fault] = []
        self._decoys: list[PlacedDaemon] = []

    def blow(self, seconds: float) -> None:
        """Returns when all is healed again; every process has been started where it was."""
        ends = time.monotonic() + seconds
        due = time.monotonic()
        try:
            while time.monotonic() < ends:
                self._heal(time.monotonic())
                if time.monotonic() >= due:
                    self._begin()
                    due = time.monotonic() + self._random.uniform(*EVERY_S)
                time.sleep(0.02)
        finally:
            self._heal(float("inf"))
            for decoy in self._decoys:
                decoy.end()

    def _begin(self) -> None:
        victim = self._victim()
        if victim is None:
            return
        kinds = ["kill", "stop"] + (["cut"] if self._cluster.hosts is not None else [])
        kind = "kill" if victim.startswith("player") else self._random.choice(kinds)
        began = time.monotonic()
        away = frozenset() if victim.startswith("player") else frozenset({self._cluster.address(victim)})
        fault = Fault(victim, kind, began, began + self._random.uniform(*LASTS_S), away)
        self.faults.append(fault)
        self._active.append(fault)
        if self._calm:
            return
        if kind == "kill":
            self._cluster.kill(victim)
        elif kind == "stop":
            self._cluster.signal(victim, signal.SIGSTOP)
        else:
            self._cluster.cut(victim)

    def _victim(self) -> str | None:
        away = [fault.victim for fault in self._active]
        kind = self._random.choices(["node", "master", "player"], [6, 3, 1])[0]
        bound = {"node": len(self._cluster.names("node")) // 2, "master": 1, "player": 1}[kind]
        if sum(name.startswith(kind) for name in away) >= bound:
            return None
        return self._random.choice([name for name in self._cluster.names(kind) if name not in away] or [None])

    def _heal(self, now: float) -> None:
        for fault in [each for each in self._active if each.ends <= now]:
            self._active.remove(fault)
            self._back(fault)
            fault.ends = time.monotonic()

    def _back(self, fault: Fault) -> None:
        cluster, victim = self._cluster, fault.victim
        if self._calm:
            if fault.kind == "kill":
                self._decoy()
        elif fault.kind == "stop":
            cluster.signal(victim, signal.SIGCONT)
        elif fault.kind == "cut":
            cluster.mend(victim)
        elif victim.startswith("player"):
            cluster.play(victim, self._random.randrange(1 << 30))
        else:
            cluster.start(victim)
            fault.addresses |= {cluster.address(victim)}

    def _decoy(self) -> None:
        """A node that is of no pool: it costs what a node costs to start."""
        assert self._scratch is not None
        for old in self._decoys:
            old.end()
        folder = self._scratch / f"decoy{len(self._decoys)}"
        where = ("--master", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data", str(folder))
        self._decoys.append(PlacedDaemon("storage", *where, "--dram", "32MiB", log=self._scratch / "decoy.log"))


def untouched(requests: Iterable[Request], faults: list[Fault]) -> list[Request]:
    """Those that ran beside a fault and used no victim of one at that time."""
    found = []
    for request in requests:
        beside = [fault for fault in faults if fault.addresses and fault.overlaps(request)]
        if beside and not any(fault.touches(request) for fault in beside):
            found.append(request)
    return found


def quantile(requests: list[Request], part: float, value: Callable[[Request], float] = lambda r: r.seconds) -> float:
    ordered = sorted(value(request) for request in requests)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
