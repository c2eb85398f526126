"""Reading another process's memory straight into ours: ``process_vm_readv``, up to 1,024 pieces a call."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.storage.serving.pieces import FEW_BYTES, Row
from kvstrata.transfer.copier import halves, merge_runs
from kvstrata.transfer.cores import usable_cores

Int64s = npt.NDArray[np.int64]

IOVECS_MAX: Final = 1024
_PAGE: Final = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def readable(pid: int, address: int) -> bool:
    """True when this process may read that one's memory at ``address`` (one byte is tried)."""
    target = np.zeros(1, np.uint8)
    local = np.array([[target.ctypes.data, 1]], np.uint64)
    remote = np.array([[address, 1]], np.uint64)
    return bool(_readv(pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0) == 1)


def permitted(pid: int) -> bool:
    """True when this process may read that one's memory, wherever it is."""
    return pid > 0 and (readable(pid, _PAGE) or ctypes.get_errno() == errno.EFAULT)


def read(pid: int, target: Int64s, source: Int64s, length: Int64s) -> None:
    """Copy ``length[i]`` bytes from address ``source[i]`` of process ``pid`` to our ``target[i]``.

    The caller vouches for every target. Returns when all bytes are in place, and raises only when no
    thread writes to a target any more: :class:`InvalidArgument` for memory that is not there,
    :class:`Unavailable` for a process that is gone. The owner of that memory can stall a read for as
    long as it lives, so big reads are split over a thread of their own, never one that others need.
    """
    target, source, length = merge_runs(target, source, length)
    total = int(length.sum())
    if total <= FEW_BYTES or usable_cores() < 2:  # less is read before a thread has begun
        _read_each(pid, target, source, length)
        return
    first, second = halves(target, source, length, total // 2)
    problems: list[Exception] = []

    def other_half() -> None:
        try:
            _read_each(pid, *second)
        except Exception as error:  # noqa: BLE001  raised below, by the thread that asked
            problems.append(error)

    other = threading.Thread(target=other_half, name="kvstrata-pull", daemon=True)
    other.start()
    try:
        _read_each(pid, *first)
    finally:
        other.join()
    if problems:
        raise problems[0]


def read_few(pid: int, base: int, rows: Sequence[Row]) -> None:
    """As :func:`read`, of at most ``IOVECS_MAX`` pieces, whose offsets count from address ``base``, on this thread."""
    local, remote, total = array("Q"), array("Q"), 0
    for target, offset, length in rows:
        local.extend((target, length))
        remote.extend((base + offset, length))
        total += length
    count = len(rows)
    got = _readv(pid, local.buffer_info()[0], count, remote.buffer_info()[0], count, 0)
    if got <= 0:
        raise _failure(pid, ctypes.get_errno())
    if got < total:  # all of it again, as far as there is memory
        columns = np.array(rows, np.int64)
        _read_each(pid, columns[:, 0], columns[:, 1] + base, columns[:, 2])


def _read_each(pid: int, target: Int64s, source: Int64s, length: Int64s) -> None:
    local = np.stack([target, length], axis=1).astype(np.uint64)
    remote = np.stack([source, length], axis=1).astype(np.uint64)
    index, count = 0, len(length)
    while index < count:
        batch = min(IOVECS_MAX, count - index)
        got = _readv(pid, local[index:].ctypes.data, batch, remote[index:].ctypes.data, batch, 0)
        if got <= 0:
            raise _failure(pid, ctypes.get_errno())
        index = _advance(local, remote, index, batch, got)


def _advance(local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64], index: int, batch: int, got: int) -> int:
    """The first piece not read whole, after ``got`` bytes; both sides of it are cut to what is left."""
    ends = np.cumsum(local[index : index + batch, 1].astype(np.int64))
    whole = int(np.searchsorted(ends, got, side="right"))
    if whole < batch:
        part = np.uint64(got - (int(ends[whole - 1]) if whole else 0))
        for side in (local, remote):
            side[index + whole, 0] += part
            side[index + whole, 1] -= part
    return index + whole


def _failure(pid: int, number: int) -> Exception:
    if number == errno.ESRCH:
        return Unavailable(f"process {pid} is gone")
    why = os.strerror(number) if number else "no bytes"
    return InvalidArgument(f"the region of process {pid} cannot be read: {why}")
