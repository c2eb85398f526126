"""Memory that a CUDA runtime has of its own: pinned chunks, and the tables its kernels read."""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np

from kvstrata.proto.errors import Busy, InvalidArgument, Unavailable
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.gpu.cupy_module import current_device
from kvstrata.transfer.gpu.pieces import PinnedTable
from kvstrata.transfer.gpu.runtime import Event, Int64s
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import shareable

log = get_logger(__name__)

#: Launches of one direction that may be under way.
SLOTS_MAX: Final = 64
#: Made at the start: to allocate memory may wait for whatever the device is doing.
SLOTS_AT_START: Final = 2
#: A table of 8192 pieces.
SLOT_BYTES_MIN: Final = 256 << 10

_PORTABLE_AND_MAPPED: Final = 1 | 2


class CudaPinned:
    """Shareable memory that the driver has pinned and mapped: the device reaches it at its own address."""

    def __init__(self, cupy: Any, memory: Memory, nbytes: int, table: PinnedTable) -> None:
        """The device is to be current in this thread."""
        if nbytes <= 0:
            raise InvalidArgument(f"pinned memory of {nbytes} bytes: expected at least one")
        self._cupy, self._memory, self._table = cupy, memory, table
        cuda = cupy.cuda.runtime
        if not cuda.is_hip and not cuda.deviceGetAttribute(
            cuda.cudaDevAttrCanUseHostPointerForRegisteredMem, memory.device
        ):
            raise Unavailable(f"{memory.spelled()} reaches registered host memory at another address: not supported")
        self.bytes, _, self.memfd = shareable(nbytes)
        try:
            cuda.hostRegister(self.bytes.ctypes.data, nbytes, _PORTABLE_AND_MAPPED)
        except BaseException:
            os.close(self.memfd)
            raise
        table.add(self.bytes)

    def close(self) -> None:
        """Safe twice. A driver that has failed is only told of: the memory stays pinned then, and mapped."""
        if self.memfd < 0:
            return
        os.close(self.memfd)
        self.memfd = -1
        self._table.remove(self.bytes)
        try:
            with current_device(self._cupy, self._memory.device):
                self._cupy.cuda.runtime.hostUnregister(self.bytes.ctypes.data)
        except RuntimeError as error:
            _still_pinned.append(self.bytes)
            log.error("pinned memory stays pinned", device=self._memory.spelled(), reason=str(error))


#: What the driver did not give back: it is mapped as long as the process runs.
_still_pinned: list[Any] = []


class _Never:
    """An event that does not come."""

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float) -> bool:
        return False


_NEVER: Final = _Never()


class TableSlot:
    """A launch's table: pinned, from where it goes to the device with the launch, and there."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cupy = cupy
        self._pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        self._host: Int64s = np.frombuffer(self._pinned, np.int64, nbytes // 8)
        self._device = cupy.cuda.alloc(nbytes)
        self._event: Event | None = None

    def upload(self, table: Int64s, stream: Any) -> None:
        """Queue the copy to the device; ``table`` may be changed afterwards."""
        self._host[: table.size] = table.ravel()
        cuda = self._cupy.cuda.runtime
        cuda.memcpyAsync(self._device.ptr, self._host.ctypes.data, table.nbytes, cuda.memcpyHostToDevice, stream.ptr)

    def kernel_arguments(self, pieces: int, chunks: int, packed: int) -> tuple[np.generic, ...]:
        """As the kernels take them."""
        return np.uint64(self._device.ptr), np.int64(pieces), np.int64(chunks), np.uint64(packed)

    def busy_until(self, event: Event) -> None:
        self._event = event

    def idle(self) -> bool:
        return self._event is None or self._event.done()


class TableSlots:
    """The slots of one stream. Not thread-safe."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._slots = [TableSlot(cupy, SLOT_BYTES_MIN) for _ in range(SLOTS_AT_START)]

    def take(self, nbytes: int) -> TableSlot:
        """An idle slot of that size at least, for one launch: taken until ``busy_until`` says until when.

        One whose launch failed before that stays taken, since the device may read it yet. Raises :class:`Busy` when
        :data:`SLOTS_MAX` are taken.
        """
        slot = self._idle(nbytes)
        slot.busy_until(_NEVER)
        return slot

    def _idle(self, nbytes: int) -> TableSlot:
        for slot in self._slots:
            if slot.nbytes >= nbytes and slot.idle():
                return slot
        if len(self._slots) >= SLOTS_MAX:
            small = next((slot for slot in self._slots if slot.idle()), None)
            if small is None:
                raise Busy(f"{SLOTS_MAX} copies to or from the device are under way, or failed: wait for one of them")
            self._slots.remove(small)
        slot = TableSlot(self._cupy, max(SLOT_BYTES_MIN, 1 << (nbytes - 1).bit_length()))
        self._slots.append(slot)
        return slot
