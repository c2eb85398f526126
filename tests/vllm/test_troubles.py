"""A pool that is absent, comes late, dies under load and returns, or is slow: vLLM serves the right tokens on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK, Prompt, VllmEngine, free_address

LENGTH = 10 * BLOCK + 5
WAIT_S = 40.0


@pytest.fixture
def own_pool(tmp_path: Path) -> Iterator[RealPool]:
    real = RealPool(tmp_path, nodes=1, dram="128MiB")
    yield real
    real.end()


def serve(engine: VllmEngine, prompts: list[Prompt], expected: list[Prompt]) -> int:
    """One after the other, nothing kept in the engine; returns how many tokens were not computed."""
    reused = 0
    for prompt, tokens in zip(prompts, expected, strict=True):
        answer = engine.generate([prompt])
        assert answer.tokens == [tokens]
        reused += answer.cached[0] or 0
        engine.settle()
        engine.forget()
    return reused


def served_from_the_pool(engine: VllmEngine, prompts: list[Prompt], expected: list[Prompt]) -> None:
    """Serve until the pool gives hits: it is found by itself, within a bound."""
    deadline = time.monotonic() + WAIT_S
    while not serve(engine, prompts, expected):
        assert time.monotonic() < deadline, engine.log()[-3000:]


def test_a_pool_that_is_not_there_and_comes_later(tmp_path: Path, plain: Plain, open_engine: OpenEngine) -> None:
    prompts = draw(2, seed=20, length=LENGTH)
    expected = plain(prompts)
    address = free_address()
    engine = open_engine(address, attached=False)
    assert serve(engine, prompts, expected) == 0
    late = RealPool(tmp_path, dram="128MiB", listen=address)
    try:
        served_from_the_pool(engine, prompts, expected)
    finally:
        late.end()


@pytest.mark.parametrize("victim", ["node0", "master"])
def test_the_pool_dies_in_mid_traffic_and_returns(
    victim: str, own_pool: RealPool, plain: Plain, open_engine: OpenEngine
) -> None:
    prompts = draw(4, seed=21, length=LENGTH)
    expected = plain(prompts)
    engine = open_engine(own_pool.address, load_deadline_ms=2_000)
    served_from_the_pool(engine, prompts, expected)
    address = own_pool.address
    killer = threading.Timer(0.05, own_pool.daemons[victim].signal, (signal.SIGKILL,))
    killer.start()
    serve(engine, prompts * 3, expected * 3)
    killer.join()
    if victim == "master":
        own_pool.start_master(address)
    else:
        own_pool.start_node(1)
    served_from_the_pool(engine, prompts, expected)
    engine.stop()


def test_a_node_that_is_killed_while_loads_are_under_way(
    own_pool: RealPool, plain: Plain, open_engine: OpenEngine
) -> None:
    prompts = draw(6, seed=22, length=LENGTH)
    expected = plain(prompts)
    writer = open_engine(own_pool.address)
    served_from_the_pool(writer, prompts, expected)
    # Each transfer waits so long that the node is dead before the first one reads.
    reader = open_engine(
        own_pool.address, transport="auto+faults:delay_ms=1500", load_deadline_ms=4_000, role="kv_consumer"
    )
    killer = threading.Timer(0.7, own_pool.node().signal, (signal.SIGKILL,))
    killer.start()
    assert reader.generate(prompts).tokens == expected
    killer.join()
    reader.settle()
    found = reader.counters()
    assert found["load_tokens"] < found["load_tokens_asked"], f"no load was hurt: the test shows nothing: {found}"


def test_a_pool_slower_than_the_deadline_is_not_waited_for(
    own_pool: RealPool, plain: Plain, open_engine: OpenEngine
) -> None:
    prompts = draw(2, seed=23, length=LENGTH)
    expected = plain(prompts)
    served_from_the_pool(open_engine(own_pool.address), prompts, expected)
    slow = open_engine(
        own_pool.address, transport="auto+faults:delay_ms=60000", load_deadline_ms=500, role="kv_consumer"
    )
    answer = slow.generate(prompts)
    assert answer.tokens == expected
    assert answer.seconds < 30, "a load outlived its deadline"
