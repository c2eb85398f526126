"""What device memory an array is: by each interface, and what is refused and why."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.gpu import memory as memory_module
from kvstrata.transfer.gpu.memory import device_memory, host_memory
from kvstrata.transfer.memory import Memory
from kvstrata.transfer.regions import flat_bytes
from tests.transfer.gpu.dlpack_arrays import DLPackArray
from tests.transfer.gpu.fake_device import FakeDevice, fake_device


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(1 << 20) as one:
        yield one


class Interface:
    """An array that says of itself what a test has it say."""

    def __init__(self, **said: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 8),
            "typestr": "<f2",
            "data": (0x7F0000000000, False),
            "strides": None,
            "version": 3,
            "stream": None,
        } | said
        self.device = SimpleNamespace(id=1)


def test_a_device_array(device: FakeDevice) -> None:
    array = device.empty((2, 3, 5), np.float32)
    found = device_memory(array)
    assert found is not None and found.owner is array
    assert (found.memory, found.address, found.nbytes) == (Memory("cuda", 0), array.address, 120)
    assert found.writable and found.stream is None
    array.writable, array.stream = False, device.stream()
    found = device_memory(array)
    assert found is not None and not found.writable and found.stream == array.stream.handle


@pytest.mark.parametrize("host", [np.zeros(4), bytearray(4), b"abcd", memoryview(b"abcd"), "text", object(), None])
def test_what_is_no_device_array(host: object) -> None:
    assert device_memory(host) is None and host_memory(host) is None


def test_a_rocm_array_is_known_by_its_dlpack_type() -> None:
    with fake_device(1 << 16, Memory("rocm", 3)) as device:
        found = device_memory(device.empty(16))
        assert found is not None and found.memory == Memory("rocm", 3)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_and_element_sizes(version: int) -> None:
    for typestr, size in (("|u1", 1), ("<f2", 2), ("<V2", 2), ("<c16", 16)):
        found = device_memory(Interface(version=version, typestr=typestr))
        assert found is not None and found.nbytes == 32 * size and found.memory == Memory("cuda", 1)


def test_an_interface_without_the_optional_entries() -> None:
    array = Interface(version=2)
    del array.__cuda_array_interface__["strides"], array.__cuda_array_interface__["stream"]
    found = device_memory(array)
    assert found is not None and found.stream is None


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"strides": (2, 8)}, "register its base and use region.view"),
        ({"strides": (16,)}, "strides"),
        ({"shape": (-1, 8)}, "shape"),
        ({"shape": (0, 8)}, "empty"),
        ({"data": (0, False)}, "no address"),
        ({"mask": Interface()}, "mask"),
        ({"version": 1}, "version 1"),
        ({"stream": 0}, "stream is 0"),
        ({"stream": True}, "stream is True"),
        ({"typestr": "nonsense"}, "malformed"),
        ({"data": None}, "malformed"),
        ({"shape": None}, "malformed"),
    ],
)
def test_what_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        device_memory(Interface(**said))


def test_an_interface_that_fails_is_the_callers_mistake() -> None:
    class Failing:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("requires a gradient")

    with pytest.raises(InvalidArgument, match="requires a gradient"):
        device_memory(Failing())


@given(
    shape=st.lists(st.integers(1, 4), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    typestr=st.sampled_from(["|u1", "<f2", "<f8"]),
)
def test_contiguity_is_numpys(shape: tuple[int, ...], order: Any, typestr: str) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    array = np.zeros(shape, typestr).transpose(axes)
    described = Interface(shape=array.shape, strides=array.strides, typestr=typestr)
    if array.flags.c_contiguous:
        found = device_memory(described)
        assert found is not None and found.nbytes == array.nbytes
    else:
        with pytest.raises(InvalidArgument, match="not C-contiguous"):
            device_memory(described)


def test_the_driver_is_asked_when_the_array_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    array = Interface()
    del array.device
    monkeypatch.setattr(memory_module, "device_of", lambda address: 5 if address == 0x7F0000000000 else -1)
    found = device_memory(array)
    assert found is not None and found.memory == Memory("cuda", 5)


def test_without_cupy_the_driver_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    array = Interface()
    del array.device
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match=r"pip install 'kvstrata\[gpu\]'"):
        device_memory(array)


# ---------------------------------------------------------------------- DLPack


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize(("kind", "memory"), [(2, "cuda"), (13, "cuda"), (10, "rocm")])
def test_dlpack_alone_is_enough(versioned: bool, kind: int, memory: str) -> None:
    array = DLPackArray(np.arange(24, dtype=np.int16).reshape(2, 12), kind, 4, versioned=versioned, byte_offset=8)
    found = device_memory(array)
    assert found is not None and found.memory == Memory(memory, 4)
    assert (found.address, found.nbytes) == (array.data.ctypes.data + 8, 48)
    assert array.streams == [-1], "nobody is made to wait"


def test_a_capsule_keeps_its_memory_and_is_freed_once() -> None:
    array = DLPackArray(np.zeros(8, np.uint8), 2, 0)
    found = device_memory(array)
    assert array.freed == 0 and found is not None
    del found
    gc.collect()
    assert array.freed == 1


def test_read_only_memory_is_known() -> None:
    for versioned, read_only, writable in ((True, True, False), (True, False, True), (False, False, True)):
        found = device_memory(DLPackArray(np.zeros(4), 2, 0, versioned=versioned, read_only=read_only))
        assert found is not None and found.writable == writable


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (DLPackArray(np.zeros((4, 4)).T, 2, 0), "not C-contiguous"),
        (DLPackArray(np.zeros(4), 8, 0), "device type 8"),
        (DLPackArray(np.zeros(0), 2, 0), "empty"),
        (DLPackArray(np.zeros(8, np.uint8), 2, 0, bits=4), "4 bits"),
        (DLPackArray(np.zeros(8, np.uint8), 2, 0, major=2), "DLPack 2.0"),
        (DLPackArray(np.zeros(8, np.uint8), 2, 0, error=BufferError("no export")), "no export"),
    ],
)
def test_what_is_refused_of_dlpack(array: DLPackArray, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        device_memory(array)


@pytest.mark.parametrize("kind", [1, 3, 11])
@pytest.mark.parametrize("read_only", [True, False])
def test_dlpack_on_the_host_is_host_memory(kind: int, read_only: bool) -> None:
    array = DLPackArray(np.arange(6, dtype=np.int32), kind, 0, read_only=read_only)
    assert device_memory(array) is None
    gc.collect()
    assert array.freed == 1
    flat = flat_bytes(array)
    assert flat.tobytes() == array.data.tobytes() and flat.flags.writeable == (not read_only)
    del flat
    gc.collect()
    assert array.freed == 2


# ---------------------------------------------------------------------- torch


def test_torch_tensors_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.bool):
        tensor = torch.zeros((3, 4), dtype=dtype)
        assert device_memory(tensor) is None
        flat = flat_bytes(tensor)
        flat[:] = 1
        assert flat.nbytes == tensor.numel() * tensor.element_size()
        assert bool((tensor.view(torch.uint8) == 1).all())
    grown = torch.ones(4, requires_grad=True)
    assert flat_bytes(grown).nbytes == 16
    storage = torch.arange(4, dtype=torch.int64).untyped_storage()
    assert flat_bytes(storage).view(np.int64).tolist() == [0, 1, 2, 3]
    for bad, text in (
        (torch.zeros((4, 4)).T, "untyped_storage"),
        (torch.zeros(0), "empty"),
        (torch.zeros((2, 2)).to_sparse(), "to_dense"),
        (torch.zeros(4, device="meta"), "meta"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            flat_bytes(bad)


def test_torch_that_is_still_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ModuleType("torch", None)
    half.__spec__ = SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch", half)
    assert device_memory(bytearray(1)) is None and device_memory(object()) is None


def test_a_flat_view_keeps_its_tensor() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4)
    alive = weakref.ref(tensor)
    flat = flat_bytes(tensor)
    del tensor
    gc.collect()
    assert alive() is not None and flat.view(np.int64).tolist() == [0, 1, 2, 3]
    del flat
    gc.collect()
    assert alive() is None


def test_device_arrays_have_no_flat_bytes(device: FakeDevice) -> None:
    with pytest.raises(InvalidArgument, match="on cuda:0"):
        flat_bytes(device.empty(8))
