"""A store driven by hand: blocks of known bytes, an allocator without policy, restarts, and what came back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstrata.proto.keys import Namespace
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.records import Block, NamespaceEntry, Shelf
from kvstrata.storage.ssd.base import Extent, Removal, ScanReport, SlotHeader
from kvstrata.storage.ssd.log import DeviceConfig, Limits, SsdLog
from kvstrata.storage.ssd.raw_file import DiskFile, OpenFile
from kvstrata.storage.ssd.tenant_keys import TenantKeys

EXTENT_BYTES = 256 << 10
#: Extents of 256 KiB and the least room for removals.
DEVICE_BYTES = 8 * EXTENT_BYTES + (256 << 10)
BLOCK_BYTES = 10_000
QUICK = Limits(slow_s=0.5, stuck_s=5.0, read_threads=4)


def key(number: int, width: int = 16) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=width).digest()


def payload(name: bytes, version: int, nbytes: int) -> bytes:
    return hashlib.shake_128(name + version.to_bytes(8, "little")).digest(nbytes)


@dataclass(frozen=True, slots=True)
class Found:
    extent: Extent
    slot: int
    slot_bytes: int
    header: SlotHeader


class Store:
    """One node's SSD tier over ``folders``. ``blocks`` is what its index would hold."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        open_file: OpenFile = DiskFile,
        limits: Limits = QUICK,
        block_bytes: int = BLOCK_BYTES,
        device_bytes: int = DEVICE_BYTES,
        extent_bytes: int | None = EXTENT_BYTES,
        clock: Callable[[], float] | None = None,
        keys: TenantKeys | None = None,
    ) -> None:
        configs = [DeviceConfig(folder, device_bytes) for folder in folders]
        more = {} if clock is None else {"clock": clock}
        self.log = SsdLog.open(
            configs, node_id="node", extent_bytes=extent_bytes, open_file=open_file, limits=limits, keys=keys, **more
        )
        self.namespace = Namespace("model", block_bytes, 16)
        self.entry = NamespaceEntry(1, self.namespace)
        self.blocks: dict[bytes, Block] = {}
        self.found: list[Found] = []
        self.report: ScanReport | None = None

    def scan(self) -> Store:
        self.report = self.log.scan(self._found)
        for one in self.found:
            assert one.header.namespace == self.namespace
        by_extent: dict[int, list[Found]] = {}
        for one in self.found:
            by_extent.setdefault(one.extent.index, []).append(one)
        for its in by_extent.values():
            extent = its[0].extent
            self.log.arena.adopt(
                extent, its[0].slot_bytes, [f.slot for f in its], max(f.header.generation for f in its)
            )
            for one in its:
                header = one.header
                block = self._block(header.hash, header.salt, extent, one.slot, header.generation, header.checksum)
                self.blocks[header.hash] = block
        return self

    def _found(self, extent: Extent, slot_bytes: int, headers: Sequence[tuple[int, SlotHeader]]) -> None:
        self.found += [Found(extent, slot, slot_bytes, header) for slot, header in headers]

    def _block(self, name: bytes, salt: str, extent: Extent, slot: int, generation: int, checksum: int) -> Block:
        block = Block(Shelf(self.entry, salt), name, extent, slot, generation, 0)
        block.checksum = checksum
        extent.blocks[slot] = block
        extent.generations[slot] = generation
        self.log.arena.bytes_used += extent.slot_bytes
        return block

    def admit(self, name: bytes, data: bytes, salt: str = "") -> Block | None:
        """A slot for a block; None when nothing is free."""
        slots = self.log.arena.allocate(self.log.slot_bytes(len(data)), 1)
        if not slots:
            return None
        extent, (slot,) = slots[0]
        generation = self.log.arena.next_generation()
        return self._block(name, salt, extent, slot, generation, xxhash.xxh3_64_intdigest(data))

    def write(self, versions: dict[bytes, bytes], salt: str = "") -> dict[bytes, bool]:
        """Store payloads by key; blocks that are durable join ``blocks``."""
        blocks = {name: block for name, data in versions.items() if (block := self.admit(name, data, salt)) is not None}
        items = [(block, header_of(block), memoryview(versions[name])) for name, block in blocks.items()]
        flushed = self.log.write(items)
        for (name, block), good in zip(blocks.items(), flushed, strict=True):
            if good:
                self.evict(name)
                self.blocks[name] = block
            else:
                self.log.arena.free(block.slab, block.slot)
        return dict(zip(blocks, flushed, strict=True))

    def evict(self, name: bytes) -> None:
        """Forget a block; its bytes stay where they are, as an eviction leaves them."""
        if (block := self.blocks.pop(name, None)) is not None:
            self.log.arena.free(block.slab, block.slot)

    def remove(self, names: Sequence[bytes], salt: str = "") -> bool:
        below = self.log.arena.next_generation()
        for name in names:
            self.evict(name)
        return self.log.record([Removal(below, self.namespace, b"".join(names), salt=salt)])

    def read(self, names: Sequence[bytes], **options: float) -> list[tuple[BlockStatus, bytes]]:
        blocks = [self.blocks[name] for name in names]
        into = [bytearray(block.shelf.entry.block_bytes) for block in blocks]
        statuses = self.log.read(blocks, [memoryview(one) for one in into], **options)
        return [(status, bytes(one)) for status, one in zip(statuses, into, strict=True)]

    def close(self) -> None:
        self.log.close()


def header_of(block: Block) -> SlotHeader:
    shelf = block.shelf
    return SlotHeader(
        shelf.entry.namespace, shelf.epoch, shelf.salt, block.hash, block.generation, block.checksum, index=block.index
    )


def versions_of(numbers: range, version: int = 0, nbytes: int = BLOCK_BYTES) -> dict[bytes, bytes]:
    return {key(number): payload(key(number), version, nbytes) for number in numbers}
