"""Devices that misbehave on demand, under a real store on real files: for tests and for trying a pool out.

``SsdLog.open(..., open_file=Faults().open_file)``. :class:`Faults` makes operations fail, stop short, flip
bits or hang; :class:`CrashDisk` forgets what was not flushed, as a loss of power does.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.storage.ssd.base import SECTOR_BYTES
from kvstrata.storage.ssd.raw_file import DiskFile, RawFile, aligned_buffer, read_fully, write_fully


class Faults:
    """Faults of the files below ``folder`` (None: of all). Attributes may be set at any time.

    ``read_errno``, ``write_errno`` and ``flush_errno`` fail every operation while they are not 0; ``rate`` makes
    it a part of them. ``halves`` moves half of what was asked, ``ends`` nothing at all. ``flips`` turns a bit of
    each read. :meth:`stall` makes operations wait for :meth:`resume`.
    """

    def __init__(self, folder: Path | None = None, *, seed: int = 0) -> None:
        self.folder = folder
        self.read_errno = 0
        self.write_errno = 0
        self.flush_errno = 0
        self.rate = 1.0
        self.halves = False
        self.ends = False
        self.flips = False
        self.operations = 0
        self._random = random.Random(seed)
        self._moving = threading.Event()
        self._moving.set()
        self._lock = threading.Lock()

    def open_file(self, path: Path) -> RawFile:
        file = DiskFile(path)
        return FaultyFile(file, self) if self.folder is None or self.folder in path.parents else file

    def stall(self) -> None:
        self._moving.clear()

    def resume(self) -> None:
        self._moving.set()

    def chance(self) -> bool:
        with self._lock:
            self.operations += 1
            return self._random.random() < self.rate

    def below(self, bound: int) -> int:
        with self._lock:
            return self._random.randrange(bound)

    def before(self, error: int) -> None:
        """What happens ahead of each operation: it may hang, and fail with ``error``."""
        self._moving.wait()
        if self.chance() and error:
            raise OSError(error, os.strerror(error))

    def length(self, nbytes: int) -> int:
        """How much of a transfer is done."""
        if self.ends:
            return 0
        half = nbytes // 2 // SECTOR_BYTES * SECTOR_BYTES
        return half if self.halves and half else nbytes


class FaultyFile:
    """A :class:`RawFile` whose operations go wrong as its :class:`Faults` say."""

    def __init__(self, file: RawFile, faults: Faults) -> None:
        self._file = file
        self._faults = faults
        self.direct = file.direct

    def pread(self, into: memoryview, offset: int) -> int:
        self._faults.before(self._faults.read_errno)
        nbytes = self._faults.length(len(into))
        count = self._file.pread(into[:nbytes], offset) if nbytes else 0
        if self._faults.flips and count:
            into[self._faults.below(count)] ^= 1 << self._faults.below(8)
        return count

    def pwrite(self, data: memoryview, offset: int) -> int:
        self._faults.before(self._faults.write_errno)
        nbytes = self._faults.length(len(data))
        return self._file.pwrite(data[:nbytes], offset) if nbytes else 0

    def flush(self) -> None:
        self._faults.before(self._faults.flush_errno)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Write:
    file: DiskFile
    offset: int
    before: bytes
    after: bytes


class PowerLost(OSError):
    """The machine is off: nothing that a thread still tries has any effect."""


class CrashDisk:
    """Files whose unflushed writes :meth:`crash` undoes, but for some of their sectors.

    One store at a time: after a crash, open the next store with a new :class:`CrashDisk`. ``dies_after`` writes
    and flushes the power is lost by itself; what is under way then is among what was not flushed.
    """

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.dies_after = dies_after
        self.off = False
        self._lock = threading.Lock()
        self._unflushed: list[_Write] = []
        self._files: list[DiskFile] = []

    def open_file(self, path: Path) -> RawFile:
        file = DiskFile(path)
        with self._lock:
            self._files.append(file)
        return _CrashFile(file, self)

    def write(self, file: DiskFile, data: memoryview, offset: int) -> int:
        with self._lock:
            before = aligned_buffer(len(data))
            self._step()
            read_fully(file, before, offset)
            self._unflushed.append(_Write(file, offset, bytes(before), bytes(data)))
            write_fully(file, data, offset)
            return len(data)

    def flush(self, file: DiskFile) -> None:
        with self._lock:
            self._step()
            self._unflushed = [write for write in self._unflushed if write.file is not file]

    def _step(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                self.off = True
        if self.off:
            raise PowerLost(5, "the power is gone")

    def crash(self, kept: Sequence[bool] | random.Random) -> None:
        """Lose the power: of all unflushed sectors, in order, those stay for which ``kept`` says so."""
        with self._lock:
            self.off = True
            for write in reversed(self._unflushed):
                _put(write.file, write.before, write.offset)
            number = 0
            for write in self._unflushed:
                for at in range(0, len(write.after), SECTOR_BYTES):
                    stays = (
                        kept.random() < 0.5 if isinstance(kept, random.Random) else number < len(kept) and kept[number]
                    )
                    if stays:
                        _put(write.file, write.after[at : at + SECTOR_BYTES], write.offset + at)
                    number += 1
            self._unflushed.clear()

    def close(self) -> None:
        """Close every file, also those that a store left open when the power went."""
        for file in self._files:
            file.close()


class _CrashFile:
    def __init__(self, file: DiskFile, disk: CrashDisk) -> None:
        self._file = file
        self._disk = disk
        self.direct = file.direct

    def pread(self, into: memoryview, offset: int) -> int:
        if self._disk.off:
            raise PowerLost(5, "the power is gone")
        return self._file.pread(into, offset)

    def pwrite(self, data: memoryview, offset: int) -> int:
        return self._disk.write(self._file, data, offset)

    def flush(self) -> None:
        self._disk.flush(self._file)

    def close(self) -> None:
        """The disk closes it: its unflushed writes may have to be undone yet."""


def _put(file: DiskFile, data: bytes, offset: int) -> None:
    memory = aligned_buffer(len(data))
    memory[:] = data
    write_fully(file, memory, offset)
