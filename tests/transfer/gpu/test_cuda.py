"""The CUDA runtime on a stand-in for cupy: order by events alone, no wait, tables that stay while they are read."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.proto.errors import Busy, InvalidArgument, Unavailable
from kvstrata.transfer.gpu import cuda_memory
from kvstrata.transfer.gpu.cuda import CudaRuntime
from kvstrata.transfer.gpu.host import Reached
from kvstrata.transfer.memory import Memory
from tests.transfer.gpu.cpu_kernels import CpuKernels
from tests.transfer.gpu.fake_cupy import ILLEGAL_ADDRESS, CompileException, FakeCupy

CUDA = Memory("cuda", 1)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, cpu: CpuKernels) -> FakeCupy:
    fake = FakeCupy(cpu)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    return fake


@pytest.fixture
def runtime(cupy: FakeCupy) -> CudaRuntime:
    return CudaRuntime(CUDA)


def one(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.array([array.ctypes.data]), np.array([array.nbytes])


def gather(runtime: CudaRuntime, array: np.ndarray, pinned: Any, after: Any = None) -> Any:
    return runtime.gather(*one(array), pinned.bytes[: array.nbytes], after)


def test_nothing_moves_in_the_call(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.arange(100, dtype=np.uint8), runtime.pinned(200)
    event = gather(runtime, array, pinned)
    assert not pinned.bytes.any() and cupy.device.launches == [("gather", 1)]
    assert event.wait(1) and pinned.bytes[:100].tobytes() == array.tobytes()
    address, length = one(array)
    event = runtime.scatter(np.ones(0, np.uint8), address[:0], length[:0])
    assert event.wait(1) and len(cupy.device.launches) == 1


def test_it_comes_after_the_callers_streams_and_they_never_wait(
    runtime: CudaRuntime, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(8)
    ends = {"cupy": threading.Event(), "torch": threading.Event()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.device.queue(stream.ptr, ends["cupy"].is_set)
    cupy.device.queue(77, ends["torch"].is_set)
    torch = SimpleNamespace(is_initialized=lambda: True, current_stream=lambda n: SimpleNamespace(cuda_stream=77 * n))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch))
    with stream:
        event = gather(runtime, array, pinned)
    before = {key: list(cupy.device.queues[key]) for key in (stream.ptr, 77)}
    assert [len(queue) for queue in before.values()] == [2, 2], "no more than a record on either"
    for end in ends.values():
        assert not event.wait(0.001)
        end.set()
    array[:] = 9
    assert event.wait(1) and pinned.bytes.tolist() == [9] * 8


def test_a_gather_that_waits_holds_up_no_scatter(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(16)
    stream, end = cupy.cuda.Stream(non_blocking=True), threading.Event()
    cupy.device.queue(stream.ptr, end.is_set)
    with stream:
        mark = runtime.mark()
    held = gather(runtime, array, pinned, mark)
    assert runtime.scatter(pinned.bytes[8:], *one(array)).wait(1) and not held.done() and not mark.done()
    end.set()
    assert held.wait(1) and mark.done()


def test_a_followed_stream_comes_first(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(16)
    end = threading.Event()
    cupy.device.queue(1, end.is_set)
    runtime.follow(1)
    events = [gather(runtime, array, pinned), runtime.scatter(pinned.bytes[8:], *one(array))]
    assert not any(event.done() for event in events)
    end.set()
    assert all(event.wait(1) for event in events)


def test_marks_are_of_the_same_runtime(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    pinned = runtime.pinned(8)
    for mark in (Reached(), CudaRuntime(Memory("cuda", 0)).mark()):
        with pytest.raises(InvalidArgument, match="cuda:1's runtime"):
            gather(runtime, np.zeros(8, np.uint8), pinned, mark)


def test_tables_stay_while_they_are_read(runtime: CudaRuntime, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "SLOTS_MAX", 3)
    arrays, pinned = [np.full(8, n, np.uint8) for n in range(4)], runtime.pinned(32)
    stream, end = cupy.cuda.Stream(non_blocking=True), threading.Event()
    cupy.device.queue(stream.ptr, end.is_set)
    with stream:
        marks = [runtime.mark()]
    marks += [runtime.mark(), runtime.mark()]
    assert [mark.done() for mark in marks] == [False, True, True], "the others wait for the first all the same"
    parts = zip(arrays[:3], pinned.bytes.reshape(4, 8), marks, strict=False)
    events = [runtime.gather(*one(array), part, mark) for array, part, mark in parts]
    with pytest.raises(Busy, match="3 copies"):
        gather(runtime, arrays[3], pinned)
    end.set()
    assert all(event.wait(1) for event in events)
    assert pinned.bytes.reshape(4, 8)[:, 0].tolist() == [0, 1, 2, 0]
    many = np.zeros(40_000, np.uint8)
    address = many.ctypes.data + np.arange(20_000) * 2
    wide = runtime.pinned(20_000)
    assert runtime.gather(address, np.ones(20_000, np.int64), wide.bytes).wait(5), "a larger slot for a smaller one"


def test_a_failed_device_says_so(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(8)
    event = gather(runtime, array, pinned)
    cupy.device.status = ILLEGAL_ADDRESS
    with pytest.raises(Unavailable, match=r"cuda:1: failed: CUDARuntimeError: cudaError 700"):
        event.done()
    with pytest.raises(Unavailable):
        event.wait(1)
    with pytest.raises(Unavailable):
        gather(runtime, array, pinned)
    pinned.close()
    pinned.close()
    assert cupy.device.registered


def test_a_launch_that_fails_leaves_its_table(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.ones(8, np.uint8), runtime.pinned(8)
    cupy.device.launch_error = MemoryError("none left")
    for _ in range(2 * cuda_memory.SLOTS_MAX):
        with pytest.raises(Unavailable, match="none left"):
            gather(runtime, array, pinned)
    cupy.device.launch_error = None
    assert gather(runtime, array, pinned).wait(1) and pinned.bytes.all()


def test_a_table_that_did_not_reach_the_device_is_not_used_again(
    runtime: CudaRuntime, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, pinned = np.ones(8, np.uint8), runtime.pinned(8)
    monkeypatch.setattr(cuda_memory, "SLOTS_MAX", 2)

    def failing(*_: object) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "memcpyAsync", failing)
        with pytest.raises(Unavailable, match="no copy"):
            gather(runtime, array, pinned)
    assert gather(runtime, array, pinned).wait(1)
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "memcpyAsync", failing)
        with pytest.raises(Unavailable, match="no copy"):
            gather(runtime, array, pinned)
    with pytest.raises(Busy):
        gather(runtime, array, pinned)


def test_events_are_given_back(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(8)
    before = len(cupy.device.events) - cupy.device.destroyed
    for _ in range(5):
        assert gather(runtime, array, pinned).wait(1)
    gc.collect()
    left = len(cupy.device.events) - cupy.device.destroyed - before
    assert left <= 1, "no more than the last one, which its table holds"
    mark = runtime.mark()
    cupy.device.status = ILLEGAL_ADDRESS
    del mark
    gc.collect()


def test_a_thread_keeps_its_context(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    cupy.device.contexts.clear()
    array, pinned = np.zeros(8, np.uint8), runtime.pinned(8)
    found: list[int] = []

    def bare() -> None:
        gather(runtime, array, pinned).wait(1)
        found.append(cupy.device.context())

    thread = threading.Thread(target=bare)
    thread.start()
    thread.join()
    assert found == [0] and cupy.device.contexts == {1}, "no context on device 0"
    cupy.cuda.runtime.setDevice(0)
    runtime.mark()
    assert cupy.device.context() == 1
    runtime.retain()
    assert cupy.device.context() == 2


def test_pinned_memory_is_registered_while_it_is_used(runtime: CudaRuntime, cupy: FakeCupy) -> None:
    pinned = runtime.pinned(4096)
    assert list(cupy.device.registered.values()) == [4096] and pinned.memfd >= 0
    pinned.close()
    pinned.close()
    assert not cupy.device.registered and pinned.memfd == -1
    with pytest.raises(InvalidArgument, match="not pinned"):
        gather(runtime, np.zeros(8, np.uint8), pinned)
    forgotten = weakref.ref(runtime.pinned(4096).bytes)
    gc.collect()
    assert forgotten() is not None, "what is not closed is registered, and so has to stay mapped"


def test_what_is_missing_is_said(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="no device cuda:2: 2 are visible"):
        CudaRuntime(Memory("cuda", 2))
    with pytest.raises(Unavailable, match="built for CUDA: not for rocm"):
        CudaRuntime(Memory("rocm", 0))
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "deviceGetAttribute", lambda *_: 0)
        with pytest.raises(Unavailable, match="another address"):
            CudaRuntime(CUDA).pinned(8)
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "hostRegister", lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
        with pytest.raises(Unavailable, match="8 bytes of pinned memory: RuntimeError: no room"):
            CudaRuntime(CUDA).pinned(8)

    def failing(**_: object) -> None:
        raise CompileException("line 1")

    monkeypatch.setattr(cupy, "RawModule", failing)
    with pytest.raises(Unavailable, match=r"cannot be used .*: CompileException: line 1"):
        CudaRuntime(CUDA)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(Unavailable, match=r"pip install 'kvstrata\[gpu\]'"):
        CudaRuntime(CUDA)
    with pytest.raises(Unavailable, match=r"driver's library|no allocation|cannot find"):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(cupy, "RawModule", lambda **_: SimpleNamespace(get_function=lambda _: lambda *_: None))
        CudaRuntime(CUDA).allocation(4096)
