"""One tenant's bytes of one tier, by node: what each was granted, and what it may at most be working by.

A message to a node takes time, and may never arrive. So a part has two numbers: ``granted``, which the
node was told last, and ``peak``, the most that it may be using until it has confirmed. The sum of all
peaks never rises above the limit, whatever is lost on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstrata.master.tenants.division import Claim, divide

#: Stands for "no limit" among byte counts. Never sent: an absent limit says it on the wire.
UNLIMITED: Final = 1 << 62
#: Bytes that a share refused are forgotten by half in this time.
PRESSURE_HALF_LIFE_S: Final = 10.0
#: Parts that are off by less than this part of the total stay as they are: shares do not flap.
STEP_SHARE: Final = 32


@dataclass(slots=True)
class Part:
    """One node's part. ``pending`` is the revision that it has not confirmed yet, 0 for none.

    ``rise`` is a raise that waits until the state store has it (``rise_serial``); ``peak`` covers it already.
    """

    granted: int = 0
    peak: int = 0
    pending: int = 0
    rise: int | None = None
    rise_serial: int = 0
    used: int = 0
    floor: int = 0
    #: Restored from the store: the node itself knows better what it was told last.
    restored: bool = False
    _pressure: float = 0.0
    _pressed_at: float = 0.0

    def press(self, wanted: int, now: float) -> None:
        """The share refused ``wanted`` bytes since the last report."""
        self._pressure = self.pressure(now) + wanted
        self._pressed_at = now

    def pressure(self, now: float) -> float:
        """Bytes refused lately."""
        if not self._pressure:
            return 0.0
        return float(self._pressure * 0.5 ** ((now - self._pressed_at) / PRESSURE_HALF_LIFE_S))

    def demand(self, now: float) -> int:
        return self.used + int(self.pressure(now))

    @property
    def settled(self) -> bool:
        """Nothing is on its way to the node, and it is within its part."""
        return not self.pending and self.rise is None and self.used <= self.granted

    def relax(self) -> None:
        """Let ``peak`` fall to what is sure by now."""
        if not self.pending:
            self.peak = max(self.granted, self.used, self.rise or 0)


@dataclass(slots=True)
class Ledger:
    """All parts. ``limit`` is ``UNLIMITED`` where the tenant has none in this tier."""

    limit: int = UNLIMITED
    floor: int = 0
    parts: dict[str, Part] = field(default_factory=dict)
    #: What Σ peak has to stay below: the limit, or, after it was lowered, what was out then and still is.
    bound: int = UNLIMITED

    @property
    def limited(self) -> bool:
        return self.limit < UNLIMITED

    @property
    def guessed(self) -> bool:
        """Some node's part is what the store had of it, and those that spoke have no more than the limit."""
        spoken = sum(_intended(part) for part in self.parts.values() if not part.restored)
        return spoken <= self.limit and any(part.restored for part in self.parts.values())

    def out(self) -> int:
        """Σ of what nodes may be using."""
        return sum(part.peak for part in self.parts.values())

    def beside(self, part: Part) -> tuple[int, int]:
        """Of the others: what they may be using, and what those that have spoken were granted."""
        out = spoken = 0
        for other in self.parts.values():
            if other is not part:
                out += other.peak
                spoken += 0 if other.restored else other.granted
        return out, spoken

    def excuse(self) -> None:
        """Something not of our doing put more out than the limit: it was lowered, or a node told of more."""
        self.bound = max(self.limit, self.out())

    def settle(self) -> None:
        self.bound = max(self.limit, min(self.bound, self.out()))

    def part(self, node_id: str) -> Part:
        """The node's part; a new one has nothing, or no limit where the tenant has none."""
        part = self.parts.get(node_id)
        if part is None:
            part = self.parts[node_id] = Part() if self.limited else Part(UNLIMITED, UNLIMITED)
        return part

    def welcome(self, node_id: str, says: int | None, *, first: bool) -> None:
        """The part that a node begins with: the one it had, or what it ``says`` it has, if we know no better.

        More than it says it has, it gets only if that is sure to be free. ``first``: it was never linked before.
        """
        part = self.part(node_id)
        restored, part.restored = part.restored, False
        if not self.limited or not (part.granted or says):
            return
        out, spoken = self.beside(part)
        free = max(0, self.limit - out)
        if first and says is not None:
            part.granted = min(says, part.peak if restored else max(part.granted, free))
        else:
            part.granted = min(part.granted, max(says or 0, free))
        part.granted = max(0, min(part.granted, self.limit - spoken))  # it may have been lowered meanwhile
        if not first:
            # Others may still be using more than a limit that was lowered leaves: no headroom beside them.
            part.granted = min(part.granted, max(part.used, self.limit - out))
        if says is not None and says > part.peak:
            part.peak = says
            self.excuse()

    # ------------------------------------------------------------------ planning

    def plan(
        self,
        capacities: Mapping[str, int],
        grain: int,
        salt_rank: Mapping[str, int],
        unheard: Collection[str],
        now: float,
        least: Mapping[str, int] | None = None,
    ) -> Plan:
        """What to change on the nodes of ``capacities`` (those that can be told), by demand.

        ``least``: bytes that a node needs for what it has in the tier below.

        Lower parts first; a raise takes no more than what nobody may be using. Nodes ``unheard`` have not
        reported yet: they may be using all that they have.
        """
        for node_id in capacities:
            self.part(node_id)
        reserved = sum(part.peak for node_id, part in self.parts.items() if node_id not in capacities)
        claims = [
            Claim(
                node_id,
                self._demand(node_id, unheard, now),
                min(_intended(self.parts[node_id]), capacity),
                capacity,
                salt_rank.get(node_id, 0),
                (least or {}).get(node_id, 0),
            )
            for node_id, capacity in capacities.items()
        ]
        return self.toward(divide(max(0, self.limit - reserved), claims, grain), grain)

    def _demand(self, node_id: str, unheard: Collection[str], now: float) -> int:
        part = self.parts[node_id]
        return part.granted if node_id in unheard else part.demand(now)

    def toward(self, targets: Mapping[str, int], grain: int) -> Plan:
        """As :meth:`plan`, with parts to aim for. Small differences are let be, unless too much is out."""
        step = min(max(1, self.limit // STEP_SHARE), grain)
        excess = sum(_intended(part) for part in self.parts.values()) > self.limit
        lowered = {}
        for node_id, target in targets.items():
            now_has = _intended(self.parts[node_id])
            if target < now_has and (excess or now_has - target >= step or target == 0):
                lowered[node_id] = target
        free = self.limit - self.out()
        raised: dict[str, int] = {}
        waiting = 0
        gaps = sorted(((target - _intended(self.parts[n]), n) for n, target in targets.items()), reverse=True)
        for gap, node_id in gaps:
            part = self.parts[node_id]
            if gap <= 0 or (gap < step and _intended(part)):
                continue
            most = min(targets[node_id], part.peak + max(0, free))
            enough = most - _intended(part) >= min(gap, step)
            if enough:
                free -= max(0, most - part.peak)
                raised[node_id] = most
            waiting += targets[node_id] - (most if enough else _intended(part))
        return Plan(lowered, raised, waiting)

    def plan_floors(self, room: Mapping[str, int], grain: int, salt_rank: Mapping[str, int]) -> dict[str, int]:
        """Floors to change by node id: where the tenant's blocks are first, within ``room`` and its parts."""
        caps = {n: max(0, min(free, _intended(self.part(n)))) for n, free in room.items()}
        claims = [
            Claim(n, self.parts[n].used, self.parts[n].floor, cap, salt_rank.get(n, 0)) for n, cap in caps.items()
        ]
        targets = divide(self.floor, claims, grain)
        step = min(max(1, self.floor // STEP_SHARE), grain)
        there = {n: self.parts[n].floor for n in caps}
        apart = max((abs(target - there[n]) for n, target in targets.items()), default=0)
        fits = all(there[n] <= cap for n, cap in caps.items())
        if fits and apart < step and sum(there.values()) == sum(targets.values()):
            return {}
        return {n: target for n, target in targets.items() if target != there[n]}

    def check(self) -> None:
        """Assert that no more is out than may be."""
        for node_id, part in self.parts.items():
            assert part.peak >= max(part.granted if part.granted < UNLIMITED else 0, part.rise or 0), (node_id, part)
            assert part.granted >= 0 and part.used >= 0 and part.floor >= 0, (node_id, part)
            assert part.rise is None or part.rise > part.granted, (node_id, part)
        if self.limited:
            assert self.out() <= self.bound, f"{self.out()} bytes may be in use of {self.limit} (bound {self.bound})"

    def __iter__(self) -> Iterator[tuple[str, Part]]:
        return iter(self.parts.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """New parts by node id, and the bytes of raises that must wait for others to let go."""

    lowered: Mapping[str, int]
    raised: Mapping[str, int]
    waiting: int = 0


def _intended(part: Part) -> int:
    """What the node has, or will have once the store has it."""
    return part.granted if part.rise is None else part.rise
