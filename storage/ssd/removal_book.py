"""The removal logs of all devices as one: written to each, read together, compacted when they grow.

A record has one number in all logs. What one log lost, another may have; what no log has any more could name
any block of an earlier start, and so none of those is believed (``RemovalIndex.everything_below``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.ssd.base import Removal
from kvstrata.storage.ssd.device import Device
from kvstrata.storage.ssd.lanes import Batch, Job
from kvstrata.storage.ssd.raw_file import RawFile
from kvstrata.storage.ssd.removal_log import OPENING_RECORDS, LogContent, LogFull, load, make
from kvstrata.storage.ssd.removals import RemovalIndex

log = get_logger(__name__)

#: A device that has not recorded removals by then is taken out: it must not say "gone" and bring blocks back.
RECORD_TIMEOUT_S: Final = 10.0
#: Logs that are fuller than this are compacted.
COMPACT_AT: Final = 0.5
#: A compaction works so long at a time.
_TURN_S: Final = 1.0


class RemovalBook:
    """Thread-safe. ``first_number`` is greater than any number of an earlier start."""

    def __init__(self, devices: Sequence[Device], first_number: int, clock: Callable[[], float]) -> None:
        self.devices = devices
        self.lock = threading.Lock()
        self.wake: Callable[[], None] = lambda: None
        self.compactions = 0
        self._compact: Callable[[RemovalBook], Iterator[None]] | None = None
        self._under_way: Iterator[None] | None = None
        self._first_number = first_number
        self.next_number = first_number
        self._clock = clock

    # ------------------------------------------------------------------ writing

    def record(self, removals: Sequence[Removal]) -> bool:
        """On every device that serves, or False: see :class:`kvstrata.storage.ssd.base.SsdStore`."""
        index = RemovalIndex()
        for removal in removals:
            index.add(removal)
        entries = list(index.encode())
        if not entries:
            return True
        with self.lock:
            serving = [device for device in self.devices if not device.failed and device.removals is not None]
            appended: set[int] = set()
            full: set[int] = set()
            batches = []
            for device in serving:
                batch = Batch()
                device.writers.submit(Job(self._appending(device, entries, appended, full), batch))
                batches.append((device, batch))
            deadline = self._clock() + RECORD_TIMEOUT_S
            for device, batch in batches:
                device.settle(batch, deadline)
                if device.index not in appended and device.index not in full:
                    device.fail("it did not record removals")
            if appended:
                self.next_number += 1
            fullest = max((d.removals.fill for d in serving if d.removals is not None), default=0.0)
        if fullest > COMPACT_AT:
            self.wake()
        return bool(appended) and not full

    def _appending(
        self, device: Device, entries: list[bytes], appended: set[int], full: set[int]
    ) -> Callable[[memoryview], None]:
        number = self.next_number

        def run(_: memoryview) -> None:
            assert device.removals is not None
            try:
                device.removals.append(number, entries)
            except LogFull:
                full.add(device.index)
                device.count("removals_full")
            else:
                appended.add(device.index)

        return run

    # ------------------------------------------------------------------ reading

    def load(self) -> RemovalIndex:
        """All removals of earlier starts, as far as the devices still know them."""
        contents = [self._load_one(device) for device in self.devices if not device.failed]
        index = RemovalIndex()
        numbers: set[int] = set()
        for content in contents:
            numbers |= content.bodies.keys()
            for body in content.bodies.values():
                index.merge(body)
        if any(content.lost is None or content.lost - numbers for content in contents):
            log.error("removals were lost: no block of an earlier start is used")
            index.everything_below = self._first_number
        return index

    def since(self, number: int) -> RemovalIndex:
        """What was recorded in this start from a number on. The caller holds the lock."""
        index = RemovalIndex()
        for device in self.devices:
            if not device.failed:
                for its_number, body in self._load_one(device).bodies.items():
                    if its_number >= number:
                        index.merge(body)
        return index

    def _load_one(self, device: Device) -> LogContent:
        content = LogContent(lost=None)

        def run(_: memoryview) -> None:
            nonlocal content
            with ExitStack() as closing:
                try:
                    file: RawFile = device.open_file(device.folder.removals)
                except FileNotFoundError:
                    return
                closing.callback(file.close)
                content = load(file, device.superblock.removal_bytes)

        device.call(device.readers, run)
        if content.damaged:
            device.count("removals_damaged")
        return content

    # ------------------------------------------------------------------ making room

    def rewrite(self, index: RemovalIndex) -> bool:
        """Every log anew, with this in it; False when one could not be. The caller holds the lock, or is alone."""
        begin = self.next_number
        entries = list(index.encode())
        done = True
        for device in self.devices:
            if device.failed:
                continue

            def run(_: memoryview, device: Device = device) -> None:
                nbytes = device.superblock.removal_bytes
                fresh = make(device.folder.removals, nbytes, begin, entries, device.open_file)
                old, device.removals = device.removals, fresh
                if old is not None:
                    old.close()

            if not device.call(device.writers, run):
                done = False
                device.fail("its removals could not be written anew")
        self.next_number = begin + OPENING_RECORDS + bool(entries)
        return done

    def compact_with(self, compact: Callable[[RemovalBook], Iterator[None]]) -> None:
        """How logs are compacted from now on: a generator, driven by :meth:`tend`."""
        self._compact = compact

    def tend(self) -> None:
        """A background turn: compact logs that are half full, for a second at a time."""
        if self._under_way is None:
            if self._compact is None or not self._wants_compaction():
                return
            self._under_way = self._compact(self)
        until = self._clock() + _TURN_S
        while self._clock() < until:
            try:
                next(self._under_way)
            except StopIteration:
                self._under_way = None
                return
        self.wake()

    def _wants_compaction(self) -> bool:
        return any(
            device.removals is not None and device.removals.fill > COMPACT_AT
            for device in self.devices
            if not device.failed
        )
