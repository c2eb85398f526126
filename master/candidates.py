"""The nodes that one call may be sent to, as placement weighs them: arrays, however many there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

#: A node on the writer's host has headroom with this share free, or when no node is emptier by more.
HEADROOM: Final = 0.05
#: What a full node weighs beside its capacity: it evicts, so it takes new blocks too.
FULL_WEIGHT: Final = 0.02
RAMP_S: Final = 30.0
RAMP_MIN: Final = 0.05

Positions = npt.NDArray[np.int64]  #: of nodes in a lineup
Amounts = npt.NDArray[np.int64]  #: bytes, by position
#: By directory slot, whether it is one of some; the last stands for all slots past it, and is False.
SlotMask = npt.NDArray[np.bool_]


def ramp_at(age_s: float) -> float:
    """The share of a node that became active ``age_s`` ago."""
    return min(1.0, max(RAMP_MIN, age_s / RAMP_S))


def slot_mask(slots: Collection[int]) -> SlotMask:
    mask = np.zeros(max(slots, default=-1) + 2, dtype=np.bool_)
    mask[list(slots)] = True
    return mask


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active node: ``free`` and ``capacity`` in bytes, ``ramp`` 0..1 is its share while it joins."""

    slot: int
    boot_id: str
    free: int
    capacity: int
    ramp: float = 1.0


class Lineup:
    """Nodes in a fixed order, which changes seldom: by position their directory slots, and who is on which host."""

    __slots__ = ("hosts", "mask", "slots")

    def __init__(self, slots: Sequence[int], boot_ids: Iterable[str]) -> None:
        self.slots: Positions = np.array(slots, dtype=np.int64)
        self.mask = slot_mask(slots)
        hosts: dict[str, list[int]] = {}
        for position, boot_id in enumerate(boot_ids):
            hosts.setdefault(boot_id, []).append(position)
        self.hosts: Mapping[str, Sequence[int]] = hosts

    def __len__(self) -> int:
        return len(self.slots)


class Candidates:
    """A lineup with the bytes that each node has, for one tenant at one moment. ``ramp`` None: nobody is joining.

    ``among`` are the positions that may be chosen, all of them where it is None.
    """

    __slots__ = ("_weights", "among", "capacity", "free", "lineup", "mask", "ramp")

    def __init__(
        self, lineup: Lineup, free: Amounts, capacity: Amounts, ramp: npt.NDArray[np.float64] | None = None
    ) -> None:
        self.lineup = lineup
        self.free = free
        self.capacity = capacity
        self.ramp = ramp
        self.among: Positions | None = None
        self.mask = lineup.mask
        self._weights: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(cls, rows: Sequence[Candidate]) -> Candidates:
        return cls(
            Lineup([row.slot for row in rows], [row.boot_id for row in rows]),
            np.array([row.free for row in rows], dtype=np.int64),
            np.array([row.capacity for row in rows], dtype=np.int64),
            np.array([row.ramp for row in rows], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.lineup) if self.among is None else len(self.among)

    # ------------------------------------------------------------------ fewer

    def with_room(self) -> None:
        """Leave out nodes of which the tenant may use nothing, unless that is all of them."""
        if not self.capacity.all():
            self._only(self.capacity > 0)

    def avoiding(self, slots: Collection[int]) -> None:
        """Leave out the nodes of these slots, unless that is all of them."""
        if slots:
            self._only(~np.isin(self.lineup.slots, np.fromiter(slots, np.int64)))

    def _only(self, flags: npt.NDArray[np.bool_]) -> None:
        if self.among is None:
            kept = np.flatnonzero(flags)
        else:
            kept = self.among[flags[self.among]]
        if len(kept) and len(kept) < len(self):
            self.among = kept
            self.mask = np.zeros_like(self.lineup.mask)
            self.mask[self.lineup.slots[kept]] = True

    # ------------------------------------------------------------------ what placement asks

    def positions(self) -> Positions:
        return np.arange(len(self.lineup)) if self.among is None else self.among

    def slot(self, position: int) -> int:
        return int(self.lineup.slots[position])

    def ramp_of(self, position: int) -> float:
        return 1.0 if self.ramp is None else float(self.ramp[position])

    def highest_ramp(self) -> float:
        if self.ramp is None:
            return 1.0
        return float((self.ramp if self.among is None else self.ramp[self.among]).max())

    def weights(self) -> npt.NDArray[np.float64]:
        """How much of the new blocks each node should get, f64 by position of the lineup."""
        if self._weights is None:
            weights = self.free + FULL_WEIGHT * self.capacity + 1
            self._weights = weights if self.ramp is None else self.ramp * weights
        return self._weights

    def free_share(self, position: int) -> float:
        capacity = self.capacity.item(position)
        return self.free.item(position) / capacity if capacity else 0.0

    def near(self, boot_id: str) -> list[int]:
        """Positions of those on this host that have headroom."""
        here = self.lineup.hosts.get(boot_id, ()) if boot_id else ()
        if here and self.among is not None:
            here = [position for position in here if self.mask[self.lineup.slots[position]]]
        roomy = [position for position in here if self.free_share(position) >= HEADROOM]
        if len(roomy) == len(here):
            return roomy
        emptiest = self._emptiest()
        return [p for p in here if (share := self.free_share(p)) >= HEADROOM or share >= emptiest - HEADROOM]

    def _emptiest(self) -> float:
        """The largest share that is free on any of them."""
        free, capacity = self.free, self.capacity
        if self.among is not None:
            free, capacity = free[self.among], capacity[self.among]
        shares = np.divide(free, capacity, out=np.zeros(len(free)), where=capacity > 0)
        return float(shares.max())
