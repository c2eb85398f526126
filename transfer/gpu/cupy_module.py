"""cupy, imported when a device is first used: without a device nothing here needs it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstrata.proto.errors import Unavailable


def load_cupy() -> Any:
    """The module. Raises :class:`Unavailable` saying what to install."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Unavailable(f"device memory needs cupy: pip install 'kvstrata[gpu]' ({error})") from error


@contextmanager
def current_device(cupy: Any, device: int) -> Iterator[None]:
    """The device, current in this thread for a while.

    Not by cupy.cuda.Device: that goes back to device 0 in a thread that had none, which makes a context there, of
    hundreds of megabytes, for each process that uses another device.
    """
    before = cupy.cuda.driver.ctxGetCurrent()
    cupy.cuda.runtime.setDevice(device)
    try:
        yield
    finally:
        cupy.cuda.driver.ctxSetCurrent(before)


def device_of(address: int) -> int:
    """The number of the device that ``address`` is on, as the driver says. Raises :class:`Unavailable`."""
    runtime = load_cupy().cuda.runtime
    try:
        return int(runtime.pointerGetAttributes(address).device)
    except runtime.CUDARuntimeError as error:
        raise Unavailable(f"the driver does not say which device {address:#x} is on: {error}") from error
