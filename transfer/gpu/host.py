"""The runtime of host arrays: the same calls, order and errors as a device's, copied by a thread a direction."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Final

import numpy as np

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.copier import copy
from kvstrata.transfer.gpu.pieces import PinnedTable, checked_pieces
from kvstrata.transfer.gpu.runtime import Bytes, Event, Int64s, Pinned
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.regions import shareable

#: How long a copy waits for the work that it is to come after.
AFTER_LIMIT_S: Final = 30.0


class HostPinned:
    """Shareable memory; nothing is pinned on a host."""

    def __init__(self, nbytes: int, table: PinnedTable) -> None:
        if nbytes <= 0:
            raise InvalidArgument(f"pinned memory of {nbytes} bytes: expected at least one")
        try:
            self.bytes, _, self.memfd = shareable(nbytes)
        except OSError as error:
            raise Unavailable(f"no {nbytes} bytes of shareable memory: {error}") from error
        self._table = table
        table.add(self.bytes)

    def close(self) -> None:
        """Safe twice. The memory goes when nobody holds an array over it."""
        if self.memfd >= 0:
            self._table.remove(self.bytes)
            os.close(self.memfd)
            self.memfd = -1


class CopyEvent:
    """The end of one copy by a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self, timeout_s: float) -> bool:
        try:
            self._future.result(max(0.0, timeout_s))
        except NotYet:
            return False
        return True


class Reached:
    """An event that is done: on a host, what the caller did before is done when it calls."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class HostRuntime:
    """A :class:`~kvstrata.transfer.gpu.runtime.Runtime` over memory that this process can touch."""

    def __init__(self, memory: Memory = HOST) -> None:
        self.memory = memory
        self._pins = PinnedTable()
        self._lock = threading.Lock()
        self._followed: list[Event] = []
        name = memory.spelled() or "host"
        self._gathers = ThreadPoolExecutor(1, thread_name_prefix=f"kvstrata-gather-{name}")
        self._scatters = ThreadPoolExecutor(1, thread_name_prefix=f"kvstrata-scatter-{name}")

    def pinned(self, nbytes: int) -> Pinned:
        return HostPinned(nbytes, self._pins)

    def mark(self) -> Event:
        return Reached()

    def follow(self, stream: int) -> None:
        event = self._marked(stream)
        with self._lock:
            self._followed = [other for other in self._followed if not other.done()] + [event]

    def gather(self, address: Int64s, length: Int64s, target: Bytes, after: Event | None = None) -> Event:
        self._pins.check(target, written=True)
        return self._queue(self._gathers, address, length, target, after)

    def scatter(self, source: Bytes, address: Int64s, length: Int64s, after: Event | None = None) -> Event:
        self._pins.check(source, written=False)
        return self._queue(self._scatters, address, length, source, after)

    def allocation(self, address: int) -> tuple[int, int]:
        raise InvalidArgument("host memory has no device allocations")

    def retain(self) -> None:
        """A host has no context."""

    def close(self) -> None:
        """Ends its threads when what is queued has ended."""
        for lane in (self._gathers, self._scatters):
            lane.shutdown()

    # ------------------------------------------------------------------ what a stand-in for a device replaces

    def _marked(self, stream: int) -> Event:
        return Reached()

    def _located(self, address: Int64s, length: Int64s) -> Int64s:
        """Where this process touches what lies at ``address``; raises :class:`Unavailable` as a device would fault."""
        return address

    def _begin(self, gather: bool, pieces: int) -> None:
        """Called by the copying thread before the first byte."""

    # ------------------------------------------------------------------ the copying threads

    def _queue(
        self, lane: ThreadPoolExecutor, address: Int64s, length: Int64s, packed: Bytes, after: Event | None
    ) -> Event:
        address, length = checked_pieces(address, length, packed)
        with self._lock:
            events = [*self._followed, self.mark() if after is None else after]
        return CopyEvent(lane.submit(self._copy, lane is self._gathers, address, length, packed, events))

    def _copy(self, gather: bool, address: Int64s, length: Int64s, packed: Bytes, events: list[Event]) -> None:
        for event in events:
            if not event.wait(AFTER_LIMIT_S):
                raise Unavailable(f"the work before this copy did not end within {AFTER_LIMIT_S:.0f} s")
        self._begin(gather, len(address))
        if not len(address):
            return
        there = self._located(address, length)
        here = packed.ctypes.data + np.cumsum(length) - length
        if gather:
            copy(here, there, length)
        else:
            copy(there, here, length)
