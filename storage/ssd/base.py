"""What the node needs of its SSDs: room to allocate, bytes in and out, and a memory that outlives the process.

The index of what is there is the node's (:class:`kvstrata.storage.inventory.Inventory` over extents), rebuilt
at start from the slots themselves. An :class:`SsdStore` decides nothing: it has no policy, no LRU, no lock of
the node's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.arena import Arena
from kvstrata.storage.grid import SlotGrid
from kvstrata.storage.records import Block
from kvstrata.transfer.loops import Loop

#: Bytes that devices read and write at a time: every offset, length and address is a multiple of it.
SECTOR_BYTES: Final = 4096
#: A slot begins with a header of this size; the payload follows, padded to whole sectors.
HEADER_BYTES: Final = SECTOR_BYTES
#: A read that is not back by then is given up, unless its caller says otherwise.
READ_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says of itself. ``parent`` may be empty; ``written_at`` is wall time, for people only."""

    namespace: Namespace
    epoch: int
    salt: str
    hash: bytes
    generation: int
    checksum: int  #: xxh3_64 of the payload
    parent: bytes = b""
    index: int = 0
    written_at: float = 0.0


class Extent(SlotGrid):
    """A stretch of a device. Its first sector says how it is cut, so that it can be read after a restart."""

    __slots__ = ("device", "device_offset")

    def __init__(self, index: int, nbytes: int, device: int, device_offset: int) -> None:
        self.device = device  #: index into the store's devices
        self.device_offset = device_offset
        super().__init__(index, nbytes, array("Q"))

    def room_for(self, slot_bytes: int) -> tuple[int, int]:
        return (self.nbytes - SECTOR_BYTES) // slot_bytes, self.device_offset + SECTOR_BYTES

    def shape(self, slot_bytes: int) -> None:
        super().shape(slot_bytes)
        self.generations = array("Q", bytes(8 * self.slots))


@dataclass(frozen=True, slots=True)
class Removal:
    """What must never be found again, of generations up to ``below`` (this node's numbers).

    Single blocks when ``hashes`` is not empty (packed, of ``namespace`` and ``salt``); else everything of
    ``group`` ("" means any) and ``salt`` (None means any) whose weight epoch is below ``epoch`` (None: any).
    """

    below: int
    namespace: Namespace | None = None
    hashes: bytes = b""
    group: str = ""
    salt: str | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What recovery read: ``seconds`` for ``bytes_scanned`` of headers over ``device_bytes``."""

    slots: int
    blocks: int
    stale: int
    damaged: int
    device_bytes: int
    seconds: float


@dataclass(slots=True)
class DeviceState:
    """One device at one moment; ``problem`` says why it is not serving."""

    path: str
    state: str = "scanning"  #: "scanning" | "serving" | "failed"
    nbytes: int = 0
    problem: str = ""
    direct: bool = True  #: past the page cache; False where the file system cannot
    counts: dict[str, int] = field(default_factory=dict)


#: Called by a scan for each extent in use: the extent (not yet in use in the arena), its slot size, and the
#: headers of the newest, not removed, block of each key, by slot.
Found = Callable[[Extent, int, Sequence[tuple[int, SlotHeader]]], None]


class SsdStore(Protocol):
    """One or several devices. Calls block, are thread-safe, and never raise for what a device does."""

    arena: Arena[Extent]
    #: Work of its own, not begun: who owns the store starts it after the scan, and stops it before the close.
    loops: Sequence[Loop]

    def slot_bytes(self, block_bytes: int) -> int:
        """Header and payload, in whole sectors."""
        ...

    def scan(self, found: Found) -> ScanReport:
        """Read every header, before anything else is done with the store. A damaged one is counted, not found."""
        ...

    def write(self, items: Sequence[tuple[Block, SlotHeader, memoryview]]) -> list[bool]:
        """Write payloads (``block_bytes`` each) and headers to the blocks' slots; True where flushed.

        One flush a device and call: give it batches. The caller keeps slots and payloads from changing until the
        return. It comes when the device has answered or is out, ``STUCK_S`` (storage/ssd/device.py) at most
        after its last sign of life: sooner would let a late write land on a slot that is used again.
        """
        ...

    def read(
        self, blocks: Sequence[Block], into: Sequence[memoryview], *, timeout_s: float = READ_TIMEOUT_S
    ) -> list[BlockStatus]:
        """Read and verify: LOADED, CORRUPT (header, key, generation or checksum differ) or READ_ERROR.

        ``into``: writable, ``block_bytes`` each. What is not there by ``timeout_s`` is READ_ERROR. No memory of
        the caller's is touched after the return, also not by a thread that a device keeps waiting.
        """
        ...

    def record(self, removals: Sequence[Removal]) -> bool:
        """Make removals durable: True when no restart can find those blocks again (on the devices that serve).

        False when no device serves, or one is full of removals that it has not compacted yet: try again.
        """
        ...

    def erase(self, places: Sequence[tuple[Extent, int]]) -> bool:
        """Overwrite slots that nobody uses; True when that is flushed."""
        ...

    def devices(self) -> list[DeviceState]: ...

    def close(self) -> None:
        """Flush and let go of the devices. Safe twice."""
        ...
