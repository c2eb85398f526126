"""The stand-in refuses what a GPU's arrays refuse: or a model that runs on it would prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.engine_adapter.paged.model.strict_device import DeviceArray, StrictArrays, storage_of

ARRAYS = StrictArrays()
HOST = np.arange(6, dtype=np.float32).reshape(2, 3)
INDICES = np.array([1, 0])


def device() -> DeviceArray:
    array: DeviceArray = ARRAYS.to_device(HOST)
    return array


def add_in_place(a: object, b: object) -> None:
    a += b  # type: ignore[operator]


def assign(a: object, index: object, value: object) -> None:
    a[index] = value  # type: ignore[index]


@pytest.mark.parametrize(
    "mix",
    [
        lambda: device() + HOST,
        lambda: HOST + device(),
        lambda: add_in_place(device(), HOST),
        lambda: add_in_place(HOST.copy(), device()),
        lambda: assign(device(), slice(None), HOST),
        lambda: assign(HOST.copy(), slice(None), device()),
        lambda: assign(device(), INDICES, 0),
        lambda: device()[INDICES],
        lambda: HOST[ARRAYS.to_device(INDICES)],
        lambda: np.asarray(device()),
        lambda: np.array([device()]),
        lambda: np.take(device(), [0]),
        lambda: np.concatenate([device(), device()]),
        lambda: np.take(HOST, [0], axis=0, out=device()),
        lambda: np.exp(HOST, out=device()),
        lambda: np.exp(device(), out=HOST.copy()),
        lambda: np.exp(device(), where=True),
        lambda: np.negative(device(), order="C"),
        lambda: np.add.reduce(device()),
        lambda: ARRAYS.xp.matmul(device(), HOST.T),
        lambda: ARRAYS.xp.exp(HOST),
        lambda: ARRAYS.xp.take(device(), INDICES, axis=0),
        lambda: ARRAYS.xp.max(device(), axis=0, keepdims=True, initial=0),
        lambda: ARRAYS.to_host(HOST),
        lambda: bool(device()[0, 0]),
        lambda: float(device()[0, 0]),
        lambda: list(device()),
    ],
)
def test_mixing_raises(mix: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        mix()


def test_among_themselves_they_are_arrays() -> None:
    array = device()
    array *= np.float32(2)
    array[0] = array[1] - 1
    assert np.array_equal(ARRAYS.to_host(array), [[5, 7, 9], [6, 8, 10]])
    picked = array[ARRAYS.to_device(INDICES)]
    assert np.array_equal(storage_of(picked), [[6, 8, 10], [5, 7, 9]])
    assert np.array_equal(storage_of(2 / array.reshape(-1)[3:]), np.float32(2) / np.array([6, 8, 10], np.float32))
    assert (array.shape, array.dtype, len(array), array.flags.c_contiguous) == ((2, 3), np.float32, 2, True)


def test_what_crosses_is_a_copy() -> None:
    source = HOST.copy()
    array = ARRAYS.to_device(source)
    source[:] = 0
    back = ARRAYS.to_host(array)
    assert np.array_equal(back, HOST)
    back[:] = 0
    assert np.array_equal(ARRAYS.to_host(array), HOST)
