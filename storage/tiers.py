"""Moves between DRAM and SSD, as bookkeeping: what to demote, what to promote, and what became of it. Sans-IO.

A move holds both ends: the source is pinned, the destination is in flight, so that neither is reused while
bytes travel (the movers' business). It ends by :meth:`TierMoves.moved`, which publishes what arrived and
lets go of the rest, whatever happened to the blocks meanwhile: a source that was removed publishes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import Block, Counts


class SsdPolicy(Enum):
    """When blocks are written to SSD."""

    DEMOTE = "demote"  #: in the background, the coldest first, before DRAM is full
    WRITE_THROUGH = "write-through"  #: each at once; the writer's answer says that it is durable
    OFF = "off"  #: never; what is there can be read


@dataclass(frozen=True, slots=True)
class Move:
    """Pairs of one call: ``source[i]`` travels to ``target[i]``."""

    source: list[Block]
    target: list[Block]


class TierMoves:
    """Over both inventories of a node. Not thread-safe: the node's lock covers it."""

    def __init__(self, dram: Inventory, ssd: Inventory, counts: Counts) -> None:
        self.dram = dram
        self.ssd = ssd
        self.counts = counts

    def moved(self, move: Move, arrived: Sequence[bool], now: float) -> None:
        """A mover is done with both ends."""
        raise NotImplementedError
