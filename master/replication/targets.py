"""Which node takes a copy: not one that has the block, another host if there is one, the roomiest.

A copy of something that nobody asks for must not make room for itself: it goes where memory is free, or nowhere.
One that is *pressing* (just stored, just asked for, leaving with its node) may, as any new block does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from kvstrata.master.candidates import ramp_at
from kvstrata.master.nodes import Node
from kvstrata.master.replication.copies import COMMAND_BLOCKS, Copies
from kvstrata.master.tenants.quotas import Quotas
from kvstrata.proto.status import Tier

#: A node with less than this share of its memory free has none to give to what nobody asks for.
FREE_SHARE: Final = 0.05


@dataclass(slots=True)
class Target:
    """A node as copies of one tenant see it: bytes of one tier, less what is under way there."""

    node: Node
    host: str
    free: int
    capacity: int
    ramp: float

    @property
    def worth(self) -> float:
        return self.ramp * self.free / self.capacity if self.capacity else 0.0

    def takes(self, nbytes: int, *, pressing: bool) -> bool:
        """Whether a block may go there at all."""
        if self.capacity < nbytes:
            return False
        return pressing or self.free - nbytes >= FREE_SHARE * self.capacity

    def fits(self, nbytes: int) -> int:
        """Blocks of ``nbytes`` for one command: what is free is not overrun; where nothing is, others leave anyway."""
        return min(COMMAND_BLOCKS, self.free // nbytes) if self.free >= nbytes else COMMAND_BLOCKS


class Targets:
    """For one moment: what is free is counted down as copies are ordered."""

    def __init__(self, takers: Iterable[Node], quotas: Quotas, copies: Copies, now: float) -> None:
        self._takers = list(takers)
        self._quotas = quotas
        self._copies = copies
        self._now = now
        self._known: dict[tuple[str, Tier], list[Target]] = {}

    def choose(
        self, salt: str, tier: Tier, nbytes: int, holders: Collection[str], hosts: Collection[str], *, pressing: bool
    ) -> list[Target]:
        """Nodes for a block of ``nbytes``, the best first; ``holders`` have it, on ``hosts`` (boot ids)."""
        fit = [
            target
            for target in self._of(salt, tier)
            if target.node.node_id not in holders and target.takes(nbytes, pressing=pressing)
        ]
        return sorted(fit, key=lambda target: (target.host in hosts, -target.worth, target.node.node_id))

    def held_up(self, holders: Collection[str]) -> bool:
        """Whether a node that has no replica yet takes none only for the moment."""
        return any(
            not node.linked or node.usage is None or self._copies.paused(node.node_id, None, self._now)
            for node in self._takers
            if node.node_id not in holders
        )

    def _of(self, salt: str, tier: Tier) -> list[Target]:
        known = self._known.get((salt, tier))
        if known is None:
            rooms = self._quotas.rooms(salt, tier)
            targets = (self._target(node, tier, salt) for node in self._takers)
            known = [target for target in targets if target is not None]
            for target in known:
                room = rooms.get(target.node.node_id)
                if room is not None:
                    target.free, target.capacity = min(target.free, room.free), min(target.capacity, room.share)
            self._known[salt, tier] = known
        return known

    def _target(self, node: Node, tier: Tier, salt: str) -> Target | None:
        if node.attachment is None or node.usage is None or not node.linked:
            return None
        if self._copies.paused(node.node_id, salt, self._now):
            return None
        under_way = self._copies.bytes_to(node.node_id)
        if tier == Tier.SSD:
            free, capacity = node.usage.ssd_bytes_free, node.ssd_bytes
        else:
            free, capacity = node.usage.dram_bytes_free - node.placed_bytes, node.dram_bytes
        since = self._now if node.active_since is None else node.active_since
        ramp = ramp_at(self._now - since)
        return Target(node, node.attachment.facts.boot_id, max(0, free - under_way), capacity, ramp)
