"""A read into device memory, through the ring: while one chunk is scattered, the next one is fetched.

::

    network   | fetch 0 | fetch 1   | fetch 2   |
    device              | scatter 0 | scatter 1 | scatter 2 |  a block is LOADED once its scatter has ended
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from msgspec.structs import replace

from kvstrata.proto.errors import Busy, Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Fetch, Fetched, Mask, Peer
from kvstrata.transfer.gpu.flights import DeviceFailed, Flight, events_ended
from kvstrata.transfer.gpu.layouts import by_range, cut, packed, runs, whole_blocks
from kvstrata.transfer.gpu.ring import Chunk, Ring
from kvstrata.transfer.gpu.staged_call import OVER, StagedCall
from kvstrata.transfer.regions import BlockView

#: Chunks that one call uses at a time.
IN_FLIGHT_MAX: Final = 2

_UNKNOWN: Final = int(BlockStatus.UNKNOWN)
_LOADED: Final = int(BlockStatus.LOADED)
_LATE: Final = int(BlockStatus.LATE)
_PENDING: Final = int(BlockStatus.PENDING)
_REFUSED: Final = int(BlockStatus.REFUSED)
#: In no answer: its bytes are in a chunk, and on their way to the device.
_FLYING: Final = 255


class StagedFetch(StagedCall):
    """One call. Used by its caller's thread, and by the one in which ``inner`` tells of ranges meanwhile."""

    def __init__(self, inner: Peer, ring: Ring, request: Fetch) -> None:
        super().__init__(inner, ring, len(request.blocks))
        self._request = request
        self._tier = np.zeros(len(request.blocks), np.uint8)
        self._sequences: list[int] = []
        self._flying: deque[Flight] = deque()
        self._ranges: _Ranges | None = None
        self._mistake: Exception | None = None  # what ``landed`` raised: nothing is told after it

    def run(self) -> Fetched:
        """As :meth:`Peer.fetch`. What ends the whole call is raised when nothing touches the caller's memory."""
        refusal = self._carry_out(self._fetch_all, self._land_all)
        self._status[self._status == _UNKNOWN] = _REFUSED
        if refusal is None or self._pending:
            self._tell_rest()
        self._finish(refusal or self._mistake, "read")
        moved = int(np.count_nonzero(self._status == _LOADED)) * self._request.blocks.block_bytes
        return Fetched(self._status, self._tier, min(self._sequences, default=0), moved, tuple(self._pending))

    # ------------------------------------------------------------------ chunk after chunk

    def _fetch_all(self) -> None:
        count = len(self._status)
        rows = max(1, self._ring.chunk_bytes // self._request.blocks.block_bytes)
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            flight = Flight(self._chunk(rows * self._request.blocks.block_bytes), np.arange(first, stop))
            self._flying.append(flight)
            if not self._fetch_chunk(flight, first, stop):
                break

    def _fetch_chunk(self, flight: Flight, first: int, stop: int) -> bool:
        """Fetch blocks ``first`` to ``stop`` and queue their scatter. False: the node is not to be asked for more."""
        request, count = self._request, stop - first
        width, blocks = request.namespace.hash_bytes, request.blocks[first:stop]
        ranges = None
        if stop == len(self._status) and request.landed is not None and len(request.parts) > 1:
            ranges = self._ranges = _Ranges(self, flight, blocks, request.parts)
            into = by_range(flight.chunk.region, count, request.parts)
        else:
            into = whole_blocks(flight.chunk.region, count, blocks.block_bytes)
        fetched = self._inner.fetch(
            replace(
                request,
                hashes=request.hashes[first * width : stop * width],
                blocks=into,
                parts=() if ranges is None else request.parts,
                landed=None if ranges is None else ranges.landed,
            )
        )
        self._sequences.append(fetched.delta_seq)
        self._tier[first:stop] = fetched.tier
        flight.pending = fetched.pending
        loaded = fetched.status == _LOADED
        # What still may be written late is the chunk, and not the caller's memory.
        status = np.where(fetched.status == _PENDING, np.uint8(_LATE), fetched.status)
        self._status[first:stop] = np.where(loaded, np.uint8(_UNKNOWN), status)
        if ranges is None:
            self.scatter(flight, blocks, loaded, 0)
        else:
            ranges.complete(loaded)
        self._status[flight.rows[loaded]] = _FLYING
        flight.rows = flight.rows[loaded if ranges is None else ranges.touched()]
        if stop < len(self._status) and np.isin(status, OVER).all():
            self._status[stop:] = status[-1]
            return False
        return True

    def _chunk(self, nbytes: int) -> Chunk:
        """One to fetch into: a free one, or the oldest of this call once it has been scattered."""
        try:
            while self._flying:
                if len(self._flying) < IN_FLIGHT_MAX and (chunk := self._ring.try_take(nbytes)) is not None:
                    return chunk
                self._land(self._flying.popleft())
            return self._ring.take(nbytes, self._request.deadline)
        except Unavailable as error:
            raise DeviceFailed(str(error)) from error

    def scatter(self, flight: Flight, blocks: BlockView, which: Mask, start: int) -> None:
        """Queue copies of the blocks ``which`` (bool[m]), which are in the chunk from byte ``start`` on, all m of
        them, one after the other. Raises :class:`DeviceFailed`."""
        size, source = blocks.block_bytes, flight.chunk.pinned.bytes
        try:
            for low, high in runs(which):
                address, length = packed(blocks[low:high])
                part = source[start + low * size : start + high * size]
                flight.events.append(self._ring.runtime.scatter(part, address, length, blocks.after))
        except Unavailable as error:
            raise DeviceFailed(str(error)) from error

    # ------------------------------------------------------------------ its end

    def _land_all(self) -> None:
        while self._flying:
            flight = self._flying.popleft()
            try:
                if self._ranges is not None and flight is self._ranges.flight:
                    self._ranges.tell_by(self._status == _LOADED, self._request.deadline)
            finally:
                self._land_last(flight)

    def _land_last(self, flight: Flight) -> None:
        try:
            self._land(flight)
        except DeviceFailed as error:
            self._failed(error)

    def _land(self, flight: Flight) -> None:
        """Wait for a flight: its blocks are LOADED, or PENDING when the device is not done by the deadline.

        Raises :class:`DeviceFailed`; the flight has ended all the same.
        """
        rows, status = flight.rows, self._status
        try:
            ended = events_ended(flight.events, self._request.deadline)
        except DeviceFailed:
            status[rows] = _REFUSED
            self._ring.lose(flight.chunk)
            raise
        if ended:
            self._copies_ended += len(flight.events)
            status[rows[status[rows] == _FLYING]] = _LOADED
            self._ring.give_back(flight.chunk, flight.pending)
        else:
            landing = flight.landing(self._request.blocks.region)
            status[rows] = _PENDING
            self._pending.append(landing)
            self._ring.give_back(flight.chunk, (*flight.pending, landing))

    # ------------------------------------------------------------------ ranges

    def in_place(self, flight: Flight) -> Mask | None:
        """Blocks of chunks before ``flight`` that are LOADED, bool[n]; None while one is under way."""
        while self._flying[0] is not flight:
            if not events_ended(self._flying[0].events):
                return None
            self._land(self._flying.popleft())
        loaded: Mask = self._status == _LOADED
        return loaded

    def tell(self, part: int, loaded: Mask) -> None:
        if self._request.landed is not None and self._mistake is None:
            try:
                self._request.landed(part, loaded)
            except Exception as error:  # noqa: BLE001  raised by run(), or in the log
                self._mistake = error

    def _tell_rest(self) -> None:
        """Ranges that were not told of before: of what is loaded."""
        for part in range(self._ranges.told if self._ranges is not None else 0, len(self._request.parts)):
            self.tell(part, self._status == _LOADED)


class _Ranges:
    """Ranges of a call's last chunk: scattered as they come from the node, told of as the scatters end."""

    def __init__(self, call: StagedFetch, flight: Flight, blocks: BlockView, ends: tuple[int, ...]) -> None:
        self._call, self.flight, self._count = call, flight, len(blocks)
        self._rows = flight.rows
        self._starts = (0, *ends[:-1])
        self._views = [cut(blocks, low, high) for low, high in zip(self._starts, ends, strict=True)]
        self._queued = np.zeros((len(ends), self._count), np.bool_)
        self._marks = [0] * len(ends)  # how many events were queued with a range
        self._loaded: Mask = np.ones(self._count, np.bool_)
        self._reached = 0  # ranges that have come from the node
        self._problem: DeviceFailed | Busy | None = None
        self.told = 0

    def landed(self, part: int, which: Mask) -> None:
        """Range ``part`` of ``which`` blocks (bool[m]) is in the chunk."""
        if self._problem is None:
            try:
                self._queue(part, which)
                self._reached = part + 1
                self._tell(self._call.in_place(self.flight))
            except (DeviceFailed, Busy) as error:
                self._problem = error  # the transport that calls has nothing to do with it: complete() raises it

    def complete(self, loaded: Mask) -> None:
        """The node has answered: what is ``loaded`` and was not scattered yet, is."""
        if self._problem is not None:
            raise self._problem
        for part in range(len(self._views)):
            self._queue(part, loaded & ~self._queued[part])
        self._loaded, self._reached = loaded, len(self._views)

    def touched(self) -> Mask:
        """Blocks (bool[m]) of which something is, or was, on its way to the device."""
        return np.asarray(self._queued.any(axis=0), np.bool_)

    def tell_by(self, before: Mask, deadline: float) -> None:
        """Tell of what has come as its scatter ends. ``before``: what is LOADED of the chunks before, all landed."""
        if self._problem is None:
            try:
                self._tell(before, deadline)
            except DeviceFailed as error:
                self._problem = error

    def _queue(self, part: int, which: Mask) -> None:
        self._call.scatter(self.flight, self._views[part], which, self._count * self._starts[part])
        self._queued[part] |= which
        self._marks[part] = len(self.flight.events)

    def _tell(self, before: Mask | None, deadline: float | None = None) -> None:
        while before is not None and self.told < self._reached:
            part = self.told
            if not events_ended(self.flight.events[: self._marks[part]], deadline):
                return
            loaded = before.copy()
            loaded[self._rows] = self._queued[part] & self._loaded
            self.told += 1
            self._call.tell(part, loaded)
