"""Memory of a client that the node reads by one-sided transfers, and how many of them are in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.copier import merge_runs
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.engine import Job, Pieces

Int64s = npt.NDArray[np.int64]
#: Begins a read of the second pieces into the first. Those that read from the same agent are equal.
Starter = Callable[[Pieces, Pieces], Job]


class Flights:
    """How many transfers have begun and not settled. Thread-safe."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._count = 0
        self._closed = False

    def begin(self) -> bool:
        """One more, unless :meth:`close` was called: False then."""
        with self._change:
            if self._closed:
                return False
            self._count += 1
            return True

    def end(self) -> None:
        with self._change:
            self._count -= 1
            if not self._count:
                self._change.notify_all()

    def close(self) -> None:
        """None may begin any more."""
        with self._change:
            self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_idle(self, deadline: float) -> bool:
        """Wait until all have settled, or until ``deadline`` (monotonic seconds); whether they have."""
        with self._change:
            return self._change.wait_for(lambda: not self._count, max(0.0, deadline - time.monotonic()))

    def __len__(self) -> int:
        return self._count


class RailRegion:
    """Memory of a client that this node's agent reads by itself; ``start`` begins a read from the client's agent."""

    method = "rdma"

    def __init__(self, start: Starter, address: int, nbytes: int, memory: Memory = HOST) -> None:
        self.nbytes = nbytes
        self.memory = memory
        self.flights = Flights()
        self._start = start
        self._address = address

    def serves(self, other: RailRegion) -> bool:
        """Whether it is open, and the same memory of the same agent."""
        return not self.flights.closed and self._named() == other._named()

    def _named(self) -> tuple[object, ...]:
        return self._start, self._address, self.nbytes, self.memory

    def read(self, target: Int64s, offset: Int64s, length: Int64s) -> Job:
        """Begin what :meth:`MappedRegion.pull` does. Both ends are in use until the job has settled.

        Raises :class:`InvalidArgument` when the region has been unregistered meanwhile.
        """
        target, source, length = merge_runs(target, offset + self._address, length)
        if not self.flights.begin():
            raise InvalidArgument("the region is being unregistered")
        try:
            job = self._start(Pieces(target, length), Pieces(source, length, self.memory))
        except BaseException:
            self.flights.end()
            raise
        job.then(self.flights.end)
        return job
