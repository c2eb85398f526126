"""Events of a CUDA device: recorded in streams, waited for by other streams, asked by anyone."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from kvstrata.transfer.gpu.cupy_module import current_device

#: How often :meth:`CudaEvent.wait` looks, at first and at last: a wait in the driver would have no deadline.
LOOK_S: Final = 20e-6
LOOK_MAX_S: Final = 200e-6


class DriverEvent:
    """One point in one stream, once it is recorded. ``ptr``: the driver's handle.

    Not cupy.cuda.Event: that is given back in whatever thread drops it last, with whatever device is current there.
    """

    def __init__(self, cupy: Any, device: int) -> None:
        """The device is to be current in this thread, for this and for :meth:`record`."""
        self._cuda = cuda = cupy.cuda.runtime
        self.ptr = int(cuda.eventCreateWithFlags(cuda.eventDisableTiming))
        weakref.finalize(self, _destroy, cupy, device, self.ptr).atexit = False

    def record(self, stream: int) -> None:
        """At what that stream has queued by now."""
        self._cuda.eventRecord(self.ptr, stream)


def _destroy(cupy: Any, device: int, event: int) -> None:
    try:
        with current_device(cupy, device):
            cupy.cuda.runtime.eventDestroy(event)
    except RuntimeError:
        pass  # the device has failed, and its events are gone with its context; every call since then said so


class CudaEvent:
    """Points in one or several streams. ``reached``: whether the device came to one of them."""

    def __init__(self, owner: object, events: list[DriverEvent], reached: Callable[[DriverEvent], bool]) -> None:
        self.owner, self.events = owner, events
        self._reached = reached

    def done(self) -> bool:
        self.events = [event for event in self.events if not self._reached(event)]
        return not self.events

    def wait(self, timeout_s: float) -> bool:
        deadline, look_s = time.monotonic() + timeout_s, LOOK_S
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(look_s, left))
            look_s = min(look_s * 1.5, LOOK_MAX_S)
        return True
