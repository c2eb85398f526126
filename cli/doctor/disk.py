"""Checks of a directory that is, or will be, a device of a node: a real file, written and read for a short time."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstrata.cli.doctor.rows import Check, Row, Verdict
from kvstrata.cli.sizes import format_size
from kvstrata.storage.ssd.raw_file import DiskFile, aligned_buffer, read_fully, write_fully

FILE_BYTES: Final = 64 << 20
PIECE_BYTES: Final = 1 << 20
#: Of writing, and of reading.
MEASURE_S: Final = 1.5
BOUND_S: Final = 20.0
#: A device that is slower brings blocks back more slowly than most models compute them.
SLOW_BYTES_S: Final = 200 << 20
_IN_MEMORY: Final = ("tmpfs", "ramfs")


def checks(path: Path) -> list[Check]:
    """For one ``--ssd`` directory."""
    return [Check("ssd", str(path), lambda: look(path), BOUND_S)]


def look(path: Path) -> Iterator[Row]:
    """Leaves nothing behind."""
    what = str(path)
    if not path.is_dir():
        found = "is not there" if not path.exists() else "is not a directory"
        yield Row("ssd", what, Verdict.PROBLEM, found, "make it, on the file system of the SSD")
        return
    free = _free(path)
    if free < 2 * FILE_BYTES:
        yield Row("ssd", what, Verdict.PROBLEM, f"{format_size(free)} free", "make room: not even a measurement fits")
        return
    kind = file_system(path)
    try:
        fd, name = tempfile.mkstemp(prefix=".kvstrata-doctor-", dir=path)
    except OSError as error:
        advice = "let the node's user write there"
        yield Row("ssd", what, Verdict.PROBLEM, f"no file can be made: {error.strerror}", advice)
        return
    os.close(fd)
    try:
        yield from _measured(what, Path(name), kind, free)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108 - the name as mkstemp gave it


def _measured(what: str, file: Path, kind: str, free: int) -> Iterator[Row]:
    try:
        disk = DiskFile(file)
        try:
            written, write_speed = _write(disk)
            read_speed = _read(disk, written)
        finally:
            disk.close()
    except OSError as error:
        found = f"a file cannot be written and read back: {error.strerror or error}"
        yield Row("ssd", what, Verdict.PROBLEM, found, "look at dmesg and at the device's error log (smartctl -x)")
        return
    found = (
        f"{kind}, {format_size(free)} free, written and flushed at {format_size(write_speed)}/s, "
        f"read at {format_size(read_speed)}/s in pieces of {format_size(PIECE_BYTES)}"
    )
    if kind in _IN_MEMORY:
        yield Row("ssd", what, Verdict.WARNING, found, "this is memory, not an SSD: nothing outlives the machine")
    elif min(write_speed, read_speed) < SLOW_BYTES_S:
        advice = f"slow (below {format_size(SLOW_BYTES_S)}/s): is it a network or a spinning disk, or busy?"
        yield Row("ssd", what, Verdict.WARNING, found, advice)
    else:
        yield Row("ssd", what, Verdict.OK, found)
    if disk.direct:
        yield Row("ssd", f"{what}: O_DIRECT", Verdict.OK, "past the page cache")
    else:
        advice = "blocks pass through the page cache: use ext4 or xfs on the device itself"
        yield Row("ssd", f"{what}: O_DIRECT", Verdict.WARNING, f"{kind} does not know it", advice)


def _write(disk: DiskFile) -> tuple[int, float]:
    """(bytes written, bytes a second with the flush)."""
    buffer = aligned_buffer(PIECE_BYTES)
    buffer[:] = random.Random(1).randbytes(PIECE_BYTES)
    began, done = time.perf_counter(), 0
    while done < FILE_BYTES and time.perf_counter() - began < MEASURE_S:
        write_fully(disk, buffer, done)
        done += PIECE_BYTES
    disk.flush()
    return done, done / (time.perf_counter() - began)


def _read(disk: DiskFile, nbytes: int) -> float:
    """Bytes a second, in any order. Raises OSError when the bytes are not those that were written."""
    order = random.Random(2)
    buffer, wanted = aligned_buffer(PIECE_BYTES), random.Random(1).randbytes(PIECE_BYTES)
    began, done, spent = time.perf_counter(), 0, 0.0
    while done < FILE_BYTES and time.perf_counter() - began < MEASURE_S:
        at = time.perf_counter()
        read_fully(disk, buffer, order.randrange(nbytes // PIECE_BYTES) * PIECE_BYTES)
        spent += time.perf_counter() - at
        if buffer != wanted:
            raise OSError("other bytes came back than were written")
        done += PIECE_BYTES
    return done / max(spent, 1e-9)


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, as the kernel names it; "unknown" when it does not say."""
    real, best, kind = path.resolve(), "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, this, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if real.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, this
    return kind


def _free(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_frsize * room.f_bavail
