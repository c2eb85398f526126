"""Memory of simulated nodes: small slabs on the heap, that are found full of rubbish when a slot is given out."""

from __future__ import annotations

from kvstrata.storage.arena import Arena
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.records import Block

SLOTS = 8


class HeapSlab(SlotGrid):
    """As :class:`~kvstrata.storage.slab.Slab`, without descriptors to hand out."""

    __slots__ = ("view",)

    def __init__(self, index: int, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        super().__init__(index, nbytes, memoryview(bytearray(8 * (nbytes // 64))).cast("Q"))

    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        return self.nbytes // slot_bytes, 0


def heap_arena(slabs: int, slot_bytes: int) -> Arena[HeapSlab]:
    return Arena([HeapSlab(index, SLOTS * slot_bytes) for index in range(slabs)], SLOTS * slot_bytes)


def scribble(blocks: list[Block]) -> None:
    """A slot that was given out holds no bytes of anybody's from here on."""
    for block in blocks:
        view = block.bytes()
        view[:] = b"\xee" * len(view)
