"""Bytes that nodes give out, take in and copy: a second, by node, and in all since this master knows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

#: Rates are over about so long.
RATE_S: Final = 10.0
#: No node moves so many bytes between two turns: who says so is not believed.
BELIEVED_MAX: Final = 1 << 50


class Moved(NamedTuple):
    """Bytes to readers, from writers, and from other nodes."""

    out: int = 0
    into: int = 0
    copied: int = 0

    def __sub__(self, other: tuple[int, ...]) -> Moved:
        return Moved(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def plus(self, other: Moved) -> Moved:
        return Moved(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class Told:
    """A node's own totals since its start."""

    node_id: str
    incarnation: int
    moved: Moved


@dataclass(slots=True)
class _Flow:
    incarnation: int
    last: Moved
    since: float
    base: Moved
    rates: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Flows:
    """As many nodes as were told of in the last turn. No clock: time comes in."""

    def __init__(self) -> None:
        self.total = Moved()  #: of all nodes; only grows, though nodes start anew and leave
        self._flows: dict[str, _Flow] = {}

    def turn(self, told: Iterable[Told], now: float) -> None:
        """What every node says now. One that says nothing is forgotten; what it moved stays in the total."""
        seen: dict[str, _Flow] = {}
        for row in told:
            flow = self._flows.get(row.node_id)
            if flow is None:  # what it moved before it was known here is not of this time
                seen[row.node_id] = _Flow(row.incarnation, row.moved, now, row.moved)
                continue
            anew = flow.incarnation != row.incarnation or min(row.moved - flow.last) < 0
            grown = row.moved if anew else row.moved - flow.last  # all since its new start
            believed = max(grown) <= BELIEVED_MAX
            if believed:
                self.total = self.total.plus(grown)
            if anew or not believed:
                flow = _Flow(row.incarnation, row.moved, now, row.moved)
            else:
                flow.last = row.moved
                self._rate(flow, now)
            seen[row.node_id] = flow
        self._flows = seen

    def _rate(self, flow: _Flow, now: float) -> None:
        elapsed = now - flow.since
        if elapsed <= 0:
            return
        out, into, copied = flow.last - flow.base
        flow.rates = (out / elapsed, into / elapsed, copied / elapsed)
        if elapsed >= RATE_S:
            flow.base, flow.since = flow.last, now

    def rates(self, node_id: str) -> tuple[float, float, float]:
        """Bytes a second: out, in, copied. Zeros for a node that is not known."""
        flow = self._flows.get(node_id)
        return (0.0, 0.0, 0.0) if flow is None else flow.rates

    def check(self) -> None:
        assert min(self.total) >= 0
        for flow in self._flows.values():
            assert min(flow.last - flow.base) >= 0 and min(flow.rates) >= 0
