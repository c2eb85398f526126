"""As much of cupy as the CUDA runtime takes, without a GPU: streams are queues, kernels run on this CPU.

Nothing queued moves before the stand-in device is looked at (an event is queried), so memory that is given up or
changed too early shows. There is no call that waits for the device: whoever makes one gets an AttributeError.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.transfer.gpu.cpu_kernels import CpuKernels

ILLEGAL_ADDRESS = 700
NOT_READY = 600

Operation = Callable[[], bool]  #: whether it is over; if not, its stream waits


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CompileException(Exception):
    pass


class Device:
    """What cupy's modules share: queues by stream, registered memory, contexts by thread."""

    def __init__(self, kernels: CpuKernels, devices: int = 2) -> None:
        self.kernels, self.devices = kernels, devices
        self.queues: dict[int, deque[Operation]] = {}
        self.events: dict[int, bool] = {}
        self.registered: dict[int, int] = {}
        self.status = 0
        self.destroyed = 0
        self.launches: list[tuple[str, int]] = []  #: (kernel, thread blocks)
        self.contexts: set[int] = set()
        self.thread = threading.local()
        self.next = 1 << 12
        self.launch_error: Exception | None = None
        self.lock = threading.RLock()

    def handle(self) -> int:
        with self.lock:
            self.next += 1
            return self.next

    def queue(self, stream: int, operation: Operation) -> None:
        with self.lock:
            self.queues.setdefault(stream, deque()).append(operation)

    def progress(self) -> None:
        with self.lock:
            moved = True
            while moved:
                moved = False
                for queue in self.queues.values():
                    while queue and queue[0]():
                        queue.popleft()
                        moved = True

    def context(self) -> int:
        return getattr(self.thread, "context", 0)


class _Runtime:
    memcpyHostToDevice = 1
    eventDisableTiming = 2
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91
    is_hip = False
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, device: Device) -> None:
        self._device = device

    def getDeviceCount(self) -> int:
        return self._device.devices

    def setDevice(self, number: int) -> None:
        self._device.contexts.add(number)
        self._device.thread.context = number + 1

    def free(self, address: int) -> None:
        assert address == 0 and self._device.context(), "no device is current"

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return 1

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == self.eventDisableTiming and self._device.context()
        event = self._device.handle()
        self._device.events[event] = False
        return event

    def eventDestroy(self, event: int) -> None:
        """What waits for it goes on waiting, as on a device."""
        assert self._device.context(), "no device is current"
        if self._device.status:
            raise CUDARuntimeError(self._device.status)
        self._device.destroyed += 1

    def eventRecord(self, event: int, stream: int) -> None:
        self._device.events[event] = False

        def reached() -> bool:
            self._device.events[event] = True
            return True

        self._device.queue(stream, reached)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self._device.queue(stream, lambda: self._device.events[event])

    def eventQuery(self, event: int) -> int:
        assert self._device.context(), "no device is current"
        self._device.progress()
        return self._device.status or (0 if self._device.events[event] else NOT_READY)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 3 and address not in self._device.registered
        self._device.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        if self._device.status:
            raise CUDARuntimeError(self._device.status)
        del self._device.registered[address]

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 1
        self._device.queue(stream, lambda: bool(ctypes.memmove(target, source, nbytes)) or True)


class _Memory:
    """Device memory and pinned memory: this process's."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.ptr = self.array.ctypes.data


class FakeCupy:
    """To be put at ``sys.modules["cupy"]``. ``device``: what it all comes to."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.device = device = Device(kernels)

        class Stream:
            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking, "it would wait for the legacy default stream"
                self.ptr = device.handle()

            def __enter__(self) -> Stream:
                self.before = getattr(device.thread, "stream", None)
                device.thread.stream = self
                return self

            def __exit__(self, *_: object) -> None:
                device.thread.stream = self.before

        def current() -> Any:
            return getattr(device.thread, "stream", None) or SimpleNamespace(ptr=0)

        def set_current(context: int) -> None:
            device.thread.context = context

        self.RawModule = lambda code, options: _Module(device, current)
        self.cuda = SimpleNamespace(
            runtime=_Runtime(device),
            driver=SimpleNamespace(ctxGetCurrent=device.context, ctxSetCurrent=set_current),
            compiler=SimpleNamespace(CompileException=CompileException),
            Stream=Stream,
            get_current_stream=current,
            alloc=_Memory,
            alloc_pinned_memory=lambda nbytes: _Memory(nbytes).array.data,
        )


class _Module:
    def __init__(self, device: Device, current: Callable[[], Any]) -> None:
        self._device, self._current = device, current

    def get_function(self, name: str) -> Callable[..., None]:
        kind = name.removeprefix("kvstrata_")

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[np.generic, ...]) -> None:
            assert [a.dtype.itemsize for a in arguments] == [8] * 4, "all parameters have 64 bits"
            if self._device.launch_error is not None:
                raise self._device.launch_error
            table, pieces, chunks, packed = map(int, arguments)
            if not chunks:
                return
            self._device.launches.append((kind, grid[0]))
            self._device.queue(
                self._current().ptr, lambda: self._run(kind, table, pieces, chunks, packed, grid[0], block[0])
            )

        return launch

    def _run(self, kind: str, table: int, pieces: int, chunks: int, packed: int, grid: int, threads: int) -> bool:
        if not any(base <= packed < base + size for base, size in self._device.registered.items()):
            self._device.status = ILLEGAL_ADDRESS
            return True
        rows = np.frombuffer((ctypes.c_int64 * (4 * pieces)).from_address(table), np.int64).reshape(4, pieces)
        self._device.kernels.run(kind, rows, chunks, packed, grid, threads)
        return True
