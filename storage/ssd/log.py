"""The SSD tier's store: blocks on one or several devices, each found again after a restart or surely gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from kvstrata.proto.logs import get_logger
from kvstrata.proto.status import BlockStatus
from kvstrata.storage.arena import Arena
from kvstrata.storage.records import Block
from kvstrata.storage.ssd.base import (
    READ_TIMEOUT_S,
    DeviceState,
    Extent,
    Found,
    Removal,
    ScanReport,
    SlotHeader,
)
from kvstrata.storage.ssd.device import Device, Limits
from kvstrata.storage.ssd.lanes import Batch, Job
from kvstrata.storage.ssd.opening import START_BITS, DeviceConfig, open_devices
from kvstrata.storage.ssd.raw_file import DiskFile, OpenFile
from kvstrata.storage.ssd.recovery import recover
from kvstrata.storage.ssd.removal_book import RemovalBook
from kvstrata.storage.ssd.slots import slot_bytes_of
from kvstrata.storage.ssd.transfers import Item, erase_run, expected_header, item_of, read_run, runs, write_run
from kvstrata.transfer.loops import Loop

if TYPE_CHECKING:
    from kvstrata.storage.ssd.tenant_keys import TenantKeys

log = get_logger(__name__)

_COMPACT_PERIOD_S: Final = 5.0
_COMPACT_BOUND_S: Final = 120.0
T = TypeVar("T")


class SsdLog:
    """An :class:`kvstrata.storage.ssd.base.SsdStore` on real files. Made by :meth:`open`, then scanned once."""

    def __init__(
        self,
        devices: Sequence[Device],
        extent_bytes: int,
        clock: Callable[[], float],
        keys: TenantKeys | None = None,
    ) -> None:
        self._devices = list(devices)
        self._keys = keys
        self._keys_problem = ""
        self._clock = clock
        extents: list[Extent] = []
        # By turns, so that devices fill side by side.
        for ordinal in range(max(device.superblock.extents for device in devices)):
            for device in devices:
                if not device.failed and ordinal < device.superblock.extents:
                    extents.append(Extent(len(extents), extent_bytes, device.index, ordinal * extent_bytes))
        self.arena: Arena[Extent] = Arena(extents, extent_bytes)
        start = max(device.superblock.starts for device in devices)
        self.arena.pass_generation(start << START_BITS)
        self._removals = RemovalBook(self._devices, start << START_BITS, clock)
        #: Compacts the removal logs.
        self.loop = Loop("ssd-removals", _COMPACT_PERIOD_S, self._removals.tend, bound_s=_COMPACT_BOUND_S)
        self.loops: Sequence[Loop] = (self.loop,)
        self._removals.wake = self.loop.wake
        self._closed = False

    @classmethod
    def open(
        cls,
        devices: Sequence[DeviceConfig],
        *,
        node_id: str,
        extent_bytes: int | None = None,
        open_file: OpenFile = DiskFile,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        keys: TenantKeys | None = None,
    ) -> SsdLog:
        """Lock and lay out the devices. Raises :class:`ConfigError`, which says what to do.

        ``extent_bytes`` None: what the devices were made with, or an eighth of the smallest (64 MiB to 1 GiB).
        ``open_file`` is the seam for faults (storage/ssd/faults.py). ``keys`` encrypt all payloads.
        """
        opened, size = open_devices(devices, node_id, extent_bytes, open_file, limits, clock, keys)
        return cls(opened, size, clock, keys)

    def slot_bytes(self, block_bytes: int) -> int:
        return slot_bytes_of(block_bytes)

    def scan(self, found: Found) -> ScanReport:
        """See :class:`SsdStore`. Blocks that were removed are blanked, then their removals are forgotten."""
        salts: set[str] = set()

        def noted(extent: Extent, slot_bytes: int, headers: Sequence[tuple[int, SlotHeader]]) -> None:
            salts.update(header.salt for _, header in headers)
            found(extent, slot_bytes, headers)

        report = recover(self._devices, self.arena.slabs, self._removals, noted, self._clock)
        self._forget_keys_but_of(salts)
        return report

    def write(self, items: Sequence[tuple[Block, SlotHeader, memoryview]]) -> list[bool]:
        written = [False] * len(items)
        made = [item_of(position, *item) for position, item in enumerate(items)]
        flushed: set[int] = set()
        batches = []
        for device, its in self._by_device(self._to_encrypt(made), lambda item: item.extent):
            if not device.available():
                device.count("refused", len(its))
                continue
            batch = Batch()
            for run in runs(its, device.limits.write_threads):
                device.writers.submit(Job(_bound(write_run, device, run, batch, written), batch))
            batches.append((device, batch))
        flushing = []
        for device, batch in batches:
            if device.settle(batch):
                flush = Batch()
                device.writers.submit(Job(_bound(_flush, device, flushed), flush))
                flushing.append((device, flush))
        for device, flush in flushing:
            device.settle(flush)
        return [
            done and item.extent.device in flushed and not self._devices[item.extent.device].failed
            for done, item in zip(written, made, strict=True)
        ]

    def read(
        self, blocks: Sequence[Block], into: Sequence[memoryview], *, timeout_s: float = READ_TIMEOUT_S
    ) -> list[BlockStatus]:
        deadline = self._clock() + timeout_s
        statuses = [BlockStatus.READ_ERROR] * len(blocks)
        made = [
            item_of(position, block, expected_header(block), target)
            for position, (block, target) in enumerate(zip(blocks, into, strict=True))
        ]
        readable = self._with_ciphers(made)
        if len(readable) < len(made):
            for position in set(range(len(made))) - {item.position for item in readable}:
                statuses[position] = BlockStatus.CORRUPT
        batches = []
        for device, its in self._by_device(readable, lambda item: item.extent):
            if not device.available():
                device.count("refused", len(its))
                continue
            batch = Batch()
            for run in runs(its, device.limits.read_threads):
                device.readers.submit(Job(_bound(read_run, device, run, batch, statuses), batch))
            batches.append((device, batch))
        for device, batch in batches:
            if not device.settle(batch, deadline):
                device.count("late")
        return list(statuses)  # a copy: a late thread may still say what became of its run

    def record(self, removals: Sequence[Removal]) -> bool:
        return self._removals.record(removals)

    def erase(self, places: Sequence[tuple[Extent, int]]) -> bool:
        flushed: set[int] = set()
        asked: set[int] = set()
        for device, its in self._by_device(places, lambda place: place[0]):
            asked.add(device.index)
            if not device.available():
                continue
            stretches = _stretches([_stretch(device, extent, slot) for extent, slot in its])

            def run(buffer: memoryview, device: Device = device, stretches: list[list[int]] = stretches) -> None:
                for offset, nbytes in stretches:
                    erase_run(device, offset, nbytes, buffer)
                _flush(device, flushed, buffer)

            if device.call(device.writers, run):
                device.count("erased", len(its))
        return asked <= flushed

    def devices(self) -> list[DeviceState]:
        return [device.state() for device in self._devices]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.loop.stop()  # it has ended, unless its owner could not wait for it
            for device in self._devices:
                device.close()

    def _to_encrypt(self, items: list[Item]) -> list[Item]:
        """Those whose tenant has a key by now, with their ciphers; without encryption all."""
        if self._keys is not None:
            try:
                self._keys.ensure(item.header.salt for item in items)
                self._keys_problem = ""
            except OSError as error:
                if str(error) != self._keys_problem:  # once, not with each write
                    log.error("a tenant's key cannot be kept: its blocks do not go to SSD", reason=str(error))
                self._keys_problem = str(error)
        return self._with_ciphers(items)

    def _with_ciphers(self, items: list[Item]) -> list[Item]:
        if self._keys is None:
            return items
        having = []
        for item in items:
            key = self._keys.key(item.header.salt)
            if key is not None:
                having.append(replace(item, cipher=key.slot(item.header)))
            else:
                self._devices[item.extent.device].count("no_key")
        return having

    def _forget_keys_but_of(self, salts: set[str]) -> None:
        """Nothing of other tenants can be found any more, unless a device did not say what it has."""
        if self._keys is None or any(device.failed for device in self._devices):
            return
        self._keys.keep_only(salts)
        try:
            self._keys.save()
        except OSError as error:
            log.warning("keys of tenants without blocks are still kept", reason=str(error))

    def _by_device(self, things: Iterable[T], extent_of: Callable[[T], Extent]) -> list[tuple[Device, list[T]]]:
        sorted_out: dict[int, list[T]] = {}
        for thing in things:
            sorted_out.setdefault(extent_of(thing).device, []).append(thing)
        return [(self._devices[index], its) for index, its in sorted_out.items()]


def _flush(device: Device, flushed: set[int], _: memoryview) -> None:
    device.flush()
    flushed.add(device.index)


def _bound(run: Callable[..., None], *arguments: object) -> Callable[[memoryview], None]:
    """``run`` with all but the thread's buffer, which comes last."""

    def job(buffer: memoryview) -> None:
        run(*arguments, buffer)

    return job


def _stretch(device: Device, extent: Extent, slot: int) -> tuple[int, int]:
    """(offset, bytes) of a slot; of an extent that is no longer cut, as the device says that it was."""
    slot_bytes = extent.slot_bytes or device.shapes[device.ordinal(extent)].slot_bytes
    return extent.room_for(slot_bytes)[1] + slot * slot_bytes if slot_bytes else 0, slot_bytes


def _stretches(pieces: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Neighbours joined: [offset, bytes]."""
    joined: list[list[int]] = []
    for offset, nbytes in sorted(pieces):
        if joined and offset == joined[-1][0] + joined[-1][1]:
            joined[-1][1] += nbytes
        elif nbytes:
            joined.append([offset, nbytes])
    return joined


__all__ = ["DeviceConfig", "Limits", "SsdLog"]
