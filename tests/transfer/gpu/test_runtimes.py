"""What every runtime does alike: on a host, on the stand-in for a device, by the CUDA runtime on a stand-in for cupy,
and, where there is one, on a GPU."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.proto.errors import InvalidArgument
from kvstrata.transfer.gpu.cuda import CudaRuntime
from kvstrata.transfer.gpu.host import HostRuntime
from kvstrata.transfer.gpu.pieces import PinnedTable
from kvstrata.transfer.gpu.runtime import Runtime
from kvstrata.transfer.gpu.runtimes import runtime_of
from kvstrata.transfer.memory import HOST, Memory
from tests.transfer.gpu.fake_cupy import FakeCupy
from tests.transfer.gpu.fake_device import fake_device
from tests.transfer.gpu.gpus import gpu_or_skip

NBYTES = 1 << 18
WAIT_S = 20.0

Flat = npt.NDArray[np.uint8]


@dataclass
class Rig:
    """A runtime, and :data:`NBYTES` of its memory at ``address``: read by ``read``, set by ``write``."""

    runtime: Runtime
    address: int
    read: Callable[[], Flat]
    write: Callable[[Flat], None]


def host_rig(runtime: Runtime, memory: Flat) -> Rig:
    def write(content: Flat) -> None:
        memory[:] = content

    return Rig(runtime, memory.ctypes.data, memory.copy, write)


@pytest.fixture(params=["host", "fake", "cuda-on-cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with ExitStack() as stack:
        if request.param == "host":
            runtime = HostRuntime()
            stack.callback(runtime.close)
            yield host_rig(runtime, np.zeros(NBYTES, np.uint8))
        elif request.param == "fake":
            device = stack.enter_context(fake_device(4 * NBYTES))
            array = device.empty(NBYTES)
            yield Rig(
                device.runtime, array.address, array.shadow.copy, lambda content: np.copyto(array.shadow, content)
            )
        elif request.param == "cuda-on-cpu":
            torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
            monkeypatch.setitem(sys.modules, "torch", torch)
            monkeypatch.setitem(sys.modules, "cupy", FakeCupy(request.getfixturevalue("cpu")))
            yield host_rig(CudaRuntime(Memory("cuda", 0)), np.zeros(NBYTES, np.uint8))
        else:
            cupy = gpu_or_skip()
            memory = cupy.zeros(NBYTES, cupy.uint8)
            yield Rig(CudaRuntime(Memory("cuda", 0)), memory.data.ptr, memory.get, memory.set)


sizes = st.one_of(st.integers(0, 40), st.sampled_from([16, 512, 16384, 16385, 20_000]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(st.tuples(sizes, st.integers(0, 33)), min_size=1, max_size=10),
    offset=st.integers(0, 17),
    seed=st.integers(0, 1 << 16),
)
def test_pieces_go_there_and_back(rig: Rig, pieces: list[tuple[int, int]], offset: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    length = np.array([size for size, _ in pieces], np.int64)
    start = np.cumsum(length + [gap for _, gap in pieces]) - length
    order = draw.permutation(len(pieces))
    start, length, total = start[order], length[order], int(length.sum())
    content = draw.integers(0, 256, NBYTES, np.uint8)
    rig.write(content)
    pinned = rig.runtime.pinned(total + offset + 1)
    pinned.bytes[:] = 1
    target = pinned.bytes[offset : offset + total]
    event = rig.runtime.gather(start + rig.address, length, target)
    assert event.wait(WAIT_S) and event.done()
    image = [content[a : a + n] for a, n in zip(start, length, strict=True)]
    assert np.array_equal(target, np.concatenate(image)) and pinned.bytes[-1] == 1
    assert pinned.bytes[:offset].all() and np.array_equal(rig.read(), content)
    target[:] = draw.integers(0, 256, total, np.uint8)
    assert rig.runtime.scatter(target, start + rig.address, length).wait(WAIT_S)
    for a, n, end in zip(start, length, np.cumsum(length), strict=True):
        content[a : a + n] = target[end - n : end]
    assert np.array_equal(rig.read(), content)
    pinned.close()


def test_the_callers_arrays_may_change_at_once(rig: Rig) -> None:
    rig.write(np.arange(NBYTES).astype(np.uint8))
    pinned = rig.runtime.pinned(8)
    address, length = np.array([rig.address + 3]), np.array([8])
    event = rig.runtime.gather(address, length, pinned.bytes)
    address[:] = length[:] = 0
    assert event.wait(WAIT_S) and pinned.bytes.tolist() == list(range(3, 11))
    pinned.close()


@pytest.mark.parametrize(
    ("length", "packed", "text"),
    [
        ([4, 5], 8, "add up to 9 bytes"),
        ([-1, 9], 8, "piece 0 has -1"),
        ([8], 8, "shapes"),
        ([1, 7], None, "not pinned"),
    ],
)
def test_what_is_refused(rig: Rig, length: list[int], packed: int | None, text: str) -> None:
    pinned = rig.runtime.pinned(16)
    target = np.zeros(8, np.uint8) if packed is None else pinned.bytes[:packed]
    address = np.full(2, rig.address)
    for call in (
        lambda: rig.runtime.gather(address, np.array(length), target),
        lambda: rig.runtime.scatter(target, address, np.array(length)),
    ):
        with pytest.raises(InvalidArgument, match=text):
            call()
    pinned.close()


def test_what_cannot_be_packed_into(rig: Rig) -> None:
    pinned = rig.runtime.pinned(16)
    one = np.array([rig.address]), np.array([8])
    read_only = pinned.bytes[:8]
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        rig.runtime.gather(*one, read_only)
    assert rig.runtime.scatter(read_only, *one).wait(WAIT_S)
    for wrong in (pinned.bytes[::2], pinned.bytes.view(np.int8)[:8]):
        with pytest.raises(InvalidArgument, match="contiguous u8"):
            rig.runtime.gather(*one, wrong)
    with pytest.raises(InvalidArgument, match="at least one"):
        rig.runtime.pinned(0)
    pinned.close()
    with pytest.raises(InvalidArgument, match="not pinned"):
        rig.runtime.gather(*one, pinned.bytes[:8])


def test_pinned_memory_can_be_mapped_by_others(rig: Rig) -> None:
    rig.write(np.full(NBYTES, 5, np.uint8))
    pinned = rig.runtime.pinned(4096)
    with mmap.mmap(pinned.memfd, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as theirs:
        assert rig.runtime.gather(np.array([rig.address]), np.array([4096]), pinned.bytes).wait(WAIT_S)
        assert theirs[:] == b"\x05" * 4096
    pinned.close()
    assert pinned.memfd == -1


def test_a_mark_of_an_idle_stream_is_reached(rig: Rig) -> None:
    rig.runtime.follow(1)
    rig.runtime.retain()
    assert rig.runtime.mark().wait(WAIT_S)


def test_there_is_one_runtime_a_memory() -> None:
    assert runtime_of(HOST) is runtime_of(HOST)
    with pytest.raises(InvalidArgument):
        runtime_of(HOST).allocation(1)


def test_a_forked_child_has_its_own_runtime() -> None:
    """The parent's threads, and a device's context, do not come along."""
    parent = runtime_of(HOST)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            memory, pinned = np.full(8, 3, np.uint8), runtime_of(HOST).pinned(8)
            event = runtime_of(HOST).gather(np.array([memory.ctypes.data]), np.array([8]), pinned.bytes)
            status = int(not (event.wait(WAIT_S) and pinned.bytes.all() and runtime_of(HOST) is not parent))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_packed_memory_is_pinned_to_its_end() -> None:
    flat, table = np.zeros(16, np.uint8), PinnedTable()
    table.add(flat[4:12])
    table.check(flat[4:12], written=True)
    table.check(flat[6:6], written=True)
    for outside in (flat[3:11], flat[5:13], flat[12:], flat):
        with pytest.raises(InvalidArgument, match="not pinned"):
            table.check(outside, written=True)
