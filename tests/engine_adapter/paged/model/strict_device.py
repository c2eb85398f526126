"""Arrays of a device that is not there: numpy's storage and bits, behind cupy's fence.

A :class:`DeviceArray` meets its own kind and scalars only. Whatever would mix it with a numpy array, turn it into
one unasked, wait for the device behind the caller's back (``bool``, iteration), or use a keyword that cupy lacks
raises TypeError. What crosses goes through :class:`StrictArrays`, which counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Scalar = int | float | np.generic
Index = int | slice | None


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """Operators come from the mixin, as ufuncs."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, storage: npt.NDArray[Any]) -> None:
        assert type(storage) is np.ndarray
        self._storage = storage

    # ------------------------------------------------------------------ the fence

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a device array does not become a numpy array by itself")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object) -> DeviceArray:
        if method != "__call__" or kwargs.keys() - {"out"}:
            raise TypeError(f"{ufunc.__name__}.{method} with {sorted(kwargs)}: not on the device")
        outs: Any = kwargs.get("out", ())
        return _wrapped(ufunc(*map(_operand, inputs), **({"out": tuple(map(_stored, outs))} if outs else {})))

    def __array_function__(self, function: Any, types: object, args: object, kwargs: object) -> NoReturn:
        raise TypeError(f"numpy.{function.__name__} of a device array: use the array's own module")

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth of a device array waits for the device")

    __float__ = __int__ = __index__ = __bool__  # type: ignore[assignment]

    def __iter__(self) -> NoReturn:
        raise TypeError("iterating over a device array is a kernel an element")

    # ------------------------------------------------------------------ what both modules' arrays have

    @property
    def shape(self) -> tuple[int, ...]:
        return self._storage.shape

    @property
    def ndim(self) -> int:
        return self._storage.ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._storage.dtype

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def flags(self) -> Any:
        return self._storage.flags

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: Any) -> DeviceArray:
        return _wrapped(self._storage[_indices(index)])

    def __setitem__(self, index: Any, value: object) -> None:
        self._storage[_indices(index)] = _operand(value)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self._storage.reshape(*shape))

    def transpose(self, *axes: int) -> DeviceArray:
        return DeviceArray(self._storage.transpose(*axes))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._storage.view(dtype))

    def astype(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self._storage.astype(dtype))

    def clip(self, low: float, high: float) -> DeviceArray:
        return DeviceArray(self._storage.clip(low, high))


def _stored(value: object) -> npt.NDArray[Any]:
    if not isinstance(value, DeviceArray):
        raise TypeError(f"{type(value).__name__} where a device array is expected")
    return value._storage


def _operand(value: object) -> Any:
    return value if isinstance(value, Scalar) else _stored(value)


def _wrapped(result: Any) -> DeviceArray:
    return DeviceArray(np.asarray(result))


def _indices(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_indices(part) for part in index)
    if index is None or index is Ellipsis or isinstance(index, int | slice):
        return index
    return _stored(index)


class StrictModule:
    """The functions that the model may call, with the parameters that numpy and cupy share."""

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        return DeviceArray(np.empty(shape, dtype))

    def zeros(self, shape: Any, dtype: Any) -> DeviceArray:
        return DeviceArray(np.zeros(shape, dtype))

    def ones(self, shape: Any, dtype: Any) -> DeviceArray:
        return DeviceArray(np.ones(shape, dtype))

    def full(self, shape: Any, fill_value: Scalar, dtype: Any) -> DeviceArray:
        return DeviceArray(np.full(shape, fill_value, dtype))

    def ascontiguousarray(self, a: DeviceArray) -> DeviceArray:
        return DeviceArray(np.ascontiguousarray(_stored(a)))

    def take(self, a: DeviceArray, indices: DeviceArray, axis: int) -> DeviceArray:
        return DeviceArray(np.take(_stored(a), _stored(indices), axis=axis))

    def copyto(self, dst: DeviceArray, src: float, *, where: DeviceArray) -> None:
        assert type(src) is float
        np.copyto(_stored(dst), src, where=_stored(where))

    def mean(self, a: DeviceArray, axis: int, keepdims: bool) -> DeviceArray:
        return _wrapped(np.mean(_stored(a), axis=axis, keepdims=keepdims))

    def max(self, a: DeviceArray, axis: int, keepdims: bool) -> DeviceArray:
        return _wrapped(np.max(_stored(a), axis=axis, keepdims=keepdims))

    def matmul(self, a: DeviceArray, b: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.matmul, (_stored(a), _stored(b)), out)

    def maximum(self, a: DeviceArray, b: DeviceArray | Scalar, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.maximum, (_stored(a), _operand(b)), out)

    def subtract(self, a: DeviceArray, b: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.subtract, (_stored(a), _operand(b)), out)

    def divide(self, a: DeviceArray, b: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.divide, (_stored(a), _operand(b)), out)

    def square(self, a: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.square, (_stored(a),), out)

    def negative(self, a: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.negative, (_stored(a),), out)

    def sqrt(self, a: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.sqrt, (_stored(a),), out)

    def exp(self, a: DeviceArray, out: DeviceArray | None = None) -> DeviceArray:
        return self._call(np.exp, (_stored(a),), out)

    @staticmethod
    def _call(ufunc: np.ufunc, inputs: Sequence[Any], out: DeviceArray | None) -> DeviceArray:
        if out is None:
            return _wrapped(ufunc(*inputs))
        ufunc(*inputs, out=_stored(out))
        return out


class StrictArrays:
    """An ``Arrays`` over :class:`DeviceArray`. ``moved``: bytes that crossed, [to the device, to the host]."""

    on_host = False
    numerics = ""  #: none of its own: its bits are numpy's

    def __init__(self) -> None:
        self.xp: Any = StrictModule()
        self.moved = [0, 0]
        self.waits = 0

    def to_device(self, array: Any) -> Any:
        assert type(array) is np.ndarray, type(array)
        self.moved[0] += array.nbytes
        return DeviceArray(array.copy(order="K"))

    def to_host(self, array: Any) -> Any:
        self.moved[1] += array.nbytes
        self.waits += 1
        return _stored(array).copy()

    def take_into(self, source: DeviceArray, indices: DeviceArray, out: DeviceArray) -> None:
        np.take(_stored(source), _stored(indices), axis=0, out=_stored(out), mode="clip")

    def synchronize(self) -> None:
        self.waits += 1


def on_storage(array: npt.NDArray[Any]) -> DeviceArray:
    """A device array over this very memory, for tests that look at what the device holds."""
    return DeviceArray(array)


def storage_of(array: Any) -> npt.NDArray[Any]:
    """What the device holds, to look at or to change."""
    return _stored(array)
