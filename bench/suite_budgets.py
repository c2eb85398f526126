"""What was promised, held against what was measured in one run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import BATCH, SIZES, Case, size_name
from suite_clients import SHAPE
from suite_main_pool import SMALL
from suite_mixed import ColdReader
from suite_results import Results, Spread, is_peer

SHM: Final = "kvstrata-shm"
ALLOCATED: Final = "kvstrata-shm, allocated"
TCP: Final = "kvstrata-tcp"


@dataclass(frozen=True, slots=True)
class Budget:
    """``case`` of ``system`` against a roofline, a peer, itself in another case, or a bound.

    ``ratio_min``: ours / theirs, above 1 is better than they. ``most``: of ``figure`` itself. Neither: not judged.
    ``against``: a system; "peer" for the best one. ``against_case``: by default the same.
    """

    what: str
    case: Case
    system: str
    figure: str = "gb_s"
    against: str = ""
    against_case: Case | None = None
    ratio_min: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table; None where it was not measured."""

    budget: Budget
    ours: Spread | None
    against: str
    theirs: Spread | None
    ratio: Spread | None
    best_peer: str
    peers: Spread | None

    @property
    def word(self) -> str:
        wanted, bound = self.budget.ratio_min, self.budget.most
        if wanted is not None:
            return "not measured" if self.ratio is None else _word(self.ratio.median >= wanted)
        if bound is not None:
            return "not measured" if self.ours is None else _word(self.ours.median <= bound)
        return "not measured" if self.ours is None else "-"

    @property
    def goal(self) -> str:
        if self.budget.ratio_min is not None:
            whom = "the best peer" if self.budget.against == "peer" else self.budget.against
            if self.budget.against_case is not None:
                whom = "one client"
            return f">= {self.budget.ratio_min:g} x {whom}"
        if self.budget.most is None:
            return "-"
        return f"<= {self.budget.most:,g} {unit(self.budget.figure)}"


def _word(met: bool) -> str:
    return "met" if met else "**missed**"


def unit(figure: str) -> str:
    return "GB/s" if figure == "gb_s" else "us" if figure.endswith("_us") else "CPU s/GiB"


def moved(op: str, blocks: int, nbytes: int) -> Case:
    return Case("blocks", op, blocks, nbytes)


def lookup(count: int) -> Case:
    return Case("lookup", "lookup", count, note="all hit")


def clients(op: str, count: int) -> Case:
    return Case("clients", op, SHAPE.blocks, SHAPE.block_bytes, f"{count} client{'s' if count > 1 else ''}")


BIG: Final = 2 << 20
LITTLE: Final = 64 << 10
BUDGETS: Final = (
    Budget("load 64 x 2 MiB, same host", moved("load", BATCH, BIG), SHM, against="memcpy", ratio_min=0.9),
    Budget("the same, against copying peers", moved("load", BATCH, BIG), SHM, against="peer", ratio_min=1.3),
    Budget(
        "store 64 x 2 MiB, same host, any memory",
        moved("store", BATCH, BIG), SHM, against="memcpy+xxh3", ratio_min=0.8,
    ),
    Budget(
        "store 64 x 2 MiB, same host, `client.allocate` memory",
        moved("store", BATCH, BIG), ALLOCATED, against="memcpy+xxh3", ratio_min=0.8,
    ),
    Budget("load 64 x 2 MiB, tcp, verified", moved("load", BATCH, BIG), TCP, against="socket+xxh3", ratio_min=0.85),
    Budget(
        "load 64 x 2 MiB, tcp, against unhashed sockets",
        moved("load", BATCH, BIG), TCP, against="socket", ratio_min=0.85,
    ),
    Budget("store 64 x 2 MiB, tcp, verified", moved("store", BATCH, BIG), TCP, against="socket+xxh3"),
    *(
        Budget(
            f"load {blocks} x {size_name(size)}, tcp",
            moved("load", blocks, size), TCP, against="mooncake-tcp", ratio_min=1.5,
        )
        for size in SIZES if size >= 256 << 10 for blocks in (1, BATCH)
    ),
    Budget("one 64 KiB block, same host, p50", moved("load", 1, LITTLE), SHM, figure="p50_us", most=60),
    Budget(
        "the same, against OpenLake", moved("load", 1, LITTLE), SHM, figure="p50_us", against="openlake", ratio_min=1.0
    ),
    Budget("store one 64 KiB block, same host, p50", moved("store", 1, LITTLE), SHM, figure="p50_us"),
    Budget("lookup of 10,000 hashes, p50", lookup(10_000), "kvstrata", figure="p50_us", most=3_000),
    Budget("the same, against Redis", lookup(10_000), "kvstrata", figure="p50_us", against="redis-unix", ratio_min=2.0),
    Budget("lookup of 1,000 hashes, p50", lookup(1_000), "kvstrata", figure="p50_us", against="echo"),
    Budget("lookup of one hash, p50", lookup(1), "kvstrata", figure="p50_us", against="echo"),
    Budget("read 64 random blocks of 1 MiB from SSD", ColdReader.CASE, SHM, against="preadv", ratio_min=0.9),
    Budget(
        "two clients that load, same host", clients("load", 2), SHM, against=SHM, against_case=clients("load", 1),
        ratio_min=1.6,
    ),
    Budget(
        "two processes that copy, as far as memory allows",
        clients("load", 2), "memcpy", against="memcpy", against_case=clients("load", 1),
    ),
    *(
        Budget(
            f"{name} clients that load, same host, against as many processes that copy",
            clients("load", count), SHM, against="memcpy", ratio_min=0.9,
        )
        for name, count in (("two", 2), ("eight", 8))
    ),
    Budget("node CPU of 64 x 2 MiB loads, same host", moved("load", BATCH, BIG), SHM, figure="cpu of node", most=0.02),
    Budget(
        "64 KiB load beside a stream, same host, p99",
        Case("latency", "load", SMALL.blocks, SMALL.block_bytes, "beside a stream of 64 x 1 MiB"), SHM, figure="p99_us",
    ),
)  # fmt: skip


def judge(results: Results, budget: Budget) -> Verdict:
    best = results.best(budget.case, is_peer, budget.figure) if not budget.figure.startswith("cpu") else None
    against = (best or "") if budget.against == "peer" else budget.against
    to_case = budget.against_case or budget.case
    return Verdict(
        budget,
        results.spread(budget.case, budget.system, budget.figure),
        against,
        results.spread(to_case, against, budget.figure) if against else None,
        results.ratio(budget.case, budget.system, against, to_case, budget.figure) if against else None,
        best or "",
        results.spread(budget.case, best, budget.figure) if best else None,
    )
