"""In which order one tenant's blocks of one shelf leave: the seam behind which orders can be compared.

An order holds visible blocks, coldest first by its own rule. What must hold of all of them: of one call the
deeper blocks leave before the shallower ones, and a protected block (leased, or with a resident child) is no
victim: met at the cold end it is parked, and comes back to the cold end when its protection ends. So a scan
over any number of protected blocks costs each of them once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from kvstrata.storage.records import VISIBLE, Block

#: The stamp of a block whose owner said that it may leave: colder than any call.
HINTED: Final = 0


class Order(Protocol):
    """Not thread-safe. Every call O(1) a block, amortised.

    ``block.stamp`` is the number of the call that used it last, by which fronts of several shelves are
    compared: the order keeps it, and its slab's ``hot``. ``block.parked`` is the order's too;
    ``block.mark`` is for the order's own use.
    """

    def __len__(self) -> int:
        """Blocks that are not parked."""
        ...

    def insert(self, blocks: Sequence[Block], stamp: int) -> None:
        """Take in blocks of one call, in chain order, as new."""
        ...

    def touch(self, blocks: Sequence[Block], stamp: int) -> None:
        """One call has used blocks that it holds, in chain order, maybe one of them twice, maybe parked ones."""
        ...

    def remove(self, block: Block) -> None:
        """Forget a block, parked or not."""
        ...

    def front(self) -> Block | None:
        """The next to leave; protected ones on the way are parked. The same again until something changes."""
        ...

    def unpark(self, block: Block) -> None:
        """Take in, at the cold end, a block that it does not hold or has parked: its protection has ended."""
        ...

    def cool(self, block: Block) -> None:
        """Its owner does not need it: it is the next to leave, parked or not."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Blocks that are not parked, about as they will leave; nothing changes by it."""
        ...

    def check(self) -> None:
        """Assert what it knows of itself. O(blocks)."""
        ...


class LruOrder:
    """Least recently used first: the reference."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, blocks: Sequence[Block], stamp: int) -> None:
        order = self._order
        for block in reversed(blocks):
            order[block] = None
            block.stamp = block.slab.hot = stamp
            block.parked = False

    def touch(self, blocks: Sequence[Block], stamp: int) -> None:
        order, newest = self._order, self._order.move_to_end
        for block in reversed(blocks):
            block.stamp = block.slab.hot = stamp
            block.hits += 1
            if block.parked:
                block.parked = False
                order[block] = None
            else:
                newest(block)

    def remove(self, block: Block) -> None:
        if block.parked:
            block.parked = False
        else:
            del self._order[block]

    def front(self) -> Block | None:
        order = self._order
        while order:
            block = next(iter(order))
            if not block.leases and not block.children:
                return block
            del order[block]
            block.parked = True
        return None

    def unpark(self, block: Block) -> None:
        block.parked = False
        self._order[block] = None
        self._order.move_to_end(block, last=False)

    def cool(self, block: Block) -> None:
        block.stamp = HINTED
        if block.parked:
            block.parked = False
            self._order[block] = None
        self._order.move_to_end(block, last=False)

    def blocks(self) -> Iterator[Block]:
        return iter(self._order)

    def check(self) -> None:
        for block in self._order:
            assert not block.parked and block.state == VISIBLE and block.stamp <= block.slab.hot
