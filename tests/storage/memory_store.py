"""An :class:`SsdStore` in memory, that can be held up, made to fail, and opened again as after a crash."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.arena import Arena
from kvstrata.storage.records import Block
from kvstrata.storage.ssd.base import (
    HEADER_BYTES,
    READ_TIMEOUT_S,
    SECTOR_BYTES,
    DeviceState,
    Extent,
    Found,
    Removal,
    ScanReport,
    SlotHeader,
)
from kvstrata.transfer.loops import Loop

EXTENT_BYTES = 256 << 10


@dataclass(slots=True)
class Disk:
    """What outlives a process: slots by (extent, slot), and removals."""

    slots: dict[tuple[int, int], tuple[int, SlotHeader, bytes]] = field(default_factory=dict)
    removals: list[Removal] = field(default_factory=list)


class MemoryStore:
    """``open_gate`` cleared: reads and writes wait. ``fails``: hashes by what their next reads say."""

    loops: Sequence[Loop] = ()

    def __init__(
        self, extents: int = 8, disk: Disk | None = None, devices: int = 1, *, extent_bytes: int = EXTENT_BYTES
    ) -> None:
        each = [Extent(i, extent_bytes, i % devices, i * extent_bytes) for i in range(extents)]
        self.arena = Arena(each, extent_bytes)
        self.disk = disk or Disk()
        # As a real log's: what is written after a restart is newer than all that was removed before it.
        self.arena.pass_generation(max((removal.below for removal in self.disk.removals), default=0))
        self.open_gate = threading.Event()
        self.open_gate.set()
        self.fails: dict[bytes, BlockStatus] = {}
        self.broken: set[int] = set()
        self.reads = self.writes = 0
        self.closed = False
        self._devices = devices

    def slot_bytes(self, block_bytes: int) -> int:
        return HEADER_BYTES + -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES

    def scan(self, found: Found) -> ScanReport:
        newest: dict[object, tuple[int, int, int, SlotHeader]] = {}
        for (extent, slot), (nbytes, header, _) in self.disk.slots.items():
            key = (header.namespace, header.salt, header.hash)
            if not any(_matches(removal, header) for removal in self.disk.removals) and (
                key not in newest or newest[key][3].generation < header.generation
            ):
                newest[key] = (extent, slot, nbytes, header)
        for extent_ in self.arena.slabs:
            rows = sorted((slot, header) for index, slot, _, header in newest.values() if index == extent_.index)
            sizes = {nbytes for index, _, nbytes, _ in newest.values() if index == extent_.index}
            if rows:
                assert len(sizes) == 1, "an extent of two slot sizes"
                found(extent_, sizes.pop(), sorted(rows, key=lambda row: row[0]))
        return ScanReport(len(self.disk.slots), len(newest), 0, 0, self.arena.bytes_total, 0.001)

    def write(self, items: Sequence[tuple[Block, SlotHeader, memoryview]]) -> list[bool]:
        self.open_gate.wait(10)
        self.writes += 1
        done: list[bool] = []
        for block, header, payload in items:
            assert isinstance(block.slab, Extent)
            ok = block.slab.device not in self.broken
            if ok:
                for place in [p for p in self.disk.slots if p[0] == block.slab.index]:
                    if self.disk.slots[place][0] != block.slab.slot_bytes:
                        del self.disk.slots[place]  # it has been cut anew
                place = (block.slab.index, block.slot)
                self.disk.slots[place] = block.slab.slot_bytes, header, bytes(payload)
            done.append(ok)
        return done

    def read(
        self, blocks: Sequence[Block], into: Sequence[memoryview], *, timeout_s: float = READ_TIMEOUT_S
    ) -> list[BlockStatus]:
        self.open_gate.wait(10)
        self.reads += 1
        return [self._read(block, view) for block, view in zip(blocks, into, strict=True)]

    def _read(self, block: Block, into: memoryview) -> BlockStatus:
        assert isinstance(block.slab, Extent)
        if block.hash in self.fails:
            return self.fails[block.hash]
        if block.slab.device in self.broken:
            return BlockStatus.READ_ERROR
        _, header, payload = self.disk.slots[block.slab.index, block.slot]
        if header.hash != block.hash or header.generation != block.generation:
            return BlockStatus.CORRUPT
        into[:] = payload
        return BlockStatus.LOADED

    def record(self, removals: Sequence[Removal]) -> bool:
        self.disk.removals.extend(removals)
        return True

    def erase(self, places: Sequence[tuple[Extent, int]]) -> bool:
        for extent, slot in places:
            self.disk.slots.pop((extent.index, slot), None)
        return True

    def devices(self) -> list[DeviceState]:
        return [
            DeviceState(f"/mnt/{i}", "failed" if i in self.broken else "serving", self.arena.bytes_total, "it broke")
            for i in range(self._devices)
        ]

    def close(self) -> None:
        self.closed = True


def _matches(removal: Removal, header: SlotHeader) -> bool:
    if header.generation > removal.below:
        return False
    if removal.hashes:
        width = len(header.hash)
        hashes = {removal.hashes[start : start + width] for start in range(0, len(removal.hashes), width)}
        return removal.namespace == header.namespace and removal.salt == header.salt and header.hash in hashes
    return (
        removal.group in ("", header.namespace.group)
        and removal.salt in (None, header.salt)
        and (removal.epoch is None or header.epoch < removal.epoch)
    )
