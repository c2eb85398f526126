"""What is asked of a device: pinned memory, and gathers and scatters that run beside the caller's own work.

One implementation for CUDA (cupy), one for host arrays, which does the same on a CPU.

::

    caller's stream   --- forward pass ---+--- next pass ---------------------->   never waits for us
                                          | (event)
    gathers' stream                       +-- gather --- gather --|             |  device memory -> pinned
    scatters' stream   -- scatter --|                                           |  pinned -> device memory

Gathers run in order, and so do scatters; a gather that waits for the caller holds up no scatter.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstrata.transfer.memory import Memory

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Pinned(Protocol):
    """Host memory that the device reaches by itself.

    ``bytes``: flat u8. ``memfd``: its descriptor, for a node on this host to map (offset 0 is ``bytes[0]``). Valid
    until :meth:`close`, so whoever keeps it longer duplicates it.
    """

    bytes: Bytes
    memfd: int

    def close(self) -> None:
        """Safe twice. Not while a gather or scatter that names it is under way."""


class Event(Protocol):
    """A point in a stream: what was queued before it has ended."""

    def done(self) -> bool:
        """Raises :class:`Unavailable` when the work failed; what it should have written is then undefined."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it was done by then; holds no interpreter lock. Raises as :meth:`done`."""


class Runtime(Protocol):
    """One device. Thread-safe. Calls queue work and return; only :meth:`Event.wait` waits for the device."""

    memory: Memory

    def pinned(self, nbytes: int) -> Pinned:
        """Raises :class:`Unavailable` when there is none to be had."""

    def mark(self) -> Event:
        """What the calling thread's current stream (cupy's and torch's) has queued by now."""

    def follow(self, stream: int) -> None:
        """All later gathers and scatters begin after what ``stream`` has queued by now.

        ``stream``: a handle as in ``__cuda_array_interface__`` (1: the legacy default, 2: the thread's default).
        """

    def gather(self, address: Int64s, length: Int64s, target: Bytes, after: Event | None = None) -> Event:
        """Pack pieces of device memory, in order, into ``target``: pinned, contiguous, of their sum's length.

        It begins after ``after``, a :meth:`mark` that perhaps another thread took; without one, after all that the
        caller's current stream has queued by now. Pinned memory and pieces are to stay until the event is done.
        Raises :class:`InvalidArgument`, :class:`Busy` (too many are under way) or :class:`Unavailable`; then no byte
        moves.
        """

    def scatter(self, source: Bytes, address: Int64s, length: Int64s, after: Event | None = None) -> Event:
        """Unpack ``source`` into pieces of device memory, in order; otherwise as :meth:`gather`."""

    def allocation(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that ``address`` lies in: what has to be registered for direct access.

        Raises :class:`InvalidArgument` when it lies in none.
        """

    def retain(self) -> None:
        """Make the device's primary context current in this thread, so that a library that looks for it finds it."""
