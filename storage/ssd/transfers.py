"""Blocks to and from slots: neighbours in one operation, every byte checked before a caller may have it.

All bytes pass through the buffer of the thread that moves them (see storage/ssd/lanes.py for why), which also
makes every operation one aligned piece of memory, whatever the block size. A slot larger than the buffer goes
piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvstrata.proto.status import BlockStatus
from kvstrata.storage.records import Block
from kvstrata.storage.ssd.base import HEADER_BYTES, SECTOR_BYTES, Extent, SlotHeader
from kvstrata.storage.ssd.device import Device
from kvstrata.storage.ssd.lanes import BUFFER_BYTES, Batch
from kvstrata.storage.ssd.raw_file import read_fully, write_fully
from kvstrata.storage.ssd.slots import decode_header, encode_header

if TYPE_CHECKING:
    from kvstrata.storage.ssd.cipher import SlotCipher

#: Smaller runs are not split further, whatever the number of threads.
RUN_BYTES_MIN = 256 << 10


@dataclass(frozen=True, slots=True)
class Item:
    """One slot of a call: ``position`` in it, the slot as it was when the call began, memory for the payload.

    ``cipher`` of what is on the device; None: it is the payload itself.
    """

    position: int
    extent: Extent
    slot: int
    offset: int
    slot_bytes: int
    header: SlotHeader
    payload: memoryview
    cipher: SlotCipher | None = None


def item_of(position: int, block: Block, header: SlotHeader, payload: memoryview) -> Item:
    extent = block.slab
    assert isinstance(extent, Extent), "a block in DRAM has no slot on a device"
    assert len(payload) == block.shelf.entry.block_bytes == header.namespace.block_bytes
    return Item(position, extent, block.slot, block.offset, extent.slot_bytes, header, payload)


def expected_header(block: Block) -> SlotHeader:
    """What the slot of a block has to say of itself; parent, index and time are not compared."""
    shelf = block.shelf
    return SlotHeader(
        shelf.entry.namespace, shelf.epoch, shelf.salt, block.hash, block.generation, block.checksum, index=block.index
    )


def runs(items: Sequence[Item], threads: int) -> Iterator[list[Item]]:
    """Neighbouring slots together, as many as fit in a buffer and still give every thread something to do."""
    ordered = sorted(items, key=lambda item: item.offset)
    total = sum(item.slot_bytes for item in ordered)
    limit = min(BUFFER_BYTES, max(RUN_BYTES_MIN, -(-total // threads)))
    run: list[Item] = []
    nbytes = 0
    for item in ordered:
        beside = run and item.extent is run[-1].extent and item.offset == run[-1].offset + run[-1].slot_bytes
        if run and not (beside and nbytes + item.slot_bytes <= limit):
            yield run
            run, nbytes = [], 0
        run.append(item)
        nbytes += item.slot_bytes
    if run:
        yield run


def read_run(device: Device, run: list[Item], batch: Batch, statuses: list[BlockStatus], buffer: memoryview) -> None:
    """Read neighbouring slots, verify each, hand over the good ones. Raises OSError, GivenUp."""
    nbytes = sum(item.slot_bytes for item in run)
    if nbytes > len(buffer):
        (item,) = run
        statuses[item.position] = _read_large(device, item, batch, buffer)
    else:
        read_fully(device.file, buffer[:nbytes], run[0].offset)
        for number, item in enumerate(run):
            start = number * item.slot_bytes
            statuses[item.position] = _take(device, item, batch, buffer[start : start + item.slot_bytes])
    device.worked()
    for item in run:
        device.count("read" if statuses[item.position] == BlockStatus.LOADED else "corrupt")


def _take(device: Device, item: Item, batch: Batch, slot: memoryview) -> BlockStatus:
    payload, rest = slot[HEADER_BYTES : HEADER_BYTES + len(item.payload)], slot[HEADER_BYTES + len(item.payload) :]
    if not _is_header_of(device, item, slot[:SECTOR_BYTES]):
        return BlockStatus.CORRUPT
    if item.cipher is not None:
        item.cipher.apply(payload)
    if xxhash.xxh3_64_intdigest(payload) != item.header.checksum or _any(rest):
        return BlockStatus.CORRUPT
    with batch.touching():
        _copy(item.payload, payload)
    return BlockStatus.LOADED


def _read_large(device: Device, item: Item, batch: Batch, buffer: memoryview) -> BlockStatus:
    digest = xxhash.xxh3_64()
    wanted = len(item.payload)
    for start, nbytes in _pieces(item, len(buffer)):
        read_fully(device.file, buffer[:nbytes], item.offset + start)
        if not start and not _is_header_of(device, item, buffer[:SECTOR_BYTES]):
            return BlockStatus.CORRUPT
        body = buffer[0 if start else HEADER_BYTES : nbytes]
        at = max(0, start - HEADER_BYTES)
        part = body[: wanted - at]
        if item.cipher is not None:
            item.cipher.apply(part, at)
        digest.update(part)
        if _any(body[len(part) :]):
            return BlockStatus.CORRUPT
        with batch.touching():
            _copy(item.payload[at : at + len(part)], part)
    return BlockStatus.LOADED if digest.intdigest() == item.header.checksum else BlockStatus.CORRUPT


def _is_header_of(device: Device, item: Item, sector: memoryview) -> bool:
    decoded = decode_header(sector)
    if decoded is None:
        return False
    header, place = decoded
    wanted = item.header
    return (
        place == device.place(item.extent, item.slot)
        and header.generation == wanted.generation
        and header.checksum == wanted.checksum
        and header.hash == wanted.hash
        and header.salt == wanted.salt
        and header.epoch == wanted.epoch
        and header.namespace == wanted.namespace
    )


def write_run(device: Device, run: list[Item], batch: Batch, written: list[bool], buffer: memoryview) -> None:
    """Write headers and payloads of neighbouring slots; not flushed. Raises OSError, GivenUp."""
    with device.gate.writing():
        device.cut(run[0].extent, run[0].slot_bytes, buffer)
        for part in _writable(device, run):
            nbytes = sum(item.slot_bytes for item, _ in part)
            if nbytes > len(buffer):
                _write_large(device, *part[0], batch, buffer)
            else:
                for number, (item, header) in enumerate(part):
                    start = number * item.slot_bytes
                    _fill(item, header, batch, buffer[start : start + item.slot_bytes])
                write_fully(device.file, buffer[:nbytes], part[0][0].offset)
            device.worked()
            for item, _ in part:
                written[item.position] = True
    device.count("written", sum(written[item.position] for item in run))


def _writable(device: Device, run: list[Item]) -> Iterator[list[tuple[Item, bytes]]]:
    """The run with its headers, without slots whose header cannot be written; those stay unwritten."""
    part: list[tuple[Item, bytes]] = []
    for item in run:
        try:
            part.append((item, encode_header(item.header, device.place(item.extent, item.slot))))
        except ValueError:
            device.count("header_too_long")
            if part:
                yield part
            part = []
    if part:
        yield part


def _fill(item: Item, header: bytes, batch: Batch, slot: memoryview) -> None:
    slot[:HEADER_BYTES] = header
    end = HEADER_BYTES + len(item.payload)
    with batch.touching():
        _copy(slot[HEADER_BYTES:end], item.payload)
    if item.cipher is not None:
        item.cipher.apply(slot[HEADER_BYTES:end])
    slot[end:] = bytes(len(slot) - end)


def _write_large(device: Device, item: Item, header: bytes, batch: Batch, buffer: memoryview) -> None:
    """The piece with the header last, so that a header with nothing behind it is less likely to be found."""
    for start, nbytes in reversed(list(_pieces(item, len(buffer)))):
        if not start:
            buffer[:HEADER_BYTES] = header
        body = buffer[0 if start else HEADER_BYTES : nbytes]
        at = max(0, start - HEADER_BYTES)
        source = item.payload[at : at + len(body)]
        with batch.touching():
            _copy(body[: len(source)], source)
        if item.cipher is not None:
            item.cipher.apply(body[: len(source)], at)
        body[len(source) :] = bytes(len(body) - len(source))
        write_fully(device.file, buffer[:nbytes], item.offset + start)


def erase_run(device: Device, offset: int, nbytes: int, buffer: memoryview) -> None:
    """Zero a stretch of unused slots; not flushed. Raises OSError."""
    piece = min(nbytes, len(buffer))
    buffer[:piece] = bytes(piece)
    with device.gate.writing():
        for start in range(0, nbytes, piece):
            write_fully(device.file, buffer[: min(piece, nbytes - start)], offset + start)
    device.worked()


def _pieces(item: Item, room: int) -> Iterator[tuple[int, int]]:
    """(start in the slot, bytes) of what goes through the buffer at a time."""
    room -= room % SECTOR_BYTES
    for start in range(0, item.slot_bytes, room):
        yield start, min(room, item.slot_bytes - start)


def _copy(target: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock, so that other threads move on."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _any(part: memoryview) -> bool:
    """Whether a slot's padding, at most a sector, has anything in it."""
    return bool(part) and part != bytes(len(part))
