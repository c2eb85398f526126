"""Whose replicas count: worked out once for each set of holders, until a node comes, goes, or is to leave.

A replica *stands* while its node's inventory is in service and the node is not on its way out, suspected nodes
included: silence for some seconds loses nothing. It is *sure* when its node is active, has been for a while, and
no reader has found the block missing. Blocks are copied by what stands, and let go by what is sure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata.master.directory.directory import Directory
from kvstrata.master.directory.holders import HIDDEN, Ids
from kvstrata.master.liveness import NodeState
from kvstrata.master.nodes import Node, Nodes

#: A node that has just come back may go again: its replicas make no other's surplus for so long.
SETTLED_S: Final = 30.0

_Counts = npt.NDArray[np.int64]


class _Place(NamedTuple):
    """What a node's inventory in service is worth."""

    node_id: str
    active: bool
    leaving: bool
    settled: bool


class Replicas:
    """Over the directory and the nodes. Not thread-safe: its owner holds a lock."""

    def __init__(self, directory: Directory, nodes: Nodes) -> None:
        #: Nodes that are here, by the slot of their inventory in service.
        self.by_slot: dict[int, Node] = {}
        self._directory = directory
        self._nodes = nodes
        self._places: dict[int, _Place] = {}
        self._reuses = -1
        self._stands = np.zeros(0, dtype=np.int64)
        self._sure = np.zeros(0, dtype=np.int64)
        self._readable = np.zeros(0, dtype=np.bool_)

    def refresh(self, now: float) -> bool:
        """Look at who is here; True when replicas have been lost since the last time."""
        by_slot, places = {}, {}
        for node in self._nodes:
            if node.attachment is None or node.attachment.slot is None:
                continue
            active = node.state is NodeState.ACTIVE
            settled = active and node.active_since is not None and now - node.active_since >= SETTLED_S
            by_slot[node.attachment.slot] = node
            places[node.attachment.slot] = _Place(node.node_id, active, node.leaving, settled)
        self.by_slot = by_slot
        before, self._places = self._places, places
        if places != before:
            self._forget()
        here = {place.node_id for place in places.values() if not place.leaving}
        return not {place.node_id for place in before.values() if not place.leaving} <= here

    def _forget(self) -> None:
        self._stands = self._sure = np.zeros(0, dtype=np.int64)
        self._readable = np.zeros(0, dtype=np.bool_)

    @property
    def takers(self) -> list[Node]:
        """Nodes that may get blocks."""
        return [self.by_slot[slot] for slot, place in self._places.items() if place.active and not place.leaving]

    # ------------------------------------------------------------------ sets of holders

    def short(self, ids: Ids, wanted: int) -> _Counts:
        """Replicas that blocks with these sets lack: i64[n]. No more are wanted than there are nodes.

        The last replica on a node that is leaving is no want: its drain sees to it.
        """
        self._work_out()
        most = min(wanted, len(self.takers))
        lacking = np.maximum(0, most - np.maximum(self._stands[ids], 1))
        return np.where(self._readable[ids], lacking, 0)

    def surplus(self, ids: Ids, wanted: int) -> _Counts:
        """Replicas that blocks with these sets have too many: i64[n]; 0 where one of them is in doubt."""
        self._work_out()
        sure = self._sure[ids]
        return np.where(sure == self._stands[ids], np.maximum(0, sure - wanted), 0)

    def stands(self, ids: Ids) -> _Counts:
        """Replicas on nodes that stay: i64[n]."""
        self._work_out()
        return self._stands[ids]

    def sources(self, set_id: int) -> list[tuple[Node, int]]:
        """Active nodes that have a block, with the fastest tier it is in there; leaving ones last."""
        best: dict[int, int] = {}
        for slot, tier in self._directory.holders_of(set_id):
            place = self._places.get(slot)
            if tier != HIDDEN and place is not None and place.active:
                best[slot] = min(tier, best.get(slot, tier))
        slots = sorted(best, key=lambda slot: (self._places[slot].leaving, best[slot], slot))
        return [(self.by_slot[slot], best[slot]) for slot in slots]

    def sure_of(self, set_id: int) -> list[Node]:
        """Nodes of which each could lose a block with this set, if the others keep it."""
        return [self.by_slot[slot] for slot in sorted(self._sure_slots(set_id))]

    def _sure_slots(self, set_id: int) -> set[int]:
        held = self._directory.holders_of(set_id)
        hidden = {slot for slot, tier in held if tier == HIDDEN}
        return {
            slot
            for slot, _ in held
            if slot not in hidden and (place := self._places.get(slot)) is not None and place.settled
            and not place.leaving
        }  # fmt: skip

    def _work_out(self) -> None:
        holders = self._directory.holders
        if holders.reuses != self._reuses:
            self._forget()
            self._reuses = holders.reuses
        done, size = len(self._stands), holders.size
        if done == size:
            return
        stands, sure, readable = [], [], []
        for set_id in range(done, size):
            held = self._held(set_id)
            places = [self._places[slot] for slot in {slot for slot, _ in held} if slot in self._places]
            stands.append(sum(not place.leaving for place in places))
            sure.append(len(self._sure_slots(set_id)) if held else 0)
            readable.append(any(tier != HIDDEN and slot in self._places and self._places[slot].active
                                for slot, tier in held))  # fmt: skip
        self._stands = np.concatenate((self._stands, np.array(stands, dtype=np.int64)))
        self._sure = np.concatenate((self._sure, np.array(sure, dtype=np.int64)))
        self._readable = np.concatenate((self._readable, np.array(readable, dtype=np.bool_)))

    def _held(self, set_id: int) -> list[tuple[int, int]]:
        return self._directory.holders_of(set_id) if self._directory.holders.known(set_id) else []

    def check(self) -> None:
        assert len(self._stands) == len(self._sure) == len(self._readable)
        assert (self._sure <= self._stands).all()
