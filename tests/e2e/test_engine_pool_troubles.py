"""A pool that is absent, dies, returns, stalls, is full or disagrees: the engine serves the right tokens throughout."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.client import Client
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.request import SamplingParams
from tests.e2e.real_engine import counters_are_zero
from tests.e2e.real_pool import RealPool, keys

BLOCK = 16
OUTPUT = SamplingParams(max_tokens=4, ignore_eos=True)
WAIT_S = 20.0

Prompt = list[int]


def prompts(count: int, seed: int = 0, length: int = 6 * BLOCK + 5) -> list[Prompt]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for _ in range(count)]


def config(masters: str = "", **pool: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="tiny", max_model_len=1024),
        cache=CacheConfig(block_size=BLOCK, num_blocks=200),
        step=StepConfig(max_num_batched_tokens=256, max_num_seqs=8),
        pool=PoolConfig(masters=masters, load_policy="always", **pool),  # type: ignore[arg-type]
    )


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    real = RealPool(tmp_path, nodes=1, dram="64MiB")
    yield real
    real.end()


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[[list[Prompt]], list[Prompt]]]:
    """Tokens of an engine without a pool, its own cache forgotten each time."""
    engine = Engine.create(config())

    def tokens(asked: list[Prompt]) -> list[Prompt]:
        assert engine.reset_prefix_cache()
        return [engine.generate([prompt], OUTPUT)[0] for prompt in asked]

    yield tokens
    engine.close()


def serve(engine: Engine, asked: list[Prompt], salt: str = "") -> list[Prompt]:
    """One after the other, each settled, and nothing kept in the engine: what is reused came from the pool."""
    found = []
    for prompt in asked:
        found.append(engine.generate([prompt], OUTPUT, salt)[0])
        counters_are_zero(engine)
        assert engine.reset_prefix_cache()
    return found


def served_from_the_pool(engine: Engine, expected: list[Prompt], asked: list[Prompt]) -> None:
    """Serve until the pool gives hits again: it is found by itself, within a bound."""
    deadline = time.monotonic() + WAIT_S
    before = engine.stats().external_prefix_cache_hits
    while engine.stats().external_prefix_cache_hits == before:
        assert time.monotonic() < deadline, engine.stats()
        assert serve(engine, asked) == expected


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_pool_that_is_not_there_and_comes_later(
    tmp_path: Path,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(2)
    expected = plain(asked)
    address = free_address()
    engine = opened(config(address))
    assert serve(engine, asked) == expected
    assert engine.stats().external_prefix_cache_hits == 0
    late = RealPool(tmp_path, listen=address)
    try:
        served_from_the_pool(engine, expected, asked)
    finally:
        late.end()


@pytest.mark.parametrize("victim", ["master", "node0"])
def test_the_pool_dies_and_returns(
    victim: str,
    pool: RealPool,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(2, seed=1)
    expected = plain(asked)
    engine = opened(config(pool.address))
    served_from_the_pool(engine, expected, asked)
    address = pool.address
    pool.daemons[victim].signal(signal.SIGKILL)
    assert serve(engine, asked) == expected
    if victim == "master":
        pool.start_master(address)
    else:
        pool.start_node(0)
    served_from_the_pool(engine, expected, asked)


def test_a_node_that_stands_still_delays_a_request_by_no_more_than_its_deadline(
    pool: RealPool,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(2, seed=2)
    expected = plain(asked)
    engine = opened(config(pool.address, load_deadline_ms=500))
    served_from_the_pool(engine, expected, asked)
    pool.node().signal(signal.SIGSTOP)
    try:
        assert serve(engine, asked) == expected
    finally:
        pool.node().signal(signal.SIGCONT)
    served_from_the_pool(engine, expected, asked)


def test_loads_that_take_ten_seconds_end_by_their_deadline(
    pool: RealPool,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(2, seed=3)
    expected = plain(asked)
    writer = opened(config(pool.address))
    assert serve(writer, asked) == expected
    slow = opened(config(pool.address, transport="auto+faults:delay_ms=10000", load_deadline_ms=400, store=False))
    assert serve(slow, asked) == expected
    seen = slow.stats()
    assert seen.connector["loads"] >= 1 and seen.external_prefix_cache_hits == 0


def test_a_pool_that_is_full_of_blocks_in_use_refuses_and_the_engine_serves(
    tmp_path: Path,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(2, seed=4)
    expected = plain(asked)
    small = RealPool(tmp_path, nodes=1, dram="8MiB")
    try:
        with Client(small.address) as other:
            size = 64 << 10
            namespace = other.namespace("filler", block_bytes=size, block_tokens=1)
            names = keys(200)
            result = other.store(namespace, "", names, other.register(np.ones(200 * size, np.uint8)).rows(namespace))
            assert 0 < result.stored.sum() < 200, "the node holds less than was offered"
            with other.view(namespace, "", names):
                engine = opened(config(small.address))
                assert serve(engine, asked * 2) == expected * 2
                assert engine.stats().connector["store_blocks_full"] > 0
                assert engine.stats().external_prefix_cache_hits == 0
            served_from_the_pool(engine, expected, asked)
    finally:
        small.end()


def test_a_pool_that_knows_the_namespace_otherwise_is_not_used(
    pool: RealPool,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    asked = prompts(1, seed=5)
    layout = opened(config()).executor.layout
    with Client(pool.address) as other:
        other.namespace(
            layout.groups[0].fingerprint, block_bytes=4096, block_tokens=BLOCK, hash_bytes=layout.hash_bytes
        )
        engine = opened(config(pool.address))
        assert serve(engine, asked * 2) == plain(asked * 2)
        assert engine.stats().external_prefix_cache_hits == 0


def test_aborted_while_loading(
    pool: RealPool,
    plain: Callable[[list[Prompt]], list[Prompt]],
    opened: Callable[[EngineConfig], Engine],
) -> None:
    """Its blocks stay referenced until the load is over; the id may come back at once."""
    asked = prompts(1, seed=6)
    expected = plain(asked)
    writer = opened(config(pool.address))
    assert serve(writer, asked) == expected
    engine = opened(config(pool.address, transport="auto+faults:delay_ms=300", load_deadline_ms=4000, store=False))
    assert engine.connector is not None
    for _ in range(5):
        engine.add_request("again", asked[0], OUTPUT)
        deadline = time.monotonic() + WAIT_S
        while engine.stats().loading == 0:
            assert time.monotonic() < deadline
            engine.step()
            engine.wait(0.01)
        engine.abort("again")
    assert engine.connector.jobs_pending() > 0
    assert engine.kv.pool.num_free_blocks < engine.kv.pool.num_blocks - 1
    counters_are_zero(engine)
    assert serve(engine, asked) == expected
