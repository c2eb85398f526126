"""Device memory is registered by whole allocations, with its device's context current in the agent's thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.memory import HOST, Memory
from kvstrata.transfer.rdma.agent import AgentError
from kvstrata.transfer.rdma.memory import LocalMemory
from kvstrata.transfer.rdma.nixl import NixlAgent
from kvstrata.transfer.regions import Region
from tests.transfer.gpu.fake_device import FakeDevice, fake_device

CUDA = Memory("cuda", 0)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device(1 << 20) as one:
        yield one


class Engine:
    """What it was asked to register."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, Memory]] = []
        self.closed = 0

    def register(self, address: int, nbytes: int, memory: Memory = HOST, *, within_s: float | None = None) -> Any:
        self.asked.append((address, nbytes, memory))
        return SimpleNamespace(metadata=b"", close=self._close)

    def _close(self) -> None:
        self.closed += 1


def test_allocations_are_registered_whole(device: FakeDevice) -> None:
    engine = Engine()
    memory = LocalMemory(engine)  # type: ignore[arg-type]
    first, second = device.empty(5000), device.empty(7000)
    region = Region.spanning(CUDA, [(first.address + 100, 50), (second.address, 7000)], (first, second))
    assert len(memory.of(region)) == 2 and memory.of(region) is memory.of(region)
    assert engine.asked == [(first.address, 5000, CUDA), (second.address, 7000, CUDA)]
    memory.forget(region)
    assert engine.closed == 2


def test_host_memory_is_registered_as_it_is(device: FakeDevice) -> None:
    engine = Engine()
    flat = np.zeros(100, np.uint8)
    LocalMemory(engine).of(Region(flat, flat))  # type: ignore[arg-type]
    assert engine.asked == [(flat.ctypes.data, 100, HOST)]


def test_memory_of_a_device_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    memory, engine = Memory("cuda", 77), Engine()
    with pytest.raises(Unavailable, match=r"kvstrata\[gpu\]"):
        LocalMemory(engine).of(Region.on_device(memory, 1 << 40, 100, None))  # type: ignore[arg-type]
    assert engine.asked == []


class Bindings:
    """As much of NIXL's as a registration takes."""

    DRAM_SEG, VRAM_SEG, NIXL_SUCCESS = "DRAM", "VRAM", 0

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.seen: list[tuple[str, int]] = []

    def nixlRegDList(self, segment: str, ranges: list[tuple[int, int, int, str]]) -> list[Any]:
        return [segment, *ranges]

    def registerMem(self, memories: list[Any], backends: object) -> int:
        self.seen.append((memories[0], self.device.runtime.retained))
        return 0


def bare(bindings: Bindings) -> NixlAgent:
    agent = NixlAgent.__new__(NixlAgent)
    agent._b = agent._agent = bindings
    agent._backends, agent._errors, agent._gone = [], (AgentError,), AgentError
    return agent


def test_the_context_is_current_before_memory_is_registered(device: FakeDevice) -> None:
    bindings = Bindings(device)
    agent = bare(bindings)
    agent.register(device.base, 100, CUDA)
    agent.register(4096, 100, HOST)
    assert bindings.seen == [("VRAM", 1), ("DRAM", 1)]
    threads: list[int] = []
    device.runtime.retain = lambda: threads.append(threading.get_ident())  # type: ignore[method-assign]
    agent.register(device.base, 100, CUDA)
    assert threads == [threading.get_ident()], "in the thread that registers"


def test_a_context_that_cannot_be_had_is_the_agents_refusal(device: FakeDevice) -> None:
    def failing() -> None:
        raise Unavailable("no driver")

    device.runtime.retain = failing  # type: ignore[method-assign]
    bindings = Bindings(device)
    with pytest.raises(AgentError, match="cuda:0 memory cannot be registered: no driver"):
        bare(bindings).register(device.base, 100, CUDA)
    assert not bindings.seen
