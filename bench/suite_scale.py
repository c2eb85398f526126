"""How much of everything bench/run.py does: all of it, or a part in under two minutes; and what its parts are."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from cases import LOOKUPS, SIZES, Case, Round
from transfer_pool import Missed

#: Turns of one system before the run gives up: on a machine with other work a node may be silent for a moment.
TRIES: Final = 5
Found = dict[Case, Round]
Turn = Callable[[], Found]


@dataclass(frozen=True, slots=True)
class Scale:
    """``round_bytes``: what one system moves in one round of one case, if ``calls_max`` allows."""

    sizes: tuple[int, ...] = SIZES
    lookups: tuple[int, ...] = LOOKUPS
    clients: tuple[int, ...] = (1, 2, 4, 8)
    round_bytes: int = 256 << 20
    calls_min: int = 3
    calls_max: int = 512
    dram: str = "6GiB"
    paged_blocks: int = 1024
    stream_s: float = 2.0
    mixed_bytes: int = 512 << 20
    mixed_calls: int = 24
    ssd_bytes: int = 768 << 20
    ssd_turns: int = 5

    def calls(self, nbytes: int) -> int:
        """Calls of one round that move ``nbytes`` each."""
        return max(self.calls_min, min(self.calls_max, self.round_bytes // max(nbytes, 1)))


QUICK: Final = Scale(
    sizes=(64 << 10, 2 << 20),
    clients=(1, 2, 4),
    round_bytes=32 << 20,
    calls_min=2,
    calls_max=64,
    dram="2GiB",
    paged_blocks=256,
    stream_s=0.3,
    mixed_bytes=128 << 20,
    mixed_calls=8,
    ssd_bytes=192 << 20,
    ssd_turns=2,
)


@dataclass(slots=True)
class Group:
    """Systems that take turns at the same cases."""

    name: str
    turns: dict[str, Turn] = field(default_factory=dict)

    def run(self, order: random.Random, add: Callable[[str, Found], None], repeated: Callable[[str], None]) -> None:
        """Each once, in another order each time."""
        for system in order.sample(list(self.turns), len(self.turns)):
            for left in reversed(range(TRIES)):
                try:
                    add(system, self.turns[system]())
                    break
                except Missed as error:
                    if not left:
                        raise SystemExit(f"{system}, {self.name}: {error}, {TRIES} times") from error
                    repeated(f"{system}, {self.name}: {error}; once more")
