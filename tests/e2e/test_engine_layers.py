"""Loads that run beside the forward pass that needs them change no token: whole, failed, taken back or late."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvstrata.engine_adapter.connector import layered_store, worker_side
from kvstrata.engine_adapter.connector.layered import LayeredLoads
from kvstrata.engine_adapter.connector.layered_store import LayeredStore
from kvstrata.engine_adapter.connector.pool import Pool
from kvstrata.engine_adapter.connector.worker_side import PoolWorkerSide
from kvstrata.engine_adapter.hashing import BlockHasher
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.model.arrays import HOST
from kvstrata.engine_adapter.paged.ranks import worker
from tests.e2e.real_engine import counters_are_zero, settle
from tests.e2e.real_pool import RealPool
from tests.e2e.test_engine_tokens import BLOCK, Prompt, config, conversations, serve
from tests.engine_adapter.paged.model.strict_device import StrictArrays


def layered(**pool: object) -> EngineConfig:
    return config(**{"layered_loads": "always", **pool})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    real = RealPool(tmp_path_factory.mktemp("pool"), nodes=1, dram="64MiB")
    yield real
    real.end()


@pytest.fixture(scope="module")
def plain() -> list[Prompt]:
    """Tokens of an engine with no cache at all."""
    bare = config()
    engine = Engine.create(
        msgspec.structs.replace(bare, cache=msgspec.structs.replace(bare.cache, enable_prefix_caching=False))
    )
    found = serve(engine, conversations())
    engine.close()
    return found


@pytest.fixture(scope="module")
def stored(pool: RealPool) -> str:
    """A salt under which the pool has all blocks of the conversations."""
    engine = Engine.create(config(masters=pool.address))
    serve(engine, conversations(), "layers")
    settle(engine)
    engine.close()
    return "layers"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_loads_beside_the_forward_pass_change_no_token(
    transport: str, pool: RealPool, plain: list[Prompt], stored: str, opened: Callable[[EngineConfig], Engine]
) -> None:
    engine = opened(layered(masters=pool.address, transport=transport))
    assert serve(engine, conversations(), stored) == plain
    counters_are_zero(engine)
    seen = engine.stats()
    assert 0 < seen.connector["loads_layered"] == seen.connector["loads"] == seen.connector["loads_ended"]
    assert seen.connector["load_waited_seconds"] > 0
    assert seen.external_prefix_cache_hits == seen.connector["load_tokens"] == seen.connector["load_tokens_asked"] > 0


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("fault", ["lose", "corrupt"])
def test_failed_loads_beside_the_forward_pass_change_no_token(
    fault: str, rate: float, pool: RealPool, plain: list[Prompt], stored: str, opened: Callable[[EngineConfig], Engine]
) -> None:
    """Lost blocks were in place and are taken back; corrupt ones were wrong while they were computed with."""
    engine = opened(layered(masters=pool.address, transport=f"auto+faults:{fault}={rate},seed=3"))
    assert serve(engine, conversations(), stored) == plain
    counters_are_zero(engine)
    seen = engine.stats().connector
    assert seen["loads_layered"] > 0
    if rate >= 0.5:
        assert seen["loads_layered_failed"] > 0 and seen["load_tokens"] < seen["load_tokens_asked"]


def test_what_was_computed_from_a_failed_load_is_not_stored(
    pool: RealPool, plain: list[Prompt], opened: Callable[[EngineConfig], Engine]
) -> None:
    """The reader adds to the pool under its hashes; who finds that must find the right bytes."""
    prompts, salt = conversations(), "half"
    writer = opened(config(masters=pool.address))
    serve(writer, prompts[:4:2], salt)
    settle(writer)
    reader = opened(layered(masters=pool.address, transport="auto+faults:corrupt=0.3,seed=5"))
    assert serve(reader, prompts, salt) == plain
    settle(reader)
    assert reader.stats().connector["loads_layered_failed"] > 0
    after = opened(layered(masters=pool.address))
    assert serve(after, prompts, salt) == plain
    assert after.stats().external_prefix_cache_hits > 0


def test_many_at_once_beside_others_that_decode(
    pool: RealPool, stored: str, opened: Callable[[EngineConfig], Engine]
) -> None:
    from tests.e2e.test_engine_tokens import OUTPUT

    prompts = conversations()
    expected = opened(config()).generate(prompts, OUTPUT)
    for transport in ("auto", "auto+faults:lose=0.2,seed=9"):
        engine = opened(layered(masters=pool.address, transport=transport))
        assert engine.generate(prompts, OUTPUT, stored) == expected
        counters_are_zero(engine)
        assert engine.stats().connector["loads_layered"] > 0


def test_two_ranks_wait_each_for_its_own_layers(pool: RealPool, opened: Callable[[EngineConfig], Engine]) -> None:
    prompts = conversations()[:4]

    def ranks(bare: EngineConfig) -> Engine:
        return opened(msgspec.structs.replace(bare, tensor_parallel=2))

    expected = serve(ranks(config()), prompts)
    first = ranks(config(masters=pool.address))
    assert serve(first, prompts, "two ranks, layers") == expected
    settle(first)
    for transport in ("auto", "auto+faults:lose=0.5,seed=5"):
        second = ranks(layered(masters=pool.address, transport=transport))
        assert serve(second, prompts, "two ranks, layers") == expected
        assert second.stats().connector["loads_layered"] > 0
        counters_are_zero(second)


def test_a_slow_load_holds_a_step_up_for_half_a_second_and_goes_on_without_it(
    pool: RealPool, plain: list[Prompt], stored: str, opened: Callable[[EngineConfig], Engine]
) -> None:
    transport = "auto+faults:delay_ms=900"
    engine = opened(layered(masters=pool.address, transport=transport, load_deadline_ms=20_000))
    prompts = conversations()[2:4]
    assert serve(engine, prompts, stored) == plain[2:4]
    counters_are_zero(engine)
    seen = engine.stats().connector
    assert seen["loads_layered"] == seen["loads_layered_failed"] == 2
    assert seen["load_tokens"] == seen["load_tokens_asked"], "what came late counts all the same"
    assert seen["load_waited_seconds"] < 2 * 0.9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_load_that_comes_after_it_was_read_changes_neither_token_nor_byte(
    device: str,
    pool: RealPool,
    plain: list[Prompt],
    opened: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins when the forward pass has given it up, and has ended, whole, when that has: all looks well then."""
    prompts = conversations()[:4]
    computed, late = f"computed, {device}", f"late, {device}"
    alone = opened(config(masters=pool.address, load_policy="never"))
    assert serve(alone, prompts, computed) == plain[:4]
    writer = opened(config(masters=pool.address))
    serve(writer, prompts[::2], late)
    for engine in (alone, writer):
        settle(engine)
    monkeypatch.setattr(worker, "make_arrays", lambda device, rank: HOST if device == "cpu" else StrictArrays())
    loads = LateLoads(monkeypatch)
    reader = opened(msgspec.structs.replace(layered(masters=pool.address, load_deadline_ms=20_000), device=device))
    assert serve(reader, prompts, late) == plain[:4]
    counters_are_zero(reader)
    seen = reader.stats().connector
    assert seen["loads_layered"] == seen["loads_layered_failed"] == loads.missed > 0
    assert seen["load_tokens"] == seen["load_tokens_asked"], "what came is kept"
    for prompt in prompts:
        assert np.array_equal(bytes_in_pool(alone, prompt, late), bytes_in_pool(alone, prompt, computed))


class LateLoads:
    """Layered loads of engines in this process: each is missed by its forward pass, and ends within the step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.missed = 0
        self._given_up = threading.Event()
        load, wait_layer, forward_ended = Pool.load, PoolWorkerSide.wait_layer, PoolWorkerSide.forward_ended

        def load_late(pool: Pool, *args: Any) -> Any:
            if args[4] is not None:
                assert self._given_up.wait(20)
            return load(pool, *args)

        def wait(side: PoolWorkerSide, layer: int) -> bool:
            good = wait_layer(side, layer)
            if not good:
                self._given_up.set()
            return good

        def end(side: PoolWorkerSide) -> None:
            for one in side._layered._loads:
                assert one.wait_end(20)
                self.missed += self._given_up.is_set()
            self._given_up.clear()
            forward_ended(side)

        monkeypatch.setattr(worker_side, "LayeredLoads", partial(LayeredLoads, 0.05))
        monkeypatch.setattr(Pool, "load", load_late)
        monkeypatch.setattr(PoolWorkerSide, "wait_layer", wait)
        monkeypatch.setattr(PoolWorkerSide, "forward_ended", end)


def bytes_in_pool(engine: Engine, prompt: Prompt, salt: str) -> npt.NDArray[np.uint8]:
    """All full blocks of the prompt as the pool has them. ``engine``: whose namespace they are in."""
    side: Any = engine.executor._worker._connector  # type: ignore[attr-defined]
    (namespace,) = side._pool._attachment.namespaces(0, side._pool.generation)
    hashes: list[bytes] = []
    hasher = BlockHasher(BLOCK, engine.config.cache.hash_algorithm)
    hasher.extend(hasher.root(salt), hashes, prompt)
    client = side._pool._attachment.client
    region = client.allocate(len(hashes) * namespace.block_bytes)
    try:
        result = client.load(namespace, salt, b"".join(hashes), region.rows(namespace))
        assert result.loaded.all(), result.reasons
        return np.array(region.bytes[: len(hashes) * namespace.block_bytes])
    finally:
        client.unregister(region)


def test_a_node_that_stands_still_is_waited_for_no_longer_than_a_load_may_take(
    pool: RealPool, plain: list[Prompt], stored: str, opened: Callable[[EngineConfig], Engine]
) -> None:
    engine = opened(layered(masters=pool.address, load_deadline_ms=1_000))
    prompts = conversations()
    assert serve(engine, prompts[:1], stored) == plain[:1]
    pool.node().signal(signal.SIGSTOP)
    try:
        assert serve(engine, prompts[4:5], stored) == plain[4:5]
    finally:
        pool.node().signal(signal.SIGCONT)
    counters_are_zero(engine)
    assert engine.stats().connector["loads_layered_failed"] >= 1


# ---------------------------------------------------------------- stores beside a step


def storing(monkeypatch: pytest.MonkeyPatch, **pool: object) -> EngineConfig:
    """Of any size: the models of these tests are small."""
    monkeypatch.setattr(layered_store, "BYTES_MIN", 0)
    return config(layered_stores=True, **pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_was_stored_beside_the_step_changes_no_token(
    transport: str,
    pool: RealPool,
    plain: list[Prompt],
    opened: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    salt = f"beside {transport}"
    writer = opened(storing(monkeypatch, masters=pool.address, transport=transport))
    assert serve(writer, conversations(), salt) == plain
    counters_are_zero(writer)
    wrote = writer.stats().connector
    assert 0 < wrote["stores_layered"] <= wrote["stores_ended"] and not wrote.get("store_blocks_aborted")
    reader = opened(config(masters=pool.address, transport=transport, verify="always"))
    assert serve(reader, conversations(), salt) == plain
    counters_are_zero(reader)
    read = reader.stats().connector
    assert 0 < read["load_tokens"] == read["load_tokens_asked"] and not read.get("load_blocks_corrupt")


def test_a_node_that_dies_beside_a_step_changes_no_token(
    tmp_path: Path,
    plain: list[Prompt],
    opened: Callable[[EngineConfig], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of a store: some of its layers are there."""
    real = RealPool(tmp_path, nodes=1, dram="64MiB")
    try:
        engine = opened(storing(monkeypatch, masters=real.address, transport="tcp"))
        written, killed = LayeredStore.written, threading.Event()

        def kills(one: LayeredStore, part: int, deadline: float) -> bool:
            if part == 1 and not killed.is_set():
                killed.set()
                real.node().signal(signal.SIGKILL)
            return written(one, part, deadline)

        monkeypatch.setattr(LayeredStore, "written", kills)
        assert serve(engine, conversations(), "dies") == plain
        assert killed.is_set()
        counters_are_zero(engine)
    finally:
        real.end()
