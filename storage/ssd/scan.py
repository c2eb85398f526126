"""Recovery: every header of a device is read, and the newest sound one of each key is what there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstrata.proto.keys import Namespace
from kvstrata.storage.ssd.base import SECTOR_BYTES, Extent, SlotHeader
from kvstrata.storage.ssd.device import Device
from kvstrata.storage.ssd.raw_file import read_fully, write_fully
from kvstrata.storage.ssd.removals import RemovalIndex
from kvstrata.storage.ssd.slots import Place, decode_header, decode_shape, is_blank, slot_bytes_of

#: Headers nearer to each other than this are read in one stretch, with the payloads between them.
STRIDE_BYTES = 32 << 10
Sector = tuple[int, memoryview | None]


@dataclass(slots=True)
class ExtentScan:
    """What one extent says: sound headers by slot, and slots whose header must be blanked before it is forgotten."""

    extent: Extent
    slot_bytes: int = 0
    headers: list[tuple[int, SlotHeader]] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    slots: int = 0
    stale: int = 0
    damaged: int = 0
    unreadable: int = 0


def scan_extent(device: Device, extent: Extent, removals: RemovalIndex, buffer: memoryview) -> ExtentScan:
    """Read the shape and all headers of one extent; a sector that cannot be read is counted."""
    scan = ExtentScan(extent)
    ordinal = device.ordinal(extent)
    sector = _sector(device, extent.device_offset, buffer)
    if sector is None:
        scan.unreadable += 1
        return scan
    shape = decode_shape(sector, device.superblock.device_id, ordinal, extent.nbytes)
    if shape is None:
        scan.damaged += 1
        return scan
    device.shapes[ordinal] = shape
    if not shape.slot_bytes:
        return scan
    scan.slot_bytes = shape.slot_bytes
    for slot, header_sector in sectors(device, extent, shape.slot_bytes, buffer):
        scan.slots += 1
        if header_sector is None:
            scan.unreadable += 1
        elif not is_blank(header_sector):
            _judge(scan, device.place(extent, slot), removals, slot, header_sector)
    return scan


def _judge(scan: ExtentScan, here: Place, removals: RemovalIndex, slot: int, sector: memoryview) -> None:
    decoded = decode_header(sector)
    if decoded is None:
        scan.damaged += 1
        scan.dead.append(slot)
        return
    header, place = decoded
    if place != here or slot_bytes_of(header.namespace.block_bytes) != scan.slot_bytes:
        # Left over from another cut of the extent, or from another device; its serial never comes again.
        scan.stale += 1
        return
    if removals.covers(header):
        scan.stale += 1
        scan.dead.append(slot)
        return
    scan.headers.append((slot, header))


def dead_slots(device: Device, extent: Extent, removals: RemovalIndex, buffer: memoryview) -> ExtentScan:
    """As :func:`scan_extent`, of an extent that is in use: what another thread writes just now may look damaged."""
    scan = ExtentScan(extent, device.shapes[device.ordinal(extent)].slot_bytes)
    if scan.slot_bytes:
        for slot, sector in sectors(device, extent, scan.slot_bytes, buffer):
            if sector is None:
                scan.unreadable += 1
            elif is_dead(device, extent, removals, slot, sector):
                scan.dead.append(slot)
    return scan


def is_dead(device: Device, extent: Extent, removals: RemovalIndex, slot: int, sector: memoryview) -> bool:
    """Nobody may find what this sector says, now or after it has been forgotten that it was removed."""
    if is_blank(sector):
        return False
    decoded = decode_header(sector)
    if decoded is None:
        return True
    header, place = decoded
    return place == device.place(extent, slot) and removals.covers(header)


def sectors(device: Device, extent: Extent, slot_bytes: int, buffer: memoryview) -> Iterator[Sector]:
    """(slot, its first sector or None when it cannot be read), valid until the next one is asked for."""
    slots, data_offset = extent.room_for(slot_bytes)
    if slot_bytes > STRIDE_BYTES:
        # Many reads, then many looks: threads that mix them wait for the interpreter after each read.
        room = len(buffer) // SECTOR_BYTES
        for first in range(0, slots, room):
            batch = range(first, min(first + room, slots))
            read = [
                _sector(device, data_offset + slot * slot_bytes, buffer[(slot - first) * SECTOR_BYTES :])
                for slot in batch
            ]
            yield from zip(batch, read, strict=True)
        return
    together = min(slots, len(buffer) // slot_bytes)
    for first in range(0, slots, together or 1):
        count = min(together, slots - first)
        stretch = buffer[: count * slot_bytes]
        try:
            read_fully(device.file, stretch, data_offset + first * slot_bytes)
        except OSError:  # one by one, to lose no more than what cannot be read
            for slot in range(first, first + count):
                yield slot, _sector(device, data_offset + slot * slot_bytes, buffer)
            continue
        for number in range(count):
            yield first + number, stretch[number * slot_bytes : number * slot_bytes + SECTOR_BYTES]


def _sector(device: Device, offset: int, buffer: memoryview) -> memoryview | None:
    sector = buffer[:SECTOR_BYTES]
    try:
        read_fully(device.file, sector, offset)
    except OSError as error:
        device.operation_failed(error)
        return None
    device.worked()
    return sector


def newest(scans: list[ExtentScan]) -> int:
    """Keep only the newest header of each key, whatever extent it is in; how many others there were."""
    best: dict[tuple[Namespace, str, bytes], int] = {}
    for scan in scans:
        for _, header in scan.headers:
            key = (header.namespace, header.salt, header.hash)
            best[key] = max(best.get(key, 0), header.generation)
    older = 0
    for scan in scans:
        before = len(scan.headers)
        scan.headers = [
            (slot, header)
            for slot, header in scan.headers
            if header.generation == best[header.namespace, header.salt, header.hash]
        ]
        older += before - len(scan.headers)
    return older


def blank_headers(device: Device, scan: ExtentScan, removals: RemovalIndex, buffer: memoryview) -> None:
    """Zero the headers of dead slots, each looked at once more with all writers kept out. Not flushed; OSError."""
    data_offset = scan.extent.room_for(scan.slot_bytes)[1]
    sector = buffer[:SECTOR_BYTES]
    for slot in scan.dead:
        offset = data_offset + slot * scan.slot_bytes
        with device.gate.alone():
            if device.shapes[device.ordinal(scan.extent)].slot_bytes != scan.slot_bytes:
                return  # cut anew meanwhile: what was there does not count any more
            read_fully(device.file, sector, offset)
            if is_dead(device, scan.extent, removals, slot, sector):
                sector[:] = bytes(SECTOR_BYTES)
                write_fully(device.file, sector, offset)
