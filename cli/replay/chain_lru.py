"""A least-recently-used cache of prefix chains, by block number.

One request touches its whole chain with one stamp, and among equals the deeper block goes first, so that
a prefix never leaves before its suffix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class ChainLRU:
    """Holds at most ``capacity`` blocks; only their numbers, no bytes."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} blocks: it must be 0 or more")
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def prefix(self, chain: Sequence[int]) -> int:
        """How many leading blocks of ``chain`` are held. Moves nothing."""
        order = self._order
        for position, block in enumerate(chain):
            if block not in order:
                return position
        return len(chain)

    def touch(self, chain: Sequence[int]) -> None:
        """Make ``chain`` the most recent, its head last to go; take in what is new and evict what no longer fits."""
        order = self._order
        # Deepest first: the head ends up the most recent of the chain.
        for block in reversed(chain):
            order[block] = None
            order.move_to_end(block)
        while len(order) > self.capacity:
            order.popitem(last=False)

    def coldest_first(self) -> list[int]:
        """The blocks in the order they would be evicted."""
        return list(self._order)

    def check(self) -> None:
        """Assert the bound."""
        assert len(self._order) <= self.capacity, f"{len(self._order)} blocks in room for {self.capacity}"
