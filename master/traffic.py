"""How busy each node is with readers, and how much of the reads it should get beside replicas that are as good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

#: After so many seconds half of what was is forgotten.
HALF_S: Final = 5.0
#: Nodes that give out less than this (bytes a second) are as good as idle.
IDLE: Final = 8 << 20
#: Weights are powers of the square root of two, so that they change seldom.
_STEPS: Final = 2


class Traffic:
    """Bytes a second that one node gives out, smoothed, from its reports of all since its start."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._at = 0.0
        self._rate = 0.0

    def reported(self, total: int, now: float) -> None:
        """The node has given out ``total`` bytes by ``now``. A smaller total than before is another start's."""
        if self._total is not None and total >= self._total and now > self._at:
            seen = (total - self._total) / (now - self._at)
            self._rate += (seen - self._rate) * self._forgotten(now)
        elif self._total is not None and now <= self._at:
            return
        self._total, self._at = total, now

    def rate(self, now: float) -> float:
        """Bytes a second; a node that reports no more fades."""
        return self._rate * (1.0 - self._forgotten(now - HALF_S)) if now > self._at + HALF_S else self._rate

    def _forgotten(self, now: float) -> float:
        return 1.0 - math.exp((self._at - now) * math.log(2.0) / HALF_S)


def weights_of(rates: Mapping[int, float]) -> dict[int, float]:
    """By slot, from its rate: 1.0 for an idle node, half at the mean rate of all, and so on, in steps."""
    if not rates:
        return {}
    scale = max(IDLE, sum(rates.values()) / len(rates))
    levels = {slot: round(_STEPS * math.log2(1.0 + rate / scale)) for slot, rate in rates.items()}
    return {slot: 2.0 ** (-level / _STEPS) for slot, level in levels.items() if level}
