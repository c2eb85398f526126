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

import contextlib
import errno
import fcntl
import heapq
import mmap
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstrata.proto.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.storage.records import Block

PAGE_BYTES: Final = 4096
GENERATION_BYTES: Final = 8
#: After this seal nobody can map the memory writable any more; maps made before keep working.
F_SEAL_FUTURE_WRITE: Final = 0x0010
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


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


class Slab:
    """Free slots are those of a min-heap, then those from ``_fresh`` up, so that a batch lies in one run.

    ``blocks`` maps taken slots to their records. ``pinned`` counts those that cannot be evicted now,
    ``hot`` is the youngest LRU stamp that any of its blocks has had: both kept by the inventory.
    """

    __slots__ = (
        "_freed", "_fresh", "_mapping", "address", "blocks", "data_offset", "fd", "generations", "hot", "index",
        "nbytes", "pinned", "share_fd", "slot_bytes", "slots", "view",
    )  # fmt: skip

    def __init__(self, index: int, nbytes: int, *, hugepages: bool = False) -> None:
        self.index = index
        self.nbytes = nbytes
        self.fd, self._mapping = _sealed_memory(f"kvstrata-slab-{index}", nbytes, hugepages)
        self.share_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self.view = memoryview(self._mapping)
        self.address = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        self.generations = self.view[: nbytes // GENERATION_BYTES * GENERATION_BYTES].cast("Q")
        self.blocks: dict[int, Block] = {}
        self.pinned = 0
        self.hot = 0
        self._freed: list[int] = []
        self.shape(0)

    def shape(self, slot_bytes: int) -> None:
        """Give the empty slab another slot size; 0 takes it out of use."""
        assert not self.blocks, f"slab {self.index} has {len(self.blocks)} slots taken"
        self.slot_bytes = slot_bytes
        self.slots = slots_of(self.nbytes, slot_bytes) if slot_bytes else 0
        self.data_offset = _table_bytes(self.slots)
        self._fresh = 0
        self._freed.clear()

    @property
    def free(self) -> int:
        return self.slots - len(self.blocks)

    def take(self, count: int) -> list[int]:
        """Up to ``count`` free slots, lowest first. The caller enters them in ``blocks``."""
        freed = self._freed
        taken = [heapq.heappop(freed) for _ in range(min(count, len(freed)))]
        more = min(count - len(taken), self.slots - self._fresh)
        taken.extend(range(self._fresh, self._fresh + more))
        self._fresh += more
        return taken

    def give_back(self, slot: int) -> None:
        """Free a slot; O(log slots)."""
        del self.blocks[slot]
        heapq.heappush(self._freed, slot)

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in the memfd."""
        return self.data_offset + slot * self.slot_bytes

    def check(self) -> None:
        """Assert that every slot is either taken, freed or fresh, and exactly one of them."""
        freed = set(self._freed)
        assert len(freed) == len(self._freed), f"slab {self.index}: a slot was freed twice"
        assert not freed & self.blocks.keys(), f"slab {self.index}: slots both free and taken"
        assert freed | self.blocks.keys() == set(range(self._fresh)), f"slab {self.index}: slots are lost"
        assert self.data_offset + self.slots * self.slot_bytes <= self.nbytes
        for slot, block in self.blocks.items():
            assert block.slab is self and block.slot == slot
            assert self.generations[slot] == block.generation, f"slab {self.index} slot {slot}: another generation"

    def close(self) -> None:
        """Give the descriptors back, and the memory once nobody holds a view of it. Safe twice."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self.share_fd)
            self.fd = self.share_fd = -1
        self.generations.release()
        with contextlib.suppress(BufferError):  # a reply still being sent holds it; it goes with the reply
            self.view.release()
            self._mapping.close()


def _sealed_memory(name: str, nbytes: int, hugepages: bool) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if hugepages else 0)
    fd = -1
    try:
        fd = os.memfd_create(name, flags)
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise ConfigError(_advice(nbytes, hugepages, error)) from error
    return fd, mapping


def _advice(nbytes: int, hugepages: bool, error: OSError) -> str:
    what = f"cannot allocate a slab of {nbytes >> 20} MiB: {error.strerror or error}"
    if hugepages:
        return f"{what}; reserve huge pages (/proc/sys/vm/nr_hugepages) or start without --hugepages"
    if error.errno == errno.EMFILE:
        return f"{what}; raise the limit on open files (ulimit -n) or choose larger slabs"
    return f"{what}; choose a smaller --dram"
