"""What happens to all devices together at a start: scan, believe the newest, blank the removed, forget removals.

And, later, how removals are forgotten while the store is in use: the headers that they keep dead are blanked
first, on every device, and only then do the logs let go of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.ssd.base import Extent, Found, ScanReport
from kvstrata.storage.ssd.device import Device
from kvstrata.storage.ssd.lanes import Batch, Job
from kvstrata.storage.ssd.removal_book import RemovalBook
from kvstrata.storage.ssd.removals import RemovalIndex
from kvstrata.storage.ssd.scan import ExtentScan, blank_headers, dead_slots, newest, scan_extent

log = get_logger(__name__)

#: Removals that take less than this part of a log are kept as they are.
_FOLDED_PART: Final = 0.25


def recover(
    devices: Sequence[Device],
    extents: Sequence[Extent],
    book: RemovalBook,
    found: Found,
    clock: Callable[[], float],
) -> ScanReport:
    """Read every header; see :class:`kvstrata.storage.ssd.base.SsdStore.scan`."""
    began = clock()
    removals = book.load()
    everything = _scan_all(devices, extents, removals)
    scans = [scan for scan in everything if not devices[scan.extent.device].failed]
    older = newest(scans)
    forgotten = _blank_all(devices, scans, removals) if removals else True
    _serve(devices)
    book.rewrite(RemovalIndex() if forgotten else removals)
    book.compact_with(lambda book: compact(book, extents))
    blocks = 0
    for scan in scans:
        device = devices[scan.extent.device]
        if scan.damaged:
            device.count("damaged_headers", scan.damaged)
        if scan.headers and not device.failed:
            found(scan.extent, scan.slot_bytes, scan.headers)
            blocks += len(scan.headers)
    for device in devices:
        device.scanned = True
    return ScanReport(
        slots=sum(scan.slots for scan in scans),
        blocks=blocks,
        stale=older + sum(scan.stale for scan in scans),
        damaged=sum(scan.damaged + scan.unreadable for scan in scans),
        device_bytes=sum(d.superblock.extents * d.superblock.extent_bytes for d in devices if not d.failed),
        seconds=clock() - began,
    )


def _scan_all(devices: Sequence[Device], extents: Sequence[Extent], removals: RemovalIndex) -> list[ExtentScan]:
    scans: list[ExtentScan] = []
    batches = {device.index: Batch() for device in devices}
    for extent in extents:
        device = devices[extent.device]

        def run(buffer: memoryview, device: Device = device, extent: Extent = extent) -> None:
            scans.append(scan_extent(device, extent, removals, buffer))

        if not device.failed:
            device.readers.submit(Job(run, batches[device.index]))
    for device in devices:
        device.settle(batches[device.index])
    return sorted(scans, key=lambda scan: scan.extent.index)


def _blank_all(devices: Sequence[Device], scans: Sequence[ExtentScan], removals: RemovalIndex) -> bool:
    """Zero the headers of all removed and damaged blocks; True when no device can bring one of them back."""
    if any(device.failed for device in devices) or any(scan.unreadable for scan in scans):
        return False
    for device in devices:
        dead = [scan for scan in scans if scan.extent.device == device.index and scan.dead]

        def run(buffer: memoryview, device: Device = device, dead: list[ExtentScan] = dead) -> None:
            for scan in dead:
                blank_headers(device, scan, removals, buffer)
            device.flush()

        if dead and not device.call(device.writers, run):
            return False
    return True


def _serve(devices: Sequence[Device]) -> None:
    """All devices that are here say so, so that one that is away now is known by that when it comes back."""
    for device in devices:
        if not device.failed:
            superblock = replace(device.superblock, served=device.superblock.starts)

            def run(_: memoryview, device: Device = device, superblock: object = superblock) -> None:
                device.folder.save(superblock)  # type: ignore[arg-type]

            if not device.call(device.writers, run):
                device.fail("its superblock could not be written")


def compact(book: RemovalBook, extents: Sequence[Extent]) -> Iterator[None]:
    """Make room in the logs, a step at a time: fold them, and if that is not enough blank what they keep dead."""
    with book.lock:
        upto = book.next_number
        removals = book.since(0)
        folded = sum(len(entry) for entry in removals.encode())
        if folded < _FOLDED_PART * min(device.superblock.removal_bytes for device in book.devices):
            book.rewrite(removals)
            return
    for extent in extents:
        if any(device.failed for device in book.devices):
            return  # its blocks may come back, so the others have to remember
        yield
        if not _blank_extent(book.devices[extent.device], extent, removals):
            return
    for device in book.devices:
        if not device.call(device.writers, lambda _, device=device: device.flush()):  # type: ignore[misc]
            return
    with book.lock:
        book.rewrite(book.since(upto))
    book.compactions += 1
    log.info("removal logs were compacted")


def _blank_extent(device: Device, extent: Extent, removals: RemovalIndex) -> bool:
    scan: ExtentScan | None = None

    def look(buffer: memoryview) -> None:
        nonlocal scan
        scan = dead_slots(device, extent, removals, buffer)

    if not device.call(device.readers, look) or scan is None or scan.unreadable:
        return False
    dead = scan
    return not dead.dead or device.call(device.writers, lambda buffer: blank_headers(device, dead, removals, buffer))
