"""What is asked of a device: pinned memory, and gathers and scatters that run beside the caller's own work.

One implementation for CUDA (cupy), one for host arrays, which does the same on a CPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.memory import Memory

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Pinned(Protocol):
    """Host memory that the device reaches by itself. ``bytes``: flat u8."""

    bytes: Bytes

    def close(self) -> None: ...


class Event(Protocol):
    """The end of a gather or scatter on the runtime's own stream."""

    def done(self) -> bool: ...
    def wait(self) -> None:
        """Until then, without holding the interpreter."""


class Runtime(Protocol):
    """One device. Thread-safe. Calls queue work and return; only :meth:`Event.wait` waits for the device."""

    memory: Memory

    def pinned(self, nbytes: int) -> Pinned:
        """Raises :class:`Unavailable` when there is none to be had."""

    def gather(self, address: Int64s, length: Int64s, target: Bytes) -> Event:
        """Pack pieces of device memory, in order, into pinned ``target`` (its length is their sum).

        After all that the caller's current stream has queued by now.
        """

    def scatter(self, source: Bytes, address: Int64s, length: Int64s) -> Event:
        """Unpack pinned ``source`` into pieces of device memory, in order; when it begins as :meth:`gather`."""

    def allocation(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that ``address`` lies in: what has to be registered for direct access."""

    def retain(self) -> None:
        """Make the device's primary context current in this thread, so that a library that looks for it finds it."""
