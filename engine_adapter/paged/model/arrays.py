"""Where arrays live and what computes with them: numpy on the host, or cupy on a GPU.

::

    host (numpy)                                       device (``xp``)
    ------------                                       ---------------
    plans, row layouts, block tables   to_device  -->  index arrays and masks, once a step
    what weights are read into         to_device  -->  weights, RoPE tables
    logits, then tokens               <--  to_host     KV memory, activations

The model computes with ``xp`` and the arrays' operators only, and with no keyword that one of the modules lacks:
arrays of two kinds never meet. On the host both moves give back the array itself.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final, Literal, Protocol, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from kvstrata.proto.errors import InvalidArgument

Device = Literal["cpu", "cuda"]
DEVICES: Final[tuple[str, ...]] = get_args(Device)

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_Shape = int | tuple[int, ...]
_Scalar = TypeVar("_Scalar", bound=np.generic)
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


class ArrayModule(Protocol):
    """All that the model takes from numpy or cupy, as both have it."""

    def empty(self, shape: _Shape, dtype: type[_Scalar]) -> npt.NDArray[_Scalar]: ...
    def zeros(self, shape: _Shape, dtype: type[_Scalar] | np.dtype[_Scalar]) -> npt.NDArray[_Scalar]: ...
    def ones(self, shape: _Shape, dtype: type[_Scalar]) -> npt.NDArray[_Scalar]: ...
    def full(self, shape: _Shape, fill_value: np.float32, dtype: type[_Scalar]) -> npt.NDArray[_Scalar]: ...
    def ascontiguousarray(self, a: _Array) -> _Array: ...
    def take(self, a: _Array, indices: I64, axis: int) -> _Array: ...
    def copyto(self, dst: F32, src: float, *, where: Bool) -> None: ...
    def matmul(self, a: F32, b: F32, /, out: F32 | None = None) -> F32: ...
    def mean(self, a: F32, *, axis: int, keepdims: bool) -> F32: ...
    def max(self, a: F32, *, axis: int, keepdims: bool) -> F32: ...
    def maximum(self, a: F32, b: F32 | np.float32, /, out: F32 | None = None) -> F32: ...
    def subtract(self, a: F32, b: F32, /, out: F32) -> F32: ...
    def divide(self, a: F32, b: F32, /, out: F32) -> F32: ...
    def square(self, a: F32, /) -> F32: ...
    def negative(self, a: F32, /, out: F32) -> F32: ...
    def sqrt(self, a: F32, /, out: F32) -> F32: ...
    def exp(self, a: F32, /, out: F32 | None = None) -> F32: ...


class Arrays(Protocol):
    """An array module, and how arrays come to it and from it. For one thread."""

    @property
    def xp(self) -> ArrayModule: ...

    @property
    def on_host(self) -> bool:
        """Whether ``xp``'s arrays are numpy's."""
        ...

    @property
    def numerics(self) -> str:
        """What decides bits here beside the host's numpy: part of a model's identity. Empty on the host."""
        ...

    def to_device(self, array: _Array) -> _Array:
        """A numpy array's elements in an array of ``xp``. The numpy array may be changed afterwards."""
        ...

    def to_host(self, array: _Array) -> _Array:
        """An array of ``xp`` as a numpy array, when all that was begun before has been computed."""
        ...

    def take_into(self, source: _Array, indices: I64, out: _Array) -> None:
        """Rows ``indices``, all within ``source``, along the first axis."""
        ...

    def synchronize(self) -> None:
        """Return when all that was begun has been computed."""
        ...


class HostArrays:
    """numpy. Nothing moves."""

    xp: ArrayModule = cast(ArrayModule, np)
    on_host = True
    numerics = ""

    def to_device(self, array: _Array) -> _Array:
        return array

    def to_host(self, array: _Array) -> _Array:
        return array

    def take_into(self, source: _Array, indices: I64, out: _Array) -> None:
        # Any mode but "raise" writes to ``out`` without a copy between.
        np.take(source, indices, axis=0, out=out, mode="clip")

    def synchronize(self) -> None:
        """Nothing is ever under way."""


HOST: Final = HostArrays()


class CudaArrays:
    """cupy, on the GPU of this rank: they are dealt out in turn. Raises :class:`InvalidArgument` where cupy is not
    installed or finds no GPU.

    The choice of a GPU is the calling thread's, and others find the first: a rank beyond 0 keeps to one thread.
    """

    on_host = False

    def __init__(self, rank: int = 0) -> None:
        try:
            self._cupy = cupy = importlib.import_module("cupy")
        except ImportError as error:
            raise InvalidArgument("device cuda needs cupy, which cannot be imported: install kvstrata[gpu]") from error
        runtime = cupy.cuda.runtime
        try:
            count = int(runtime.getDeviceCount())
        except runtime.CUDARuntimeError as error:
            raise InvalidArgument(f"device cuda: no GPU can be used here: {error}") from error
        if not count:
            raise InvalidArgument("device cuda: there is no GPU here")
        cupy.cuda.Device(rank % count).use()
        self.xp: ArrayModule = cast(ArrayModule, cupy)
        name = runtime.getDeviceProperties(rank % count)["name"].decode()
        # Which kernels are chosen, and whether products are rounded to TF32, is up to these.
        choices = ",".join(f"{key}={os.environ.get(key, '')}" for key in ("CUPY_TF32", "CUPY_ACCELERATORS"))
        self.numerics = f"cupy-{cupy.__version__}/cuda-{runtime.runtimeGetVersion()}/{name}/{choices}"

    def to_device(self, array: _Array) -> _Array:
        return cast(_Array, self._cupy.array(array))

    def to_host(self, array: _Array) -> _Array:
        return cast(_Array, self._cupy.asnumpy(array))

    def take_into(self, source: _Array, indices: I64, out: _Array) -> None:
        self._cupy.take(source, indices, axis=0, out=out)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def make_arrays(device: Device, rank: int = 0) -> Arrays:
    """Of ``device``, for one rank of an engine. Raises :class:`InvalidArgument` where there is no such device."""
    return HOST if device == "cpu" else CudaArrays(rank)
