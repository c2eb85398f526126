"""Memory that clients have registered, and how the node reads it: mapped, by ``process_vm_readv``, or one-sidedly.

Nothing a client says is believed: descriptors are checked against the region before any byte moves, a map
is taken only of memory that cannot shrink under it, and a process is read only while the one that
registered it lives. A one-sided transfer cannot be recalled: its region is in use until it has settled.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import Busy, InvalidArgument, Unavailable
from kvstrata.storage.records import Block
from kvstrata.storage.serving import process_memory
from kvstrata.storage.serving.pieces import FewPieces, Row, few, placed, read_few
from kvstrata.storage.serving.rail_region import RailRegion, Starter
from kvstrata.transfer.copier import copy, copy_one
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import PIECES_MAX

REGIONS_MAX: Final = 1024  #: of one session
ADDRESS_MAX: Final = 1 << 62
#: Maps of memory that is all there and not larger than this are populated at once.
POPULATE_BYTES_MAX: Final = 4 << 30
#: A region that one-sided transfers still read is waited for this long before its owner is told to come again.
SETTLE_S: Final = 1.0

Descriptors = npt.NDArray[np.int64]
Int64s = npt.NDArray[np.int64]


class MappedRegion:
    """A memfd of the client's, mapped read-only. The map goes with the last pull that uses it."""

    method = "map"

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._address = int(self._bytes.ctypes.data)

    def pull(self, target: Int64s, offset: Int64s, length: Int64s) -> None:
        """Copy from byte ``offset[i]`` of the region to our address ``target[i]``."""
        copy(target, offset + self._address, length)

    def pull_few(self, rows: Iterable[Row]) -> None:
        """The same for a few pieces."""
        for target, offset, length in rows:
            copy_one(target, offset + self._address, length)


class ProcessRegion:
    """Ordinary memory of a client on this host. ``pidfd`` becomes this object's own."""

    method = "vm"

    def __init__(self, pid: int, pidfd: int, address: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pid = pid
        self._pidfd = pidfd
        self._address = address
        weakref.finalize(self, os.close, pidfd)

    def pull(self, target: Int64s, offset: Int64s, length: Int64s) -> None:
        """As :meth:`MappedRegion.pull`; raises :class:`Unavailable` when the process has died."""
        process_memory.read(self._pid, target, offset + self._address, length)
        self._check_alive()

    def pull_few(self, rows: Iterable[Row]) -> None:
        """The same for a few pieces."""
        process_memory.read_few(self._pid, self._address, list(rows))
        self._check_alive()

    def _check_alive(self) -> None:
        death = select.poll()
        death.register(self._pidfd, select.POLLIN)
        if death.poll(0):  # its number may be another process's by now, and the bytes with it
            raise Unavailable(f"process {self._pid} died while its memory was read")


ClientRegion = MappedRegion | ProcessRegion | RailRegion


@dataclass(frozen=True, slots=True)
class RegionAsk:
    """``number`` is the client's name for it; ``pid``, ``pidfd`` are the kernel's word, 0 and -1 when unknown."""

    number: int
    address: int
    nbytes: int
    pid: int
    pidfd: int


class RegionBook:
    """Regions by session and number. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[bytes, dict[int, ClientRegion]] = {}
        self._ended: set[bytes] = set()  #: sessions that have ended and have transfers in flight

    def register(self, session: bytes, ask: RegionAsk, memfd: int) -> str:
        """Find a way to read the region and keep it: "map", "vm", or "" when there is none.

        ``memfd`` is -1 when none came; it stays the caller's. A number used before is replaced.
        """
        _check_bounds(ask)
        region = _opened(ask, memfd)
        if region is None:
            return ""
        self.keep(session, ask.number, region)
        return region.method

    def register_rail(self, session: bytes, ask: RegionAsk, start: Starter, memory: Memory) -> str:
        """Keep a region that is read by one-sided transfers: "rdma"."""
        _check_bounds(ask)
        self.keep(session, ask.number, RailRegion(start, ask.address, ask.nbytes, memory))
        return RailRegion.method

    def keep(self, session: bytes, number: int, region: ClientRegion) -> None:
        """Raises :class:`Busy` at the bound, and when transfers from the number's earlier region do not settle."""
        until = time.monotonic() + SETTLE_S
        settled: ClientRegion | None = None
        while not self._kept(session, number, region, settled):
            settled = self._settle(session, number, until - time.monotonic())

    def _kept(self, session: bytes, number: int, region: ClientRegion, settled: ClientRegion | None) -> bool:
        """False while another region than ``settled`` has the number; the same memory, named twice, stays as it is."""
        with self._lock:
            self._ended.discard(session)
            regions = self._regions.setdefault(session, {})
            known = regions.get(number)
            if isinstance(known, RailRegion) and isinstance(region, RailRegion) and known.serves(region):
                return True
            if known is not settled:
                return False
            if len(regions) >= REGIONS_MAX and number not in regions:
                raise Busy(f"{REGIONS_MAX} regions are registered in this session: unregister some")
            regions[number] = region
            return True

    def unregister(self, session: bytes, number: int, within_s: float = SETTLE_S) -> None:
        """Forget a region, once no transfer from it is in flight; an unknown one is passed over.

        Raises :class:`Busy` when they have not settled in time: no other begins, and its owner has to ask again before
        it lets go of the memory.
        """
        until = time.monotonic() + within_s
        while True:
            region = self._settle(session, number, until - time.monotonic())
            with self._lock:
                regions = self._regions.get(session, {})
                if regions.get(number) is region:  # else another came meanwhile, and may be read
                    regions.pop(number, None)
                    return

    def _settle(self, session: bytes, number: int, within_s: float) -> ClientRegion | None:
        region = self._regions.get(session, {}).get(number)
        if isinstance(region, RailRegion):
            region.flights.close()
            if not region.flights.wait_idle(time.monotonic() + within_s):
                raise Busy(f"{len(region.flights)} transfers from region {number} have not settled: ask again")
        return region

    def close_rails(self, session: bytes) -> None:
        """Nothing is read any more from the session's regions that need its agent: it has another one."""
        with self._lock:
            regions = self._regions.get(session, {})
            for number, region in list(regions.items()):
                if isinstance(region, RailRegion):
                    region.flights.close()
                    if not len(region.flights):
                        del regions[number]

    def find(self, session: bytes, number: int) -> ClientRegion:
        """Raises :class:`InvalidArgument` when the session has registered no such region."""
        region = self._regions.get(session, {}).get(number)
        if region is None or (isinstance(region, RailRegion) and region.flights.closed):
            raise InvalidArgument(f"region {number} is not registered in this session")
        return region

    def session_ended(self, session: bytes) -> None:
        """Forget its regions, but those with transfers in flight: should it come back, it is to hear of them."""
        self.close_rails(session)
        with self._lock:
            self._ended.add(session)
            for ended in list(self._ended):
                left = {number: region for number, region in self._regions.pop(ended, {}).items() if _in_flight(region)}
                if left:
                    self._regions[ended] = left
                else:
                    self._ended.discard(ended)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(regions) for regions in self._regions.values())


def _in_flight(region: ClientRegion) -> bool:
    return isinstance(region, RailRegion) and len(region.flights) > 0


def _check_bounds(ask: RegionAsk) -> None:
    if ask.nbytes == 0 or ask.address + ask.nbytes > ADDRESS_MAX:
        raise InvalidArgument(f"a region of {ask.nbytes} bytes at {ask.address:#x} cannot be")


def _opened(ask: RegionAsk, memfd: int) -> ClientRegion | None:
    if memfd >= 0:
        mapping = _mapped(memfd, ask.nbytes)
        if mapping is not None:
            return MappedRegion(mapping, ask.nbytes)
    if ask.pid > 0 and ask.pidfd >= 0 and process_memory.readable(ask.pid, ask.address):
        return ProcessRegion(ask.pid, os.dup(ask.pidfd), ask.address, ask.nbytes)
    return None


def _mapped(memfd: int, nbytes: int) -> mmap.mmap | None:
    """A read-only map, or None of memory that its owner could take away under us."""
    try:
        if not fcntl.fcntl(memfd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        status = os.fstat(memfd)
        if status.st_size < nbytes:
            return None
        populate = status.st_blocks * 512 >= nbytes and nbytes <= POPULATE_BYTES_MAX
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(memfd, nbytes, flags=flags, prot=mmap.PROT_READ)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOMEM, errno.EBADF, errno.ENODEV):
            return None  # not a memfd, or no address space for it
        raise


def read_pieces(
    packed: bytes, blocks: int, pieces: int, block_bytes: int, region: ClientRegion
) -> Descriptors | FewPieces:
    """As :func:`read_descriptors`, in the form that :func:`pull` takes for so many."""
    if not isinstance(region, RailRegion) and few(blocks, pieces, block_bytes):
        return read_few(packed, blocks, pieces, block_bytes, region.nbytes)
    return read_descriptors(packed, blocks, pieces, block_bytes, region.nbytes)


def read_descriptors(packed: bytes, blocks: int, pieces: int, block_bytes: int, region_bytes: int) -> Descriptors:
    """Descriptors of a pull, int64 [blocks, pieces, 2], every one inside the region.

    Raises :class:`InvalidArgument` when the count is wrong, a piece leaves the region, or a block's pieces
    do not add up to ``block_bytes``.
    """
    if not 1 <= pieces <= PIECES_MAX or len(packed) != blocks * pieces * 16:
        raise InvalidArgument(f"{len(packed)} bytes of descriptors for {blocks} blocks of {pieces} pieces")
    table = np.frombuffer(packed, "<i8").reshape(blocks, pieces, 2)
    offset, length = table[:, :, 0], table[:, :, 1]
    # Lengths are bounded first: below that bound neither sums nor differences can overflow.
    if ((length <= 0) | (length > block_bytes)).any() or (length.sum(axis=1) != block_bytes).any():
        raise InvalidArgument(f"the pieces of a block do not add up to its {block_bytes} bytes")
    if ((offset < 0) | (offset > region_bytes - length)).any():
        raise InvalidArgument(f"a descriptor is not inside the region's {region_bytes} bytes")
    return table


def spread(blocks: Sequence[Block], descriptors: Descriptors, at: int = 0) -> tuple[Int64s, Int64s, Int64s]:
    """(our address, offset in the region, length) of each piece of a pull, i64[blocks * pieces]. The pieces are the
    bytes ``at`` and on of each block."""
    base = np.fromiter((block.memory.address + block.offset for block in blocks), np.int64, len(blocks)) + at
    offset, length = descriptors[:, :, 0], descriptors[:, :, 1]
    if descriptors.shape[1] == 1:
        return base, offset.ravel(), length.ravel()
    target = base[:, None] + np.cumsum(length, axis=1) - length
    return target.ravel(), offset.ravel(), length.ravel()


def pull(
    region: MappedRegion | ProcessRegion, blocks: Sequence[Block], table: Descriptors | FewPieces, at: int = 0
) -> None:
    """Copy each block's pieces into its slot, from byte ``at`` on. The caller keeps the slots from being reused."""
    if isinstance(table, FewPieces):
        region.pull_few(placed(blocks, table, at))
    else:
        region.pull(*spread(blocks, table, at))
