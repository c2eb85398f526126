"""Memory of simulated nodes: small slabs on the heap, that are found full of rubbish when a slot is given out; files.

Nothing of a simulation is outside of its process, so that nothing is left behind when that is killed.
"""

from __future__ import annotations

from types import SimpleNamespace

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


class MemoryFile:
    """What is read and replaced of a file, as of a :class:`~pathlib.Path`; ``content`` is None until it is written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.content: bytes | None = None

    def __str__(self) -> str:
        return self.name

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(st_size=len(self.read_bytes()))

    def read_bytes(self) -> bytes:
        if self.content is None:
            raise FileNotFoundError(self.name)
        return self.content


class MemoryFolder:
    """A data directory that outlives processes."""

    def __init__(self) -> None:
        self._files: dict[str, MemoryFile] = {}

    def __truediv__(self, name: str) -> MemoryFile:
        return self._files.setdefault(name, MemoryFile(name))


def replace(file: MemoryFile, content: bytes) -> None:
    """In the place of :func:`kvstrata.storage.durable_file.replace`."""
    file.content = content
