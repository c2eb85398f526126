"""``kvstrata`` with ways to hurt it from within, by signal: SIGUSR1 holds the interpreter, SIGUSR2 its disks.

Run as ``python -m tests.chaos.hurt_node storage ...``. SIGUSR1: no other thread runs Python for
``KVSTRATA_HOG_S`` seconds (a C call that keeps the GIL). SIGUSR2: every operation of a disk hangs, until the next.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import FrameType
from typing import Any

from kvstrata.cli.app import main
from kvstrata.storage.ssd.faults import Faults
from kvstrata.storage.ssd.log import SsdLog

HOG_S = float(os.environ.get("KVSTRATA_HOG_S", "1"))


def hold_the_interpreter(seconds: float) -> None:
    """Sleep in C without letting go of the GIL: what a careless extension does. A signal may cut a sleep short."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        ctypes.PyDLL(None).usleep(max(1, int(left * 1e6)))


def hang_disks(faults: Faults) -> None:
    opened = SsdLog.open.__func__  # type: ignore[attr-defined]

    def faulty(cls: type[SsdLog], *args: Any, **more: Any) -> SsdLog:
        return opened(cls, *args, **{**more, "open_file": faults.open_file})  # type: ignore[no-any-return]

    SsdLog.open = classmethod(faulty)  # type: ignore[assignment, method-assign]
    hanging = False

    def toggle(number: int, frame: FrameType | None) -> None:
        nonlocal hanging
        hanging = not hanging
        (faults.stall if hanging else faults.resume)()

    signal.signal(signal.SIGUSR2, toggle)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda number, frame: hold_the_interpreter(HOG_S))
    hang_disks(Faults())
    main()
