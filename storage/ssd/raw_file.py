"""Bytes of one file on a device, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from kvstrata.storage.ssd.base import SECTOR_BYTES


class ShortTransfer(OSError):
    """A read or write stopped early, and going on brought nothing: the file is shorter than it was made."""


class RawFile(Protocol):
    """Whole sectors at sector offsets, from and to memory that starts on a page. Thread-safe; raises OSError.

    ``pread`` and ``pwrite`` may move less than asked; callers use :func:`read_fully` and :func:`write_fully`.
    """

    direct: bool  #: past the page cache

    def pread(self, into: memoryview, offset: int) -> int: ...

    def pwrite(self, data: memoryview, offset: int) -> int: ...

    def flush(self) -> None:
        """Everything written before this call survives a loss of power."""
        ...

    def close(self) -> None: ...


OpenFile = Callable[[Path], RawFile]


class DiskFile:
    """A file opened with O_DIRECT; where the file system has none, buffered, with its pages dropped after use."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags)
            self.direct = False

    def pread(self, into: memoryview, offset: int) -> int:
        count = os.preadv(self._fd, [into], offset)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_DONTNEED)
        return count

    def pwrite(self, data: memoryview, offset: int) -> int:
        return os.pwritev(self._fd, [data], offset)

    def flush(self) -> None:
        os.fdatasync(self._fd)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def aligned_buffer(nbytes: int) -> memoryview:
    """Memory of its own that starts on a page."""
    return memoryview(mmap.mmap(-1, nbytes))


def read_fully(file: RawFile, into: memoryview, offset: int) -> None:
    """Fill ``into`` or raise OSError (:class:`ShortTransfer` when the file ends first)."""
    done = 0
    while done < len(into):
        count = file.pread(into[done:], offset + done)
        done = _progress(done, count, len(into), "read", offset)


def write_fully(file: RawFile, data: memoryview, offset: int) -> None:
    """Write all of ``data`` or raise OSError."""
    done = 0
    while done < len(data):
        count = file.pwrite(data[done:], offset + done)
        done = _progress(done, count, len(data), "write", offset)


def _progress(done: int, count: int, wanted: int, verb: str, offset: int) -> int:
    """Bytes that need not be moved again: whole sectors, since the next call must begin on one."""
    now = done + count
    if now < wanted:
        now -= now % SECTOR_BYTES
    if now <= done:
        raise ShortTransfer(errno.EIO, f"short {verb}: {done + count} of {wanted} bytes at {offset}")
    return now


#: Kinds of trouble that devices are counted by.
_KINDS: Final = {errno.EIO: "eio", errno.ENOSPC: "enospc", errno.EROFS: "read_only"}


def kind_of(error: OSError) -> str:
    if isinstance(error, ShortTransfer):
        return "short"
    return _KINDS.get(error.errno or 0, "other_error")
