"""One device: its files, its threads, what it says of itself, and when it is taken out.

A device is stalled while an operation takes longer than it should: calls then fail at once instead of
queueing behind it, until it moves again. It has failed, for good, when an operation does not come back at all,
when errors follow each other, when a flush fails (nobody can tell what became of the data), or when it cannot
record removals.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvstrata.proto.logs import get_logger
from kvstrata.storage.ssd.base import SECTOR_BYTES, DeviceState, Extent
from kvstrata.storage.ssd.lanes import Batch, Job, Lane
from kvstrata.storage.ssd.raw_file import OpenFile, RawFile, kind_of, write_fully
from kvstrata.storage.ssd.removal_log import RemovalLog
from kvstrata.storage.ssd.slots import Place, Shape, encode_shape
from kvstrata.storage.ssd.superblock import Folder, Superblock

log = get_logger(__name__)

#: Reads in flight a device, and writes: more gain nothing where it was measured (bench/ssd.py).
READ_THREADS: Final = 16
WRITE_THREADS: Final = 2
#: An operation that takes longer makes the device stalled, then failed.
SLOW_S: Final = 2.0
STUCK_S: Final = 30.0
ERRORS_IN_A_ROW: Final = 8
_LOOK_S: Final = 0.05
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When a device counts as slow or gone; the defaults are for devices, others for tests."""

    slow_s: float = SLOW_S
    stuck_s: float = STUCK_S
    errors_in_a_row: int = ERRORS_IN_A_ROW
    read_threads: int = READ_THREADS
    write_threads: int = WRITE_THREADS


class Gate:
    """Writers pass together; who must have the device's slots for itself waits for them, and they for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers = 0
        self._alone = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._writers)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Device:
    """Thread-safe. ``index`` is its place in the store; ``file`` is None for one that could not be opened."""

    def __init__(
        self,
        index: int,
        folder: Folder,
        file: RawFile | None,
        *,
        open_file: OpenFile,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.folder = folder
        self.open_file = open_file
        self.limits = limits
        self.gate = Gate()
        self.removals: RemovalLog | None = None
        self.problem = ""
        self.scanned = False
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors = 0
        self._failed = False
        self._closing = False
        superblock = self.superblock
        self.shapes = [Shape()] * superblock.extents
        self._shape_locks = [threading.Lock() for _ in self.shapes]
        self._next_serial = superblock.starts << 32
        name = f"ssd{index}"
        self.readers = Lane(
            f"{name}-read", limits.read_threads, wanted=self._wanted, failed=self.operation_failed, clock=clock
        )
        self.writers = Lane(
            f"{name}-write", limits.write_threads, wanted=self._wanted, failed=self.operation_failed, clock=clock
        )

    @property
    def superblock(self) -> Superblock:
        assert self.folder.superblock is not None
        return self.folder.superblock

    @property
    def file(self) -> RawFile:
        assert self._file is not None
        return self._file

    @property
    def failed(self) -> bool:
        return self._failed

    def available(self) -> bool:
        """Worth asking now: neither failed nor stalled."""
        self.look()
        return not self._failed and self._oldest_s() <= self.limits.slow_s

    def look(self) -> None:
        """Take the device out when an operation is stuck. Cheap; whoever waits for the device calls it."""
        oldest = self._oldest_s()
        if oldest > self.limits.stuck_s:
            self.fail(f"an operation has not come back for {oldest:.0f} s")

    def settle(self, batch: Batch, deadline: float | None = None) -> bool:
        """Wait for a call's jobs until a deadline of this clock; True when all have ended.

        Without one it ends all the same: by the jobs or by the device's failure.
        """
        while True:
            left = _LOOK_S if deadline is None else min(_LOOK_S, deadline - self._clock())
            if batch.wait(max(0.0, left)):
                return True
            self.look()
            if self._failed or (deadline is not None and self._clock() >= deadline):
                batch.give_up()
                return False

    def call(self, lane: Lane, run: Callable[[memoryview], None], timeout_s: float | None = None) -> bool:
        """Run one job and wait for it; False when it raised, was late, or the device is out."""
        batch, ended = Batch(), threading.Event()

        def marked(buffer: memoryview) -> None:
            run(buffer)
            ended.set()

        lane.submit(Job(marked, batch))
        self.settle(batch, None if timeout_s is None else self._clock() + timeout_s)
        return ended.is_set()

    # ------------------------------------------------------------------ what happened

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def worked(self) -> None:
        """An operation came back well: errors no longer follow each other."""
        self._errors = 0

    def operation_failed(self, error: OSError) -> None:
        with self._lock:
            self._counts[kind_of(error)] += 1
            self._errors += 1
            many = self._errors >= self.limits.errors_in_a_row
        log.warning("a device operation failed", path=str(self.folder.path), error=str(error))
        if many:
            self.fail(f"{self._errors} operations in a row failed, the last with: {error}")

    def fail(self, problem: str) -> None:
        """Take the device out for good; what is queued ends without being done."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
            self.problem = problem
        log.error("a device is taken out", path=str(self.folder.path), problem=problem)
        self.readers.drop_queued()
        self.writers.drop_queued()

    def state(self) -> DeviceState:
        self.look()
        state = "failed" if self._failed else "serving" if self.scanned else "scanning"
        superblock = self.superblock
        problem = self.problem
        if not self._failed and (oldest := self._oldest_s()) > self.limits.slow_s:
            problem = f"stalled: an operation has been running for {oldest:.1f} s"
        with self._lock:
            counts = dict(self._counts)
        return DeviceState(
            str(self.folder.path),
            state,
            superblock.extents * superblock.extent_bytes,
            problem,
            counts=counts,
            direct=self._file is not None and self._file.direct,
        )

    def _oldest_s(self) -> float:
        return max(self.readers.oldest_s(), self.writers.oldest_s())

    def _wanted(self) -> bool:
        return not self._failed

    # ------------------------------------------------------------------ what its threads do

    def place(self, extent: Extent, slot: int) -> Place:
        """Where a slot is, as its header has to say."""
        ordinal = self.ordinal(extent)
        return Place(self.superblock.device_id, self.shapes[ordinal].serial, ordinal, slot)

    def ordinal(self, extent: Extent) -> int:
        """The extent's number on this device, which stays when devices are added or reordered."""
        return extent.device_offset // self.superblock.extent_bytes

    def cut(self, extent: Extent, slot_bytes: int, buffer: memoryview) -> None:
        """Say how the extent is cut, unless the device says so already. Raises OSError.

        The flush that makes the slots durable does the same for this: without it none of them counts, since they
        carry the new serial.
        """
        ordinal = self.ordinal(extent)
        with self._shape_locks[ordinal]:
            if self.shapes[ordinal].slot_bytes == slot_bytes:
                return
            with self._lock:
                self._next_serial += 1
                shape = Shape(slot_bytes, self._next_serial)
            self.shapes[ordinal] = Shape()  # nobody can tell while the write is under way, or after it failed
            sector = buffer[:SECTOR_BYTES]
            sector[:] = encode_shape(shape, self.superblock.device_id, ordinal)
            write_fully(self.file, sector, extent.device_offset)
            self.shapes[ordinal] = shape

    def flush(self) -> None:
        """Raises OSError; the device is out then."""
        try:
            self.file.flush()
        except OSError as error:
            self.fail(f"a flush failed: {error}")
            raise
        self.count("flushes")

    def close(self) -> None:
        """Flush, end the threads, let the directory go. Safe twice; what a stuck thread uses stays open."""
        if self._closing:
            return
        self._closing = True
        if self._file is not None and not self._failed:
            self.call(self.writers, lambda _: self.flush(), _CLOSE_S)
        ended = self.readers.close(_CLOSE_S if not self._failed else _LOOK_S)
        ended &= self.writers.close(_CLOSE_S if not self._failed else _LOOK_S)
        if ended and self._file is not None:
            self._file.close()
            if self.removals is not None:
                self.removals.close()
        if ended:
            self.folder.close()  # else the lock stays with the process: a stuck write may still land
