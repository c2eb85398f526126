"""KV tensors of a GPU as vLLM might have allocated them, over a fake device: shapes, strides and storages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.transfer.gpu.fake_device import FakeArray, FakeDevice


class DeviceStorage:
    """A torch storage: an allocation, and what tells which device it is on."""

    def __init__(self, array: FakeArray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.address

    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.array.__cuda_array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class DeviceTensor:
    """A torch tensor of float16 on a device. ``shadow``: what the device holds, by the tensor's own dimensions."""

    def __init__(self, storage: DeviceStorage, shadow: npt.NDArray[np.float16]) -> None:
        self._storage, self.shadow = storage, shadow

    @property
    def shape(self) -> Sequence[int]:
        return self.shadow.shape

    def data_ptr(self) -> int:
        offset = self.shadow.ctypes.data - self._storage.array.shadow.ctypes.data
        return self._storage.data_ptr() + offset

    def stride(self) -> Sequence[int]:
        return [step // self.shadow.itemsize for step in self.shadow.strides]

    def element_size(self) -> int:
        return self.shadow.itemsize

    def untyped_storage(self) -> DeviceStorage:
        return self._storage


def allocate(device: FakeDevice, shape: Sequence[int], order: Sequence[int]) -> DeviceTensor:
    """A tensor of logical ``shape`` in an allocation of its own, whose dimensions lie in memory in ``order``."""
    array = device.empty(tuple(shape[axis] for axis in order), np.float16)
    return DeviceTensor(DeviceStorage(array), array.shadow.transpose(np.argsort(order)))


def views(tensor: DeviceTensor, axis: int) -> list[DeviceTensor]:
    """One tensor for each layer of one allocation, whose layers are dimension ``axis``."""
    layers = np.moveaxis(tensor.shadow, axis, 0)
    return [DeviceTensor(tensor.untyped_storage(), layer) for layer in layers]
