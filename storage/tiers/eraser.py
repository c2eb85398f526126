"""Slots of dropped scopes that are to be overwritten on their device before anybody else gets them. Sans-IO.

A slot that its block has let go of stays taken, and charged, until :meth:`Eraser.done` says that it was
overwritten: also those that were being read, written or moved when their scope was dropped. What cannot be
overwritten now is kept and tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from kvstrata.storage.inventory import Inventory
from kvstrata.storage.records import Block, Shelf


class Eraser:
    """Over the inventory of one tier. Not thread-safe: its owner's lock covers it.

    ``let_go`` ends what holds slots of some shelves for reasons of its own (quarantine).
    """

    def __init__(
        self, inventory: Inventory, let_go: Callable[[Collection[Shelf]], None] = lambda shelves: None
    ) -> None:
        self.kept: dict[Block, None] = {}  #: to be overwritten, in order
        self._inventory = inventory
        self._let_go = let_go
        self._taken: set[Block] = set()
        self._left: dict[Shelf, int] = {}
        inventory.eraser = self

    def claim(self, wanted: Callable[[Shelf], bool]) -> list[Shelf]:
        """Every slot of shelves that are wanted is to be overwritten; call it right before they are retired.

        Returns all such shelves that have one, also those claimed before. O(shelves + blocks leaving).
        """
        inventory = self._inventory
        shelves = {*inventory.shelves.values(), *inventory.retired_shelves(), *(b.shelf for b in inventory.leaving)}
        fresh = {shelf for shelf in shelves if wanted(shelf) and shelf not in self._left}
        for shelf in fresh:
            self._left[shelf] = len(shelf.blocks)
        for block in inventory.leaving:
            if block.shelf in fresh:
                self._left[block.shelf] += 1
        for shelf in fresh:
            if not self._left[shelf]:
                del self._left[shelf]
        self._let_go(fresh)
        return [shelf for shelf in self._left if wanted(shelf)]

    def left(self, shelves: Iterable[Shelf]) -> int:
        """Slots of these shelves that are not overwritten yet."""
        return sum(self._left.get(shelf, 0) for shelf in shelves)

    def keeps(self, block: Block) -> bool:
        """The inventory asks: whether the slot of a block that nobody holds any more must stay taken for now."""
        if block.shelf not in self._left or block in self._taken:
            return False
        self.kept[block] = None
        return True

    def take(self, limit: int) -> list[Block]:
        """Up to ``limit`` blocks whose slots are to be overwritten now; end with :meth:`done`."""
        blocks = list(islice(self.kept, limit))
        for block in blocks:
            del self.kept[block]
        self._taken.update(blocks)
        return blocks

    def done(self, blocks: Sequence[Block], erased: bool) -> None:
        """What :meth:`take` gave is overwritten, and free; or it is not, and waits for another turn."""
        if not erased:
            self._taken.difference_update(blocks)
            self.kept.update(dict.fromkeys(blocks))
            return
        for block in blocks:
            self._inventory.drop(block)
            self._taken.discard(block)
            self._left[block.shelf] -= 1
            if not self._left[block.shelf]:
                del self._left[block.shelf]

    @property
    def claimed(self) -> bool:
        """Whether any slot is still to be overwritten."""
        return bool(self._left)

    def holds(self, block: Block) -> bool:
        """Whether the slot is taken for this reason alone."""
        return block in self.kept or block in self._taken

    def check(self) -> None:
        """Assert that every claimed slot is counted once."""
        counted: dict[Shelf, int] = {}
        for block in self._inventory.blocks():
            if block.shelf in self._left:
                counted[block.shelf] = counted.get(block.shelf, 0) + 1
        assert counted == self._left, "claimed slots are miscounted"
        assert not self._taken & self.kept.keys()
