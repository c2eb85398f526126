"""Arrays that speak nothing but DLPack, of whatever device type a test says."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy.typing as npt

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """DLTensor, as dlpack.h has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class DLPackArray:
    """``data``'s memory as if it were on ``device_type``. ``freed``: capsules dropped; ``streams``: what was asked."""

    def __init__(
        self,
        data: npt.NDArray[Any],
        device_type: int,
        device_id: int,
        *,
        versioned: bool = True,
        read_only: bool = False,
        byte_offset: int = 0,
        bits: int = 0,
        major: int = 1,
        error: Exception | None = None,
    ) -> None:
        self.data, self.device = data, (device_type, device_id)
        self.versioned, self.read_only, self.byte_offset, self.major = versioned, read_only, byte_offset, major
        self.bits, self.error = bits or data.itemsize * 8, error
        self.freed = 0
        self.streams: list[Any] = []
        self._keep: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if self.error is not None:
            raise self.error
        if "max_version" in asked and not self.versioned:
            raise TypeError("unexpected keyword max_version")
        self.streams.append(asked.get("stream"))
        steps = [step // self.data.itemsize for step in self.data.strides]
        shape = (ctypes.c_int64 * self.data.ndim)(*self.data.shape)
        strides = (ctypes.c_int64 * self.data.ndim)(*steps)
        tensor = Tensor(
            self.data.ctypes.data,
            self.device,
            self.data.ndim,
            (0, self.bits, 1, 0),
            ctypes.addressof(shape),
            ctypes.addressof(strides),
            self.byte_offset,
        )
        if self.versioned:
            managed: Any = ManagedVersioned((self.major, 0), None, None, int(self.read_only), tensor)
        else:
            managed = Managed(tensor, None, None)
        destructor = _Destructor(self._freed)
        self._keep.append((shape, strides, managed, destructor))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(managed), name, ctypes.cast(destructor, ctypes.c_void_p))

    def _freed(self, _: int) -> None:
        self.freed += 1
