"""Where an array's memory is, by DLPack's capsule. Nothing is copied, and the capsule stays unconsumed.

A capsule that nobody consumed frees its tensor when it is dropped, so whoever holds :attr:`Exported.capsule` holds the
memory. Layouts: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from kvstrata.proto.errors import InvalidArgument

CPU: Final = 1
CUDA: Final = 2
CUDA_HOST: Final = 3
ROCM: Final = 10
ROCM_HOST: Final = 11
CUDA_MANAGED: Final = 13

#: Device types whose memory this process reads and writes as any other.
HOST_TYPES: Final = frozenset({CPU, CUDA_HOST, ROCM_HOST})
KIND_OF_TYPE: Final = {CUDA: "cuda", CUDA_MANAGED: "cuda", ROCM: "rocm"}

_MAJOR: Final = 1
_READ_ONLY: Final = 1
_NO_SYNC: Final = -1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class Exported:
    """``strides``: in bytes, None for C-contiguous. ``capsule`` keeps the memory."""

    device_type: int
    device_id: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    itemsize: int
    writable: bool
    capsule: object


def device_type_of(buffer: Any) -> tuple[int, int] | None:
    """(DLPack device type, device number), or None for what has no DLPack."""
    ask = getattr(buffer, "__dlpack_device__", None)
    if ask is None:
        return None
    kind, number = ask()
    return int(kind), int(number)


def exported(buffer: Any, device_type: int) -> Exported:
    """Read what ``buffer.__dlpack__`` gives; no stream is made to wait. Raises :class:`InvalidArgument`."""
    capsule = _capsule(buffer, {} if device_type in HOST_TYPES else {"stream": _NO_SYNC})
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _MAJOR:
            raise InvalidArgument(f"the array speaks DLPack {managed.major}.{managed.minor}: expected {_MAJOR}.x")
        return _read(managed.tensor, capsule, writable=not managed.flags & _READ_ONLY)
    if _is_valid(capsule, b"dltensor"):
        return _read(_Tensor.from_address(_pointer(capsule, b"dltensor")), capsule, writable=True)
    raise InvalidArgument(f"{type(buffer).__name__}.__dlpack__ gave no DLPack capsule")


def _capsule(buffer: Any, asked: dict[str, int]) -> object:
    try:
        try:
            return buffer.__dlpack__(max_version=(_MAJOR, 0), **asked)
        except TypeError:  # older than DLPack 1.0
            return buffer.__dlpack__(**asked)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"cannot register {type(buffer).__name__}: {error}") from error


def _read(tensor: _Tensor, capsule: object, *, writable: bool) -> Exported:
    bits = tensor.bits * tensor.lanes
    if bits % 8:
        raise InvalidArgument(f"elements of {bits} bits: register the array's bytes, as a view of uint8")
    itemsize = bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(step * itemsize for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return Exported(tensor.device_type, tensor.device_id, address, shape, strides, itemsize, writable, capsule)
