"""The runtime of CUDA devices by cupy. ROCm's devices have the same one, by a cupy that was built for them.

Nothing here waits for a device, nor makes a caller's stream wait: order comes from events that our own streams wait
for. Whatever cupy, the driver or the compiler raise is :class:`Unavailable` here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np

from kvstrata.proto.errors import InvalidArgument, KVError, Unavailable
from kvstrata.transfer.gpu.cuda_driver import address_range
from kvstrata.transfer.gpu.cuda_events import CudaEvent, DriverEvent
from kvstrata.transfer.gpu.cuda_memory import CudaPinned, TableSlots
from kvstrata.transfer.gpu.cupy_module import current_device, load_cupy
from kvstrata.transfer.gpu.kernels import GATHER, SCATTER, SOURCE, THREADS, grid_of, launch_table
from kvstrata.transfer.gpu.pieces import PinnedTable, checked_pieces
from kvstrata.transfer.gpu.runtime import Bytes, Event, Int64s, Pinned
from kvstrata.transfer.gpu.torch_module import loaded_torch
from kvstrata.transfer.memory import Memory

_SUCCESS: Final = 0
_NOT_READY: Final = 600


class _Lane:
    """One of our streams, and the kernel that runs there.

    The kernel is launched once for nothing: drivers load it with its first launch, and may wait for the device then.
    """

    def __init__(self, cupy: Any, kernel: Any) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.kernel = kernel
        with self.stream:
            self.slots = TableSlots(cupy)
            kernel((1,), (THREADS,), (np.uint64(0), np.int64(0), np.int64(0), np.uint64(0)))


class CudaRuntime:
    """A :class:`~kvstrata.transfer.gpu.runtime.Runtime`. Raises :class:`Unavailable` saying what is missing."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._cupy = cupy = load_cupy()
        self._cuda = cuda = cupy.cuda.runtime
        self._lock = threading.Lock()
        self._pins = PinnedTable()
        if bool(cuda.is_hip) != (memory.kind == "rocm"):
            raise Unavailable(f"this cupy was built for {'ROCm' if cuda.is_hip else 'CUDA'}: not for {memory.kind}")
        with self._translated("cannot be used (kvstrata[gpu] brings cupy and its compiler)"):
            if memory.device >= cuda.getDeviceCount():
                raise Unavailable(f"there is no device {memory.spelled()}: {cuda.getDeviceCount()} are visible")
            with self._here():
                cuda.free(0)
                module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
                self._gathers = _Lane(cupy, module.get_function(GATHER))
                self._scatters = _Lane(cupy, module.get_function(SCATTER))

    def pinned(self, nbytes: int) -> Pinned:
        with self._translated(f"no {nbytes} bytes of pinned memory"), self._here():
            return CudaPinned(self._cupy, self.memory, nbytes, self._pins)

    def mark(self) -> Event:
        with self._translated("cannot mark the current stream"), self._here():
            return self._recorded(self._current_streams())

    def follow(self, stream: int) -> None:
        with self._translated(f"cannot follow stream {stream:#x}"), self._lock, self._here():
            marks = self._recorded([stream])
            for lane in (self._gathers, self._scatters):
                self._order(lane, marks)

    def gather(self, address: Int64s, length: Int64s, target: Bytes, after: Event | None = None) -> Event:
        self._pins.check(target, written=True)
        return self._launch(self._gathers, address, length, target, after)

    def scatter(self, source: Bytes, address: Int64s, length: Int64s, after: Event | None = None) -> Event:
        self._pins.check(source, written=False)
        return self._launch(self._scatters, address, length, source, after)

    def allocation(self, address: int) -> tuple[int, int]:
        with self._translated(f"cannot find the allocation of {address:#x}"), self._here():
            self._cuda.free(0)
            return address_range(self.memory, address)

    def retain(self) -> None:
        with self._translated("has no context"):
            self._cuda.setDevice(self.memory.device)
            self._cuda.free(0)  # does nothing, but for what comes with the first call

    # ------------------------------------------------------------------ launches

    def _launch(self, lane: _Lane, address: Int64s, length: Int64s, packed: Bytes, after: Event | None) -> Event:
        address, length = checked_pieces(address, length, packed)
        marks = self.mark() if after is None else after
        if not isinstance(marks, CudaEvent) or marks.owner is not self:
            raise InvalidArgument(f"the event to come after is none of {self.memory.spelled()}'s runtime")
        with self._translated("a copy could not be queued"), self._lock, self._here():
            self._order(lane, marks)
            if not len(address):
                return self._recorded([lane.stream.ptr])
            table, chunks = launch_table(address, length)
            end = DriverEvent(self._cupy, self.memory.device)
            with lane.stream:
                slot = lane.slots.take(table.nbytes)
                slot.upload(table, lane.stream)
                arguments = slot.kernel_arguments(len(address), chunks, packed.ctypes.data)
                try:
                    lane.kernel((grid_of(chunks),), (THREADS,), arguments)
                finally:
                    end.record(lane.stream.ptr)
                    event = CudaEvent(self, [end], self._reached)
                    slot.busy_until(event)
            return event

    def _order(self, lane: _Lane, marks: CudaEvent) -> None:
        for event in marks.events:
            self._cuda.streamWaitEvent(lane.stream.ptr, event.ptr)

    def _recorded(self, streams: list[int]) -> CudaEvent:
        events = []
        for stream in streams:
            events.append(DriverEvent(self._cupy, self.memory.device))
            events[-1].record(stream)
        return CudaEvent(self, events, self._reached)

    def _current_streams(self) -> list[int]:
        """Of the calling thread: cupy's, and torch's when it is in use; each has its own idea of it."""
        streams = {int(self._cupy.cuda.get_current_stream().ptr)}
        torch = loaded_torch()
        if torch is not None and torch.cuda.is_initialized():
            streams.add(int(torch.cuda.current_stream(self.memory.device).cuda_stream))
        return sorted(streams)

    # ------------------------------------------------------------------ inside

    def _reached(self, event: DriverEvent) -> bool:
        """Whether the device came to it. Raises :class:`Unavailable` when it failed on the way."""
        with self._translated("failed"), self._here():
            status = self._cuda.eventQuery(event.ptr)
            if status not in (_SUCCESS, _NOT_READY):
                raise self._cuda.CUDARuntimeError(status)
            return bool(status == _SUCCESS)

    def _here(self) -> AbstractContextManager[None]:
        return current_device(self._cupy, self.memory.device)

    @contextmanager
    def _translated(self, problem: str) -> Iterator[None]:
        try:
            yield
        except KVError:
            raise
        except (RuntimeError, MemoryError, ImportError, OSError, self._cupy.cuda.compiler.CompileException) as error:
            raise Unavailable(f"{self.memory.spelled()}: {problem}: {type(error).__name__}: {error}") from error
