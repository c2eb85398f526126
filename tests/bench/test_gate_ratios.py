"""A gate against slow growth, in time: ours against the rooflines of the same round, on whatever machine this is.

The bounds are far below what is reached on a quiet machine (docs/performance.md), since this one may be busy: they
catch what has become several times slower. The best of a few rounds counts. test_gate_counts.py is the exact part.
"""

from __future__ import annotations

import random
import time
from typing import Final

import pytest
from cases import Case
from suite_main_pool import main_pool
from suite_results import Results
from suite_scale import Scale

BLOCK_BYTES: Final = 512 << 10
SMALL: Final = Scale(
    sizes=(BLOCK_BYTES,), lookups=(1_000,), round_bytes=64 << 20, calls_max=20, dram="384MiB", paged_blocks=64
)
MOVED: Final = "move 64 x 512 KiB"
ROUNDS: Final = 4
#: No round begins later: on a machine that is far too busy one has to do.
ROUNDS_S: Final = 10.0

#: (operation, system, roofline): the least ratio to it.
BOUNDS: Final = {
    ("load", "kvstrata-shm", "memcpy"): 0.4,
    ("store", "kvstrata-shm", "memcpy+xxh3"): 0.2,
    ("load", "kvstrata-tcp", "socket+xxh3"): 0.3,
    ("store", "kvstrata-tcp", "socket+xxh3"): 0.2,
}
SYSTEMS: Final = {name for _, *names in BOUNDS for name in names}


@pytest.fixture(scope="module")
def results() -> Results:
    found, order = Results(), random.Random(0)
    with main_pool(SMALL, lambda name: name == MOVED) as groups:
        for group in groups:
            group.turns = {system: turn for system, turn in group.turns.items() if system in SYSTEMS}
        until = time.monotonic() + ROUNDS_S
        for number in range(ROUNDS):
            if number and time.monotonic() > until:
                break
            for group in groups:
                group.run(order, found.add, found.repeated.append)
    return found


@pytest.mark.parametrize(("op", "system", "roofline"), BOUNDS)
def test_ratio_to_a_roofline(results: Results, op: str, system: str, roofline: str) -> None:
    case = Case("blocks", op, 64, BLOCK_BYTES)
    ours, theirs = (results.find(case, name) for name in (system, roofline))
    assert ours is not None and theirs is not None
    ratios = [mine / other for mine, other in zip(ours.gb_s, theirs.gb_s, strict=True)]
    bound = BOUNDS[op, system, roofline]
    assert max(ratios) >= bound, (
        f"{case.name} by {system} is at {max(ratios):.2f} of {roofline} at best, and {bound} is the least: "
        f"./dev bench --case '{op} 64' on a quiet machine shows what it is; git bisect shows since when"
    )


def test_a_node_copies_nothing_for_loads_of_the_same_host(results: Results) -> None:
    case = Case("blocks", "load", 64, BLOCK_BYTES)
    rows = results.find(case, "kvstrata-shm")
    assert rows is not None
    least = min(rows.cpu["node"])
    assert least < 0.06, f"a node spent {least:.3f} CPU seconds a GiB on loads by shared memory: it touches the bytes"
