"""What memory an array of any library lies in: by ``__cuda_array_interface__``, torch's own tensors, or DLPack.

No library is imported, no byte is touched, and nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu import dlpack
from kvstrata.transfer.gpu.cupy_module import device_of
from kvstrata.transfer.gpu.torch_module import loaded_torch
from kvstrata.transfer.memory import HOST, Memory

INTERFACE_VERSION_MIN: Final = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """``nbytes`` contiguous bytes at ``address``. ``owner`` keeps them.

    ``stream``: what its producer has queued there comes first (a handle, see ``Runtime.follow``); None: nothing does.
    """

    memory: Memory
    address: int
    nbytes: int
    writable: bool
    owner: object
    stream: int | None = None


def device_memory(buffer: Any) -> Buffer | None:
    """The device memory that ``buffer`` lies in; None when it lies in the host's, or says nothing of itself.

    cupy, torch (tensors and untyped storages) and numba arrays, and all that speak DLPack for CUDA or ROCm.
    Raises :class:`InvalidArgument` for memory that is not C-contiguous, empty, masked, or on another kind of device,
    and :class:`Unavailable` when only the driver could say which device it is on, and cupy is not there.
    """
    found = _described(buffer)
    return None if found is None or found.memory.on_host else found


def host_memory(buffer: Any) -> npt.NDArray[np.uint8] | None:
    """Flat u8 over a host array that has no array interface: torch's CPU tensors, or by DLPack. None for others.

    The array keeps the memory. Raises :class:`InvalidArgument` as :func:`device_memory`, and for device memory.
    """
    found = _described(buffer)
    if found is None:
        return None
    if not found.memory.on_host:
        raise InvalidArgument(f"the array is on {found.memory.spelled()}: the host cannot read it")
    return np.asarray(_HostView(found))


def _described(buffer: Any) -> Buffer | None:
    if isinstance(buffer, np.ndarray | bytes | bytearray | memoryview):
        return None
    torch = loaded_torch()
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _of_tensor(torch, buffer)
    if torch is not None and isinstance(buffer, torch.UntypedStorage):
        return _checked(Buffer(_torch_memory(torch, buffer.device), buffer.data_ptr(), buffer.nbytes(), True, buffer))
    interface = _interface(buffer)
    if interface is not None:
        return _of_interface(buffer, interface)
    device = None if hasattr(buffer, "__array_interface__") else dlpack.device_type_of(buffer)
    return None if device is None else _of_dlpack(buffer, device)


# ---------------------------------------------------------------------- torch


def _of_tensor(torch: Any, tensor: Any) -> Buffer:
    """Not by its interface: that knows neither fp8 nor tensors that require a gradient."""
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"the tensor's layout is {tensor.layout}: register tensor.to_dense()")
    memory = _torch_memory(torch, tensor.device)
    if not tensor.is_contiguous():
        raise InvalidArgument(
            "the tensor is not C-contiguous: register its storage (tensor.untyped_storage()) and use region.view()"
        )
    return _checked(Buffer(memory, tensor.data_ptr(), tensor.numel() * tensor.element_size(), True, tensor))


def _torch_memory(torch: Any, device: Any) -> Memory:
    if device.type == "cpu":
        return HOST
    if device.type != "cuda":
        raise InvalidArgument(f"memory on torch device {device.type!r} is not supported: expected cpu or cuda")
    return Memory("rocm" if torch.version.hip else "cuda", device.index or 0)


# ---------------------------------------------------------------------- __cuda_array_interface__


def _interface(buffer: Any) -> Mapping[str, Any] | None:
    try:
        found = buffer.__cuda_array_interface__
    except AttributeError:
        return None
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise InvalidArgument(f"{type(buffer).__name__} does not say where its memory is: {error}") from error
    if not isinstance(found, Mapping):
        raise InvalidArgument(f"{type(buffer).__name__}.__cuda_array_interface__ is no mapping")
    return found


def _of_interface(buffer: Any, interface: Mapping[str, Any]) -> Buffer:
    try:
        version = int(interface["version"])
        address, read_only = int(interface["data"][0]), bool(interface["data"][1])
        shape = tuple(int(size) for size in interface["shape"])
        itemsize = np.dtype(interface["typestr"]).itemsize
        given = interface.get("strides")
        strides = None if given is None else tuple(int(step) for step in given)
        stream = interface.get("stream")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidArgument(f"{type(buffer).__name__}.__cuda_array_interface__ is malformed: {error!r}") from error
    if version < INTERFACE_VERSION_MIN:
        raise InvalidArgument(f"the array's interface has version {version}: expected {INTERFACE_VERSION_MIN} or later")
    if interface.get("mask") is not None:
        raise InvalidArgument("the array has a mask: register its data")
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int) or stream <= 0):
        raise InvalidArgument(f"the array's stream is {stream!r}: expected None or a handle")
    _check_contiguous(shape, strides, itemsize)
    nbytes = math.prod(shape) * itemsize
    _check_size(address, nbytes)
    return Buffer(_interface_memory(buffer, address), address, nbytes, not read_only, buffer, stream)


def _interface_memory(buffer: Any, address: int) -> Memory:
    """The interface itself does not say which device it is."""
    device = dlpack.device_type_of(buffer)
    if device is not None and device[0] in dlpack.KIND_OF_TYPE:
        return Memory(dlpack.KIND_OF_TYPE[device[0]], device[1])
    for name in ("id", "index"):
        number = getattr(getattr(buffer, "device", None), name, None)
        if isinstance(number, int):
            return Memory("cuda", number)
    return Memory("cuda", device_of(address))


# ---------------------------------------------------------------------- DLPack


def _of_dlpack(buffer: Any, device: tuple[int, int]) -> Buffer:
    kind = device[0]
    if kind not in dlpack.HOST_TYPES and kind not in dlpack.KIND_OF_TYPE:
        raise InvalidArgument(f"memory on DLPack device type {kind} is not supported: copy it to the host or to CUDA")
    tensor = dlpack.exported(buffer, kind)
    _check_contiguous(tensor.shape, tensor.strides, tensor.itemsize)
    memory = HOST if kind in dlpack.HOST_TYPES else Memory(dlpack.KIND_OF_TYPE[kind], device[1])
    nbytes = math.prod(tensor.shape) * tensor.itemsize
    return _checked(Buffer(memory, tensor.address, nbytes, tensor.writable, (buffer, tensor.capsule)))


# ---------------------------------------------------------------------- checks


def _check_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> None:
    if min(shape, default=1) < 0 or (strides is not None and len(strides) != len(shape)):
        raise InvalidArgument(f"the array has shape {shape} and strides {strides}")
    expected = itemsize
    for size, step in zip(reversed(shape), reversed(strides or ()), strict=False):
        if size > 1 and step != expected:
            raise InvalidArgument("the array is not C-contiguous: register its base and use region.view()")
        expected *= size


def _check_size(address: int, nbytes: int) -> None:
    if nbytes == 0:
        raise InvalidArgument("the buffer is empty")
    if address <= 0:
        raise InvalidArgument("the array has no address: it is not allocated, or is a stand-in for one")


def _checked(found: Buffer) -> Buffer:
    _check_size(found.address, found.nbytes)
    return found


class _HostView:
    """Bytes at an address as numpy takes them; the numpy array holds this, and this the owner."""

    def __init__(self, found: Buffer) -> None:
        self._found = found
        self.__array_interface__ = {
            "shape": (found.nbytes,),
            "typestr": "|u1",
            "data": (found.address, not found.writable),
            "version": 3,
        }
