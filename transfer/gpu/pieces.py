"""What every runtime asks of a gather's or scatter's arguments, and its table of pinned memory."""

from __future__ import annotations

import threading

import numpy as np

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.runtime import Bytes, Int64s


def checked_pieces(address: Int64s, length: Int64s, packed: Bytes) -> tuple[Int64s, Int64s]:
    """Copies of (address, length) as contiguous i64[n], without empty pieces. Raises :class:`InvalidArgument`."""
    if address.ndim != 1 or address.shape != length.shape:
        raise InvalidArgument(f"pieces have shapes {address.shape} and {length.shape}: expected [n] and [n]")
    if packed.ndim != 1 or packed.dtype != np.uint8 or not packed.flags.c_contiguous:
        raise InvalidArgument("packed memory must be a contiguous u8 array of one dimension")
    if bool((length < 0).any()):
        piece = int(np.flatnonzero(length < 0)[0])
        raise InvalidArgument(f"piece {piece} has {length[piece]} bytes")
    total = int(length.sum())
    if total != packed.nbytes:
        raise InvalidArgument(f"the pieces add up to {total} bytes: the packed memory has {packed.nbytes}")
    some = length > 0
    return address[some].astype(np.int64, copy=False), length[some].astype(np.int64, copy=False)


class PinnedTable:
    """Which host memory a device reaches: a handful of entries, which stay mapped until removed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, Bytes] = {}

    def add(self, flat: Bytes) -> None:
        with self._lock:
            self._entries[flat.ctypes.data] = flat

    def remove(self, flat: Bytes) -> None:
        with self._lock:
            self._entries.pop(flat.ctypes.data, None)

    def check(self, packed: Bytes, *, written: bool) -> None:
        """Raises :class:`InvalidArgument` unless ``packed`` lies in pinned memory, writable if it is to be written."""
        if written and not packed.flags.writeable:
            raise InvalidArgument("the packed memory is read-only")
        start, stop = packed.ctypes.data, packed.ctypes.data + packed.nbytes
        with self._lock:
            inside = any(base <= start and stop <= base + flat.nbytes for base, flat in self._entries.items())
        if not inside and packed.nbytes:
            raise InvalidArgument("the packed memory is not pinned: take it from pinned()")
