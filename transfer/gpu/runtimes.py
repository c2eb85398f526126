"""The process's runtimes: one for each memory, made when it is first asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstrata.transfer.gpu.cuda import CudaRuntime
from kvstrata.transfer.gpu.host import HostRuntime
from kvstrata.transfer.gpu.runtime import Runtime
from kvstrata.transfer.memory import Memory

_lock = threading.Lock()
_made: dict[tuple[int, Memory], Runtime] = {}
_installed: dict[Memory, Runtime] = {}


def runtime_of(memory: Memory) -> Runtime:
    """Shared by all who ask; a forked child gets its own. Raises :class:`Unavailable` saying what is missing."""
    with _lock:
        if memory in _installed:
            return _installed[memory]
        key = os.getpid(), memory
        if key not in _made:
            _made[key] = HostRuntime() if memory.on_host else CudaRuntime(memory)
        return _made[key]


@contextmanager
def installed(runtime: Runtime) -> Iterator[None]:
    """``runtime`` stands for its memory meanwhile: for tests without a device."""
    with _lock:
        before = _installed.get(runtime.memory)
        _installed[runtime.memory] = runtime
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _installed[runtime.memory]
            else:
                _installed[runtime.memory] = before
