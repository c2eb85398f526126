"""Registered memory, and blocks laid out in it.

A :class:`Region` is memory a client may name in a transfer. A :class:`BlockView` says where each block
lies in it: descriptors (byte offset, length), int64 ``[n, pieces, 2]``.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import Closed, InvalidArgument
from kvstrata.proto.keys import Namespace
from kvstrata.transfer.gpu.memory import host_memory
from kvstrata.transfer.holders import Holders
from kvstrata.transfer.memory import HOST, Memory

if TYPE_CHECKING:
    from kvstrata.transfer.gpu.runtime import Event

PIECES_MAX = 1 << 16
_ids = itertools.count(1)

Bytes = npt.NDArray[np.uint8]
Descriptors = npt.NDArray[np.int64]


class Region:
    """Memory registered for transfers: ``address``, ``nbytes``, where it is (``memory``), and, on the host, a flat u8
    view ``bytes``. ``extents``: (address, bytes) of what may be named, ascending and apart; one, but on a device,
    where a region may span several allocations with something else between them.

    ``memfd`` is the descriptor of memory that a node on this host can map, -1 for ordinary memory.
    The region keeps the buffer alive. Valid until ``client.unregister(region)`` or ``client.close()``.
    """

    def __init__(self, flat: Bytes, owner: object, memfd: int = -1) -> None:
        self.id = next(_ids)
        self._bytes: Bytes | None = flat
        self.nbytes = flat.nbytes
        self.address = flat.ctypes.data if flat.nbytes else 0
        self.memory: Memory = HOST
        self.extents: tuple[tuple[int, int], ...] = ((self.address, self.nbytes),)
        self.writable = bool(flat.flags.writeable)
        self.memfd = memfd
        self.owner = owner
        self.closed = False
        self.holders = Holders()

    @classmethod
    def on_device(cls, memory: Memory, address: int, nbytes: int, owner: object, *, writable: bool = True) -> Region:
        """Device memory: it has an address, and no bytes that this process could read."""
        return cls.spanning(memory, [(address, nbytes)], owner, writable=writable)

    @classmethod
    def spanning(
        cls, memory: Memory, extents: Iterable[tuple[int, int]], owner: object, *, writable: bool = True
    ) -> Region:
        """Allocations (address, bytes) of one device, as one region from the first byte to the last.

        Those that touch or overlap count as one.
        """
        merged: list[tuple[int, int]] = []
        for address, nbytes in sorted(extents):
            if merged and address <= sum(merged[-1]):
                first = merged[-1][0]
                merged[-1] = (first, max(sum(merged[-1]), address + nbytes) - first)
            else:
                merged.append((address, nbytes))
        region = cls(np.empty(0, np.uint8), owner)
        region._bytes = None
        region.memory, region.extents, region.writable = memory, tuple(merged), writable
        region.address, region.nbytes = merged[0][0], sum(merged[-1]) - merged[0][0]
        return region

    @property
    def bytes(self) -> Bytes:
        """u8[nbytes]. Raises :class:`InvalidArgument` for device memory."""
        if self._bytes is None:
            raise InvalidArgument(f"memory on {self.memory.spelled()} has no bytes that the host can read")
        return self._bytes

    def rows(self, namespace: Namespace) -> BlockView:
        """Row i of a C-contiguous [n, block_bytes] array is block i; a shorter tail is left out."""
        if len(self.extents) > 1:
            raise InvalidArgument("the region spans several allocations: name its blocks by region.view()")
        count = self.nbytes // namespace.block_bytes
        if count == 0:
            raise InvalidArgument(f"the region has {self.nbytes} bytes: not one block of {namespace.block_bytes}")
        table = np.empty((count, 1, 2), np.int64)
        table[:, 0, 0] = np.arange(count, dtype=np.int64) * namespace.block_bytes
        table[:, 0, 1] = namespace.block_bytes
        return BlockView(self, table, namespace.block_bytes)

    def view(self, namespace: Namespace, offsets: npt.ArrayLike) -> BlockView:
        """Blocks in pieces: ``offsets`` int64 [n, pieces, 2] of (byte offset, length).

        Each block's lengths must add up to ``block_bytes`` and stay in the region; pieces of one view
        must not overlap when it is loaded into. Raises :class:`InvalidArgument` naming the block.
        """
        table = np.ascontiguousarray(offsets, dtype=np.int64)
        if table.ndim != 3 or table.shape[2] != 2 or not 1 <= table.shape[1] <= PIECES_MAX:
            raise InvalidArgument(f"offsets have shape {table.shape}: expected [n, pieces, 2]")
        start, length = table[:, :, 0], table[:, :, 1]
        bad = (start < 0) | (length <= 0) | (start > self.nbytes - length)
        if bad.any():
            block, piece = np.argwhere(bad)[0]
            raise InvalidArgument(
                f"block {block} piece {piece}: ({start[block, piece]}, {length[block, piece]}) "
                f"is not inside the region's {self.nbytes} bytes"
            )
        if len(self.extents) > 1:
            self._check_extents(start, length)
        total = length.sum(axis=1)
        if (total != namespace.block_bytes).any():
            block = int(np.flatnonzero(total != namespace.block_bytes)[0])
            raise InvalidArgument(
                f"block {block} adds up to {total[block]} bytes: the namespace says {namespace.block_bytes}"
            )
        return BlockView(self, table, namespace.block_bytes)

    def _check_extents(self, start: Descriptors, length: Descriptors) -> None:
        """Every piece lies in one extent. Raises :class:`InvalidArgument` naming the first that does not."""
        extents = np.array(self.extents, np.int64)
        at = start + self.address
        extent = extents[np.searchsorted(extents[:, 0], at, side="right") - 1]
        bad = at + length > extent.sum(axis=-1)
        if bad.any():
            block, piece = np.argwhere(bad)[0]
            raise InvalidArgument(
                f"block {block} piece {piece}: ({start[block, piece]}, {length[block, piece]}) "
                f"is in none of the region's {len(extents)} allocations"
            )

    def close(self) -> None:
        """Not usable for new transfers; its own memory goes when nobody holds an array over it."""
        if not self.closed and self.memfd >= 0:
            os.close(self.memfd)
        self.closed = True

    def check_open(self) -> None:
        if self.closed:
            raise Closed("the region was unregistered")


class BlockView:
    """n blocks in one region. Slices and index arrays give views of fewer blocks; no bytes move.

    ``after``: device memory is read or written only once this mark of its runtime is reached; without one, once all
    is done that the calling thread's current stream has queued by then.
    """

    __slots__ = ("after", "block_bytes", "region", "table")

    def __init__(self, region: Region, table: Descriptors, block_bytes: int, after: Event | None = None) -> None:
        self.region = region
        self.table = table
        self.block_bytes = block_bytes
        self.after = after

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, which: slice | npt.NDArray[Any] | list[int]) -> BlockView:
        if isinstance(which, int | np.integer):
            raise TypeError("a BlockView is indexed by a slice or an index array")
        return BlockView(self.region, self.table[which], self.block_bytes, self.after)

    def coming_after(self, mark: Event | None) -> BlockView:
        """The same blocks, with another ``after``."""
        return BlockView(self.region, self.table, self.block_bytes, mark)

    @property
    def pieces(self) -> int:
        return int(self.table.shape[1])

    def addresses(self) -> npt.NDArray[np.int64]:
        """Absolute (address, length) of every piece, int64 [n * pieces, 2]."""
        flat = self.table.reshape(-1, 2).copy()
        flat[:, 0] += self.region.address
        return flat


def flat_bytes(buffer: Any) -> Bytes:
    """A flat u8 view of host memory: anything with a buffer or an array interface, torch tensors, DLPack; no copy.

    Raises :class:`InvalidArgument` when the memory is not C-contiguous, is a device's, or offers no buffer.
    """
    if isinstance(buffer, np.ndarray):
        array = buffer
    elif hasattr(buffer, "__array_interface__"):
        array = np.asarray(buffer)
    elif (found := host_memory(buffer)) is not None:
        array = found
    else:
        try:
            array = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidArgument(f"cannot register {type(buffer).__name__}: {error}") from error
    if not array.flags.c_contiguous:
        raise InvalidArgument("the array is not C-contiguous: register its base and use region.view()")
    if array.nbytes == 0:
        raise InvalidArgument("the buffer is empty")
    return array.reshape(-1).view(np.uint8)


def shareable(nbytes: int, name: str = "kvstrata-region") -> tuple[Bytes, mmap.mmap, int]:
    """Zeroed memory that a node on this host can map: (u8[nbytes], its mapping, memfd).

    Sealed against shrinking, so that no process can make another one fault by truncating it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return np.frombuffer(mapping, np.uint8), mapping, fd
