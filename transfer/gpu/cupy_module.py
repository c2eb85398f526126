"""cupy, imported when a device is first used: without a device nothing here needs it."""

from __future__ import annotations

import importlib
from typing import Any

from kvstrata.proto.errors import Unavailable


def load_cupy() -> Any:
    """The module. Raises :class:`Unavailable` saying what to install."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Unavailable(f"device memory needs cupy: pip install 'kvstrata[gpu]' ({error})") from error


def device_of(address: int) -> int:
    """The number of the device that ``address`` is on, as the driver says. Raises :class:`Unavailable`."""
    runtime = load_cupy().cuda.runtime
    try:
        return int(runtime.pointerGetAttributes(address).device)
    except runtime.CUDARuntimeError as error:
        raise Unavailable(f"the driver does not say which device {address:#x} is on: {error}") from error
