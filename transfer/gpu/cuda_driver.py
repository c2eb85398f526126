"""What cupy does not have of the driver: the allocation that an address lies in."""

from __future__ import annotations

import ctypes
from typing import Final

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.memory import Memory

#: (library, function) by kind; both have the same arguments.
_FUNCTIONS: Final = {
    "cuda": ("libcuda.so.1", "cuMemGetAddressRange_v2"),
    "rocm": ("libamdhip64.so", "hipMemGetAddressRange"),
}
_INVALID_VALUE: Final = 1
_NOT_FOUND: Final = 500


def address_range(memory: Memory, address: int) -> tuple[int, int]:
    """(base, bytes). The device's context is to be current in this thread.

    Raises :class:`InvalidArgument` when the address lies in no allocation, :class:`Unavailable` without a driver.
    """
    library, function = _FUNCTIONS[memory.kind]
    try:
        call = ctypes.CDLL(library)[function]
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{memory.spelled()}: the driver's library is not there: {error}") from error
    call.restype = ctypes.c_int
    call.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64]
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = call(ctypes.byref(base), ctypes.byref(nbytes), address)
    if status in (_INVALID_VALUE, _NOT_FOUND):
        raise InvalidArgument(f"{address:#x} lies in no allocation of {memory.spelled()}")
    if status:
        raise Unavailable(f"{memory.spelled()}: {function} says {status}")
    return base.value, nbytes.value
