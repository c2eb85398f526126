"""A write from device memory, through the ring: while one chunk is pushed, the next one is gathered.

::

    device    | gather 0 | gather 1 | gather 2 |
    network              | push 0   | push 1   | push 2   |
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from kvstrata.proto.errors import Unavailable
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.base import Landing, Peer, Push, Pushed
from kvstrata.transfer.gpu.flights import DeviceFailed, Flight, events_ended
from kvstrata.transfer.gpu.layouts import packed, whole_blocks
from kvstrata.transfer.gpu.ring import Chunk, Ring
from kvstrata.transfer.gpu.staged_call import OVER, StagedCall

_UNKNOWN: Final = int(BlockStatus.UNKNOWN)
_STORED: Final = int(BlockStatus.STORED)
_LATE: Final = int(BlockStatus.LATE)
_PENDING: Final = int(BlockStatus.PENDING)
_REFUSED: Final = int(BlockStatus.REFUSED)


class StagedPush(StagedCall):
    """One call, in one thread."""

    def __init__(self, inner: Peer, ring: Ring, request: Push) -> None:
        super().__init__(inner, ring, len(request.blocks))
        self._request = request
        self._durable = np.zeros(len(request.blocks), np.bool_)
        self._gathered: Flight | None = None  # the chunk that is pushed next

    def run(self) -> Pushed:
        """As :meth:`Peer.push`. What ends the whole call is raised when nothing reads the caller's memory."""
        self._finish(self._carry_out(self._push_all, self._drop_gathered), "write")
        self._status[self._status == _UNKNOWN] = _REFUSED
        moved = int(np.count_nonzero(self._status == _STORED)) * self._request.blocks.block_bytes
        return Pushed(self._status, moved, self._durable, tuple(self._pending))

    # ------------------------------------------------------------------ chunk after chunk

    def _push_all(self) -> None:
        count, block_bytes = len(self._status), self._request.blocks.block_bytes
        step = max(1, self._ring.chunk_bytes // block_bytes)
        for first in range(0, count, step):
            stop = min(first + step, count)
            flight, self._gathered = self._gathered, None
            if flight is None:
                flight = self._gather(self._take(step * block_bytes), first, stop)
            try:
                chunk = self._try_take(step * block_bytes) if stop < count else None
                if chunk is not None:
                    self._gathered = self._gather(chunk, stop, min(stop + step, count))
            finally:
                over = self._push_chunk(flight, first, stop)
            if over:
                self._status[stop:] = self._status[stop - 1]
                break

    def _take(self, nbytes: int) -> Chunk:
        try:
            return self._ring.take(nbytes, self._request.deadline)
        except Unavailable as error:
            raise DeviceFailed(str(error)) from error

    def _try_take(self, nbytes: int) -> Chunk | None:
        try:
            return self._ring.try_take(nbytes)
        except Unavailable as error:
            raise DeviceFailed(str(error)) from error

    def _gather(self, chunk: Chunk, first: int, stop: int) -> Flight:
        """Queue the copy of blocks ``first`` to ``stop`` into a chunk. Raises :class:`DeviceFailed`."""
        blocks = self._request.blocks[first:stop]
        flight = Flight(chunk, np.arange(first, stop))
        target = chunk.pinned.bytes[: len(blocks) * blocks.block_bytes]
        try:
            flight.events.append(self._ring.runtime.gather(*packed(blocks), target, blocks.after))
        except BaseException as error:
            self._ring.give_back(chunk)
            if isinstance(error, Unavailable):
                raise DeviceFailed(str(error)) from error
            raise
        return flight

    def _push_chunk(self, flight: Flight, first: int, stop: int) -> bool:
        """Push a gathered chunk. True: the node is not to be asked to take more."""
        if not self._landed(flight):
            return False
        request, width = self._request, self._request.namespace.hash_bytes
        pending: tuple[Landing, ...] = ()
        try:
            pushed = self._inner.push(
                replace(
                    request,
                    hashes=request.hashes[first * width : stop * width],
                    blocks=whole_blocks(flight.chunk.region, stop - first, request.blocks.block_bytes),
                    parent=request.hashes[(first - 1) * width : first * width] if first else request.parent,
                    first_index=request.first_index + first,
                )
            )
            pending = pushed.pending
        finally:
            self._ring.give_back(flight.chunk, pending)
        # What may still be read late is the chunk, and not the caller's memory.
        status = np.where(pushed.status == _PENDING, np.uint8(_LATE), pushed.status)
        self._status[first:stop] = status
        if pushed.durable is not None:
            self._durable[first:stop] = pushed.durable
        return bool(np.isin(status, OVER).all())

    def _landed(self, flight: Flight) -> bool:
        """Wait for a gather. False: its blocks are PENDING, and the chunk is held until it has ended.

        Raises :class:`DeviceFailed`; the flight has ended all the same.
        """
        try:
            ended = events_ended(flight.events, self._request.deadline)
        except DeviceFailed:
            self._status[flight.rows] = _REFUSED
            self._ring.lose(flight.chunk)
            raise
        if not ended:
            landing = flight.landing(self._request.blocks.region)
            self._status[flight.rows] = _PENDING
            self._pending.append(landing)
            self._ring.give_back(flight.chunk, (landing,))
            return False
        self._copies_ended += 1
        return True

    def _drop_gathered(self) -> None:
        """A chunk that is not pushed any more: its gather has ended when the call returns, or is PENDING."""
        flight, self._gathered = self._gathered, None
        try:
            if flight is not None and self._landed(flight):
                self._ring.give_back(flight.chunk)
        except DeviceFailed as error:
            self._failed(error)
