"""Device memory on a real GPU: arrays of cupy and torch, order among streams, addresses beyond 32 bits, errors.

What is held up is held by a kernel that reads a flag in host memory, so nothing here depends on how quick a GPU is.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstrata.proto.errors import InvalidArgument, Unavailable
from kvstrata.transfer.gpu.cuda import CudaRuntime
from kvstrata.transfer.gpu.memory import device_memory
from kvstrata.transfer.memory import Memory
from tests.transfer.gpu.gpus import gpu_or_skip

WAIT_S = 30.0
CUDA = Memory("cuda", 0)


def test_cupy_has_what_the_runtime_takes() -> None:
    """Needs no GPU, only cupy."""
    cupy = pytest.importorskip("cupy")
    for owner, names in (
        (cupy, "RawModule cuda"),
        (cupy.cuda, "Stream get_current_stream alloc alloc_pinned_memory compiler driver runtime"),
        (cupy.cuda.compiler, "CompileException"),
        (cupy.cuda.driver, "ctxGetCurrent ctxSetCurrent"),
        (
            cupy.cuda.runtime,
            "CUDARuntimeError cudaDevAttrCanUseHostPointerForRegisteredMem deviceGetAttribute "
            "eventCreateWithFlags eventDestroy eventDisableTiming eventQuery eventRecord free getDeviceCount "
            "hostRegister hostUnregister is_hip memcpyAsync memcpyHostToDevice pointerGetAttributes "
            "setDevice streamWaitEvent",
        ),
    ):
        assert not [name for name in names.split() if not hasattr(owner, name)], owner
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)


@pytest.fixture
def cupy() -> Any:
    return gpu_or_skip()


@pytest.fixture
def torch(cupy: Any) -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    return found


@pytest.fixture
def runtime(cupy: Any) -> CudaRuntime:
    return CudaRuntime(CUDA)


@contextmanager
def held(cupy: Any, runtime: CudaRuntime, stream: Any) -> Iterator[None]:
    """``stream`` stands still meanwhile."""
    flag = runtime.pinned(4096)
    code = 'extern "C" __global__ void hold(volatile int* flag) { while (*flag == 0) {} }'
    kernel = cupy.RawKernel(code, "hold")
    cupy.cuda.Device(0).synchronize()
    with stream:
        kernel((1,), (1,), (np.uint64(flag.bytes.ctypes.data),))
    try:
        yield
    finally:
        flag.bytes.view(np.int32)[0] = 1
        stream.synchronize()
        flag.close()


def warm(cupy: Any) -> Any:
    """u8[4096] of zeros, and fill() loaded: what allocates or loads while a kernel stands still may wait for it."""
    array = cupy.empty(4096, cupy.uint8)
    array.fill(0)
    cupy.cuda.Device(0).synchronize()
    return array


def round_trip(runtime: CudaRuntime, array: Any, content: np.ndarray) -> np.ndarray:
    """Scatter ``content`` into the array's memory in two pieces, gather it again in one."""
    found = device_memory(array)
    assert found is not None and found.nbytes == content.nbytes and found.memory == CUDA
    pinned = runtime.pinned(content.nbytes)
    pinned.bytes[:] = content
    half = found.nbytes // 2
    pieces = np.array([found.address, found.address + half]), np.array([half, found.nbytes - half])
    assert runtime.scatter(pinned.bytes, *pieces).wait(WAIT_S)
    pinned.bytes[:] = 0
    assert runtime.gather(np.array([found.address]), np.array([found.nbytes]), pinned.bytes).wait(WAIT_S)
    gathered = pinned.bytes.copy()
    pinned.close()
    return gathered


@pytest.mark.gpu
def test_cupy_arrays(cupy: Any, runtime: CudaRuntime) -> None:
    content = np.random.default_rng(0).integers(0, 256, 3 * 5 * 1024 * 2, np.uint8)
    array = cupy.zeros((3, 5, 1024), cupy.float16)
    assert np.array_equal(round_trip(runtime, array, content), content)
    assert np.array_equal(array.view(cupy.uint8).get().ravel(), content)
    with pytest.raises(InvalidArgument, match="not C-contiguous"):
        device_memory(array.T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float32", "uint8"])
def test_torch_tensors(torch: Any, runtime: CudaRuntime, dtype: str) -> None:
    tensor = torch.zeros((3, 5, 1024), dtype=torch.uint8, device="cuda").view(getattr(torch, dtype))
    content = np.random.default_rng(0).integers(0, 256, 3 * 5 * 1024, np.uint8)
    assert np.array_equal(round_trip(runtime, tensor, content), content)
    assert np.array_equal(tensor.view(torch.uint8).cpu().numpy().ravel(), content)
    assert np.array_equal(round_trip(runtime, tensor.untyped_storage(), content[::-1].copy()), content[::-1])
    with pytest.raises(InvalidArgument, match="untyped_storage"):
        device_memory(tensor.transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_gather_comes_after_the_callers_stream_and_blocks_nothing(
    cupy: Any, runtime: CudaRuntime, request: pytest.FixtureRequest, library: str
) -> None:
    """While it waits for the stream it was asked on: scatters go on, and so do the caller's other streams."""
    stream, free = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    array, other, more = (warm(cupy) for _ in range(3))
    pinned = runtime.pinned(8192)
    if library == "torch":
        torch = request.getfixturevalue("torch")
        torch.cuda.init()
    piece = np.array([array.data.ptr]), np.array([4096])
    with held(cupy, runtime, stream):
        with stream:
            array.fill(7)
        if library == "cupy":
            with stream:
                event = runtime.gather(*piece, pinned.bytes[:4096])
        else:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                event = runtime.gather(*piece, pinned.bytes[:4096])
        assert not event.wait(0.05)
        scatter = runtime.scatter(pinned.bytes[4096:], np.array([other.data.ptr]), np.array([4096]))
        with free:
            more.fill(1)
        free.synchronize()
        assert scatter.wait(WAIT_S) and not event.done()
    assert event.wait(WAIT_S) and set(pinned.bytes[:4096].tolist()) == {7}
    pinned.close()


@pytest.mark.gpu
def test_the_callers_stream_goes_on_while_a_gather_waits(cupy: Any, runtime: CudaRuntime) -> None:
    blocked, mine = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    array, more = warm(cupy), warm(cupy)
    pinned = runtime.pinned(4096)
    with held(cupy, runtime, blocked):
        with blocked:
            mark = runtime.mark()
        with mine:
            event = runtime.gather(np.array([array.data.ptr]), np.array([4096]), pinned.bytes, mark)
            more.fill(1)
        mine.synchronize()
        assert not mark.done() and not event.done()
    assert event.wait(WAIT_S)
    pinned.close()


@pytest.mark.gpu
def test_a_followed_stream_comes_first(cupy: Any, runtime: CudaRuntime) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    array = warm(cupy)
    pinned = runtime.pinned(4096)
    with held(cupy, runtime, stream):
        with stream:
            array.fill(3)
        runtime.follow(stream.ptr)
        event = runtime.gather(np.array([array.data.ptr]), np.array([4096]), pinned.bytes)
        assert not event.wait(0.05)
    assert event.wait(WAIT_S) and set(pinned.bytes.tolist()) == {3}
    pinned.close()


@pytest.mark.gpu
def test_addresses_beyond_32_bits(cupy: Any, runtime: CudaRuntime) -> None:
    nbytes = (4 << 30) + (64 << 20)
    try:
        array = cupy.zeros(nbytes, cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        pytest.skip(str(error))
    draw = np.random.default_rng(1)
    start = np.sort(draw.choice(nbytes // 32768, 512, replace=False)) * 32768 + draw.integers(0, 16)
    length = draw.integers(1, 32000, 512)
    pinned = runtime.pinned(int(length.sum()))
    pinned.bytes[:] = draw.integers(0, 256, pinned.bytes.size, np.uint8)
    expected = pinned.bytes.copy()
    assert runtime.scatter(pinned.bytes, start + array.data.ptr, length).wait(WAIT_S)
    pinned.bytes[:] = 0
    assert runtime.gather(start + array.data.ptr, length, pinned.bytes).wait(WAIT_S)
    assert np.array_equal(pinned.bytes, expected)
    for at, size, end in zip(start[-3:], length[-3:], np.cumsum(length)[-3:], strict=True):
        assert np.array_equal(array[at : at + size].get(), expected[end - size : end])
    pinned.close()


@pytest.mark.gpu
def test_many_launches_from_many_threads(cupy: Any, runtime: CudaRuntime) -> None:
    arrays = [cupy.full(50_001, n, cupy.uint8) for n in range(4)]
    cupy.cuda.Device(0).synchronize()
    wrong: list[int] = []

    def work(n: int) -> None:
        pinned = runtime.pinned(50_001)
        for _ in range(50):
            pinned.bytes[:] = 0
            done = runtime.gather(np.array([arrays[n].data.ptr]), np.array([50_001]), pinned.bytes).wait(WAIT_S)
            if not done or not (pinned.bytes == n).all():
                wrong.append(n)
        pinned.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
def test_the_allocation_of_an_address(cupy: Any, runtime: CudaRuntime) -> None:
    memory = cupy.cuda.Memory(3 << 20)
    base, nbytes = runtime.allocation(memory.ptr + 12345)
    assert base == memory.ptr and nbytes >= 3 << 20
    with pytest.raises(InvalidArgument, match="no allocation"):
        runtime.allocation(np.zeros(1).ctypes.data)


@pytest.mark.gpu
def test_a_thread_gets_the_context_only_when_asked(cupy: Any, runtime: CudaRuntime) -> None:
    found: list[int] = []

    def work() -> None:
        runtime.mark()
        found.append(cupy.cuda.driver.ctxGetCurrent())
        runtime.retain()
        found.append(cupy.cuda.driver.ctxGetCurrent())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] == 0 and found[1] != 0


@pytest.mark.gpu
def test_a_device_that_is_not_there(cupy: Any) -> None:
    with pytest.raises(Unavailable, match="are visible"):
        CudaRuntime(Memory("cuda", cupy.cuda.runtime.getDeviceCount()))


@pytest.mark.gpu
def test_a_fault_is_an_error_and_no_hang(cupy: Any, request: pytest.FixtureRequest) -> None:
    """In a process of its own: the context is lost with it."""
    code = (
        "import numpy as np\n"
        "from kvstrata.proto.errors import Unavailable\n"
        "from kvstrata.transfer.gpu.cuda import CudaRuntime\n"
        "from kvstrata.transfer.memory import Memory\n"
        "runtime = CudaRuntime(Memory('cuda', 0))\n"
        "pinned = runtime.pinned(4096)\n"
        "event = runtime.gather(np.array([1 << 46]), np.array([4096]), pinned.bytes)\n"
        "try:\n"
        "    event.wait(20)\n"
        "except Unavailable as error:\n"
        "    print('said:', error)\n"
        "pinned.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=request.config.rootpath
    )
    assert done.returncode == 0 and "said: cuda:0: failed" in done.stdout, done.stderr
