"""One slab: a sealed memfd cut into slots of one size, with a generation word for each.

::

    offset 0                          page-rounded
    +--------------------------------+-----------+-----------+---
    | generation table, u64 a slot   | slot 0    | slot 1    | ...

The node maps a slab read-write and then seals it, so that whoever is handed its descriptor can map it
read-only and can neither write, nor resize, nor punch holes. A slab's slot size may change while no slot
is taken; the memory, its address and its seals stay.
"""

from __future__ import annotations

import errno
from typing import Final

import numpy as np

from kvstrata.proto.errors import ConfigError
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.huge_pages import Pages
from kvstrata.storage.sealed_memory import SealedMemory

PAGE_BYTES: Final = 4096
GENERATION_BYTES: Final = 8


def slot_size(block_bytes: int) -> int:
    """Bytes a block is allocated: rounded up to 64 B below 4 KiB, to 4 KiB above."""
    grain = 64 if block_bytes < PAGE_BYTES else PAGE_BYTES
    return -(-block_bytes // grain) * grain


def slots_of(slab_bytes: int, slot_bytes: int) -> int:
    """Slots of one size in a slab, 0 when none fits beside the generation table."""
    count = slab_bytes // (slot_bytes + GENERATION_BYTES)
    while count and _table_bytes(count) + count * slot_bytes > slab_bytes:
        count -= 1
    return count


def _table_bytes(slots: int) -> int:
    return -(-slots * GENERATION_BYTES // PAGE_BYTES) * PAGE_BYTES


class Slab(SlotGrid):
    """A grid of slots over memory of its own, which clients on this host may map read-only."""

    __slots__ = ("_memory", "address", "fd", "share_fd", "view")

    generations: memoryview

    def __init__(self, index: int, nbytes: int, *, pages: Pages = Pages.SMALL) -> None:
        try:
            self._memory = SealedMemory(f"kvstrata-slab-{index}", nbytes, pages=pages)
        except OSError as error:
            raise ConfigError(_advice(nbytes, pages, error)) from error
        self.fd, self.share_fd, self.view = self._memory.fd, self._memory.share_fd, self._memory.view
        self.address = int(np.frombuffer(self.view, np.uint8).ctypes.data)
        super().__init__(index, nbytes, self.view[: nbytes // GENERATION_BYTES * GENERATION_BYTES].cast("Q"))

    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        count = slots_of(self.nbytes, slot_bytes)
        return count, _table_bytes(count)

    def close(self) -> None:
        """Give the descriptors back, and the memory once nobody holds a view of it. Safe twice."""
        self.fd = self.share_fd = -1
        self.generations.release()
        self._memory.close()


def _advice(nbytes: int, pages: Pages, error: OSError) -> str:
    what = f"cannot allocate a slab of {nbytes >> 20} MiB: {error.strerror or error}"
    if error.errno == errno.EMFILE:
        return f"{what}; raise the limit on open files (ulimit -n) or choose larger slabs"
    if pages is Pages.RESERVED:
        return f"{what}; reserve more huge pages (sysctl vm.nr_hugepages) or start without --hugepages"
    if pages is Pages.TRANSPARENT and error.errno == errno.EINVAL:
        return f"{what}; transparent huge pages need Linux 5.14: reserve huge pages or start without --hugepages"
    return f"{what}; choose a smaller --dram"
