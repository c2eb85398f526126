"""The stand-in for a device bites: a host touch is a fault, copies are late on demand, order is the streams'."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.gpu import host
from kvstrata.transfer.gpu.memory import device_memory
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.memory import Memory
from tests.transfer.gpu.fake_device import FakeDevice, fake_device

CUDA = Memory("cuda", 0)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(1 << 20) as one:
        yield one


def table(*pieces: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    address, length = np.array(pieces, np.int64).T
    return address, length


def test_a_host_touch_is_a_fault(device: FakeDevice) -> None:
    array = device.array(np.arange(64, dtype=np.uint8))
    read_fd, write_fd = os.pipe()
    try:
        with pytest.raises(OSError, match="Bad address"):
            os.write(write_fd, (ctypes.c_char * 8).from_address(array.address))
    finally:
        os.close(read_fd)
        os.close(write_fd)
    with pytest.raises(TypeError):
        np.asarray(array)


def test_a_host_read_crashes_the_process(request: pytest.FixtureRequest) -> None:
    code = (
        "from tests.transfer.gpu.fake_device import FakeDevice\n"
        "import ctypes\n"
        "ctypes.string_at(FakeDevice(1 << 16).base, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, cwd=request.config.rootpath)
    assert done.returncode == -signal.SIGSEGV


def test_it_is_the_runtime_of_its_memory(device: FakeDevice) -> None:
    assert runtime_of(CUDA) is device.runtime
    with fake_device(1 << 16) as inner:
        assert runtime_of(CUDA) is inner.runtime
    assert runtime_of(CUDA) is device.runtime


def test_copies_are_late_on_demand(device: FakeDevice) -> None:
    array = device.array(np.arange(64, dtype=np.uint8))
    pinned = device.runtime.pinned(64)
    with device.runtime.hold("gather"):
        gather = device.runtime.gather(*table((array.address, 64)), pinned.bytes)
        device.runtime.wait_held("gather")
        assert not gather.done() and not gather.wait(0.0) and not pinned.bytes.any()
        scatter = device.runtime.scatter(pinned.bytes[:1], *table((array.address + 9, 1)))
        assert scatter.wait(10) and array.shadow[9] == 0
    assert gather.wait(10)
    assert pinned.bytes[[8, 10]].tolist() == [8, 10] and device.runtime.launches == {"gather": 1, "scatter": 1}
    pinned.close()


def test_a_copy_comes_after_the_callers_stream(device: FakeDevice) -> None:
    array = device.array(np.zeros(16, np.uint8))
    pinned = device.runtime.pinned(16)
    stream = device.stream()
    with stream:
        stream.queue(lambda: array.shadow.fill(7))
        gather = device.runtime.gather(*table((array.address, 16)), pinned.bytes)
        stream.queue(lambda: array.shadow.fill(8))
    assert not gather.wait(0.05)
    stream.run(2)
    assert gather.wait(10) and set(pinned.bytes.tolist()) == {7}
    pinned.close()


def test_a_followed_stream_comes_first(device: FakeDevice) -> None:
    array, stream = device.array(np.zeros(16, np.uint8)), device.stream()
    array.stream = stream
    pinned = device.runtime.pinned(16)
    stream.queue(lambda: array.shadow.fill(7))
    found = device_memory(array)
    assert found is not None and found.stream is not None
    device.runtime.follow(found.stream)
    gather = device.runtime.gather(*table((array.address, 16)), pinned.bytes)
    assert not gather.wait(0.05)
    stream.run()
    assert gather.wait(10) and set(pinned.bytes.tolist()) == {7}
    pinned.close()


def test_a_mark_that_another_thread_took(device: FakeDevice) -> None:
    array, stream = device.array(np.zeros(16, np.uint8)), device.stream()
    pinned = device.runtime.pinned(16)
    with stream:
        stream.queue(lambda: array.shadow.fill(7))
        mark = device.runtime.mark()
    gather = device.runtime.gather(*table((array.address, 16)), pinned.bytes, mark)
    assert not gather.wait(0.05)
    stream.run()
    assert gather.wait(10) and set(pinned.bytes.tolist()) == {7}
    pinned.close()


def test_work_that_never_ends_is_an_error(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "AFTER_LIMIT_S", 0.05)
    array, pinned = device.empty(16), device.runtime.pinned(16)
    with device.stream():
        gather = device.runtime.gather(*table((array.address, 16)), pinned.bytes)
    with pytest.raises(Unavailable, match="did not end"):
        gather.wait(10)
    pinned.close()


def test_addresses_outside_an_allocation_fault(device: FakeDevice) -> None:
    array = device.empty(64)
    device.empty(64)
    pinned = device.runtime.pinned(8)
    event = device.runtime.gather(*table((array.address + 60, 8)), pinned.bytes)
    with pytest.raises(Unavailable, match="illegal memory access"):
        event.wait(10)
    device.runtime.fail_next("out of luck")
    with pytest.raises(Unavailable, match="out of luck"):
        device.runtime.gather(*table((array.address, 8)), pinned.bytes).wait(10)
    pinned.close()
