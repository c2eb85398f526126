"""A device that is not there, with teeth: its memory has addresses that this process cannot touch.

::

    memfd --- mapped PROT_NONE at the "device address": a host read crashes, process_vm_readv says EFAULT
          \\-- mapped read-write as the shadow: what the device holds; only the runtime and tests touch it

Its streams run when a test says so, and its copies can be held, so that overlap and order can be seen.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.gpu.host import AFTER_LIMIT_S, HostRuntime
from kvstrata.transfer.gpu.runtime import Event
from kvstrata.transfer.gpu.runtimes import installed
from kvstrata.transfer.memory import Memory

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_handles = itertools.count(1 << 20)
_current = threading.local()

ALIGNMENT = 256
GUARD_BYTES = 4096


class FakeStream:
    """Work of the engine, in order, none of it before :meth:`run`. ``with stream:`` makes it the thread's current."""

    def __init__(self) -> None:
        self.handle = next(_handles)
        self._work: list[Callable[[], None]] = []

    def queue(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self._work.append(event.set)
        return event

    def run(self, count: int | None = None) -> None:
        """The next ``count`` pieces of work; without it, all."""
        for _ in range(len(self._work) if count is None else count):
            self._work.pop(0)()

    def __enter__(self) -> FakeStream:
        self._before = getattr(_current, "stream", None)
        _current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before


class FakeEvent(threading.Event):
    """Done when its stream came to it."""

    def done(self) -> bool:
        return self.is_set()


class FakeArray:
    """Device memory of ``shape`` and ``dtype``, C-contiguous. ``shadow``: what the device holds there."""

    def __init__(self, device: FakeDevice, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.fake, self.address, self.shape, self.dtype = device, address, shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.stream: FakeStream | None = None
        self.writable = True
        self.strides: tuple[int, ...] | None = None

    @property
    def shadow(self) -> npt.NDArray[Any]:
        start = self.address - self.fake.base
        return self.fake.shadow[start : start + self.nbytes].view(self.dtype).reshape(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, not self.writable),
            "strides": self.strides,
            "stream": None if self.stream is None else self.stream.handle,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2 if self.fake.memory.kind == "cuda" else 10), self.fake.memory.device

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("a device array does not become a numpy array by itself")


class FakeDevice:
    """``nbytes`` of device memory at ``base``, handed out by :meth:`empty`; ``shadow``: u8[nbytes]."""

    def __init__(self, nbytes: int = 16 << 20, memory: Memory = Memory("cuda", 0)) -> None:  # noqa: B008
        self.memory, self.nbytes = memory, nbytes
        self.allocations: list[tuple[int, int]] = []
        self._used = 0
        fd = os.memfd_create("fake-device")
        try:
            os.ftruncate(fd, nbytes)
            self.shadow = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
            base = _libc.mmap(None, nbytes, _PROT_NONE, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        assert base not in (None, ctypes.c_void_p(-1).value), "no address range for the fake device"
        self.base = int(base)
        self.runtime = FakeRuntime(self)

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8) -> FakeArray:
        """An allocation of its own, a guard apart from the last."""
        dims = (shape,) if isinstance(shape, int) else shape
        array = FakeArray(self, self.base + self._used, dims, dtype)
        self._used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT + GUARD_BYTES
        assert self._used <= self.nbytes, "the fake device is full: make it larger"
        self.allocations.append((array.address, array.nbytes))
        return array

    def array(self, source: npt.NDArray[Any]) -> FakeArray:
        """What ``source`` holds, on the device."""
        array = self.empty(source.shape, source.dtype)
        array.shadow[...] = source
        return array

    def stream(self) -> FakeStream:
        stream = FakeStream()
        self.runtime.streams[stream.handle] = stream
        return stream

    def close(self) -> None:
        self.runtime.close()
        _libc.munmap(self.base, self.nbytes)


class FakeRuntime(HostRuntime):
    """``launches``, ``pieces``: how many gathers and scatters began, and of how many pieces. ``retained``: calls."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device.memory)
        self.device = device
        self.streams: dict[int, FakeStream] = {}
        self.launches = {"gather": 0, "scatter": 0}
        self.pieces = {"gather": 0, "scatter": 0}
        self.retained = 0
        self._turn = threading.Condition()
        self._held = {"gather": False, "scatter": False}
        self._waiting = {"gather": 0, "scatter": 0}
        self._faults: list[str] = []

    @contextmanager
    def hold(self, *kinds: str) -> Iterator[None]:
        """No copy of these kinds ("gather", "scatter"; none: both) moves a byte meanwhile."""
        names = kinds or ("gather", "scatter")
        with self._turn:
            self._held.update(dict.fromkeys(names, True))
        try:
            yield
        finally:
            with self._turn:
                self._held.update(dict.fromkeys(names, False))
                self._turn.notify_all()

    def wait_held(self, kind: str, timeout_s: float = 10.0) -> None:
        """Until a copy of that kind stands at the barrier."""
        with self._turn:
            assert self._turn.wait_for(lambda: self._waiting[kind] > 0, timeout_s), f"no {kind} came"

    def fail_next(self, text: str = "an illegal memory access was encountered") -> None:
        """The next copy fails as a device's would."""
        self._faults.append(text)

    def mark(self) -> Event:
        stream = getattr(_current, "stream", None)
        return super().mark() if stream is None else stream.record()

    def allocation(self, address: int) -> tuple[int, int]:
        for base, nbytes in self.device.allocations:
            if base <= address < base + nbytes:
                return base, nbytes
        raise InvalidArgument(f"{address:#x} lies in no allocation of {self.memory.spelled()}")

    def retain(self) -> None:
        self.retained += 1

    def _marked(self, stream: int) -> Event:
        return self.streams[stream].record() if stream in self.streams else super().mark()

    def _located(self, address: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        bases, sizes = np.array(self.device.allocations, np.int64).reshape(-1, 2).T
        at = np.searchsorted(bases, address, side="right") - 1
        if bool((at < 0).any()) or bool((address + length > (bases + sizes)[at]).any()):
            raise Unavailable(f"{self.memory.spelled()}: an illegal memory access was encountered")
        return address - self.device.base + self.device.shadow.ctypes.data

    def _begin(self, gather: bool, pieces: int) -> None:
        kind = "gather" if gather else "scatter"
        with self._turn:
            self.launches[kind] += 1
            self.pieces[kind] += pieces
            self._waiting[kind] += 1
            self._turn.notify_all()
            open_again = self._turn.wait_for(lambda: not self._held[kind], AFTER_LIMIT_S)
            self._waiting[kind] -= 1
        assert open_again, f"nobody let the {kind} go on"
        if self._faults:
            raise Unavailable(f"{self.memory.spelled()}: {self._faults.pop(0)}")


@contextmanager
def fake_device(nbytes: int = 16 << 20, memory: Memory = Memory("cuda", 0)) -> Iterator[FakeDevice]:  # noqa: B008
    """A device whose runtime is what :func:`runtime_of` gives meanwhile."""
    device = FakeDevice(nbytes, memory)
    try:
        with installed(device.runtime):
            yield device
    finally:
        device.close()
