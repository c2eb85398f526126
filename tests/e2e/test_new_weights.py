"""Engines that outlive a weight epoch: the old are left out and say so, those that are reset go on in the new one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.client.admin import AdminClient
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.request import SamplingParams
from kvstrata.engine_adapter.vllm.resetting import reset_pool
from tests.e2e.real_engine import counters_are_zero
from tests.e2e.real_pool import RealPool
from tests.waiting import until

BLOCK = 16
OUTPUT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RealPool]:
    real = RealPool(tmp_path, nodes=1, dram="64MiB")
    yield real
    real.end()


@pytest.fixture
def engines(pool: RealPool) -> Iterator[tuple[Engine, Engine]]:
    made = [Engine.create(config(pool.address)) for _ in range(2)]
    yield made[0], made[1]
    for engine in made:
        engine.close()


def config(masters: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model="tiny", max_model_len=1024),
        cache=CacheConfig(block_size=BLOCK, num_blocks=200),
        step=StepConfig(max_num_batched_tokens=256, max_num_seqs=8),
        pool=PoolConfig(masters=masters, load_policy="always"),
    )


def prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(6 * BLOCK + 5)]


def hits(engine: Engine, asked: list[int]) -> int:
    """Serve it from the pool alone; the tokens that the pool had."""
    before = engine.stats().external_prefix_cache_hits
    engine.generate([asked], OUTPUT)
    counters_are_zero(engine)
    assert engine.reset_prefix_cache()
    return engine.stats().external_prefix_cache_hits - before


def is_ready(engine: Engine) -> bool:
    engine.step()
    return engine.stats().connector["pool_ready"] == 1


def reset(engine: Engine) -> None:
    """Has loaded the new weights, says so, and is back at the pool."""
    assert engine.reset_prefix_cache(reset_external=True) and engine.has_work
    engine.step()
    until(lambda: is_ready(engine))


def test_after_a_bump_engines_are_left_out_until_they_are_reset(
    pool: RealPool, engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = engines
    before, after = prompt(1), prompt(2)
    assert hits(first, before) == 0
    until(lambda: hits(second, before) > 0)
    with AdminClient(pool.address) as admin:
        (group,) = {row.spec.group for row in admin.namespaces()}
        admin.bump_epoch(group)
    # Both serve on, find nothing of before, add nothing, and say so once.
    with caplog.at_level(logging.WARNING):
        for asked in (before, after, prompt(3)):
            assert hits(second, asked) == 0
    figures = second.stats().connector
    assert figures["weights_superseded"] == 1 and figures["store_blocks_refused"] > 0 and figures["pool_lost"] == 0
    assert caplog.text.count("takes no blocks of this engine") == 1
    # One has the new weights now: it fills the new epoch, which the other cannot see before it is reset too.
    reset(first)
    assert hits(first, before) == 0, "what was stored with the older weights"
    until(lambda: hits(first, before) > 0)
    assert hits(second, before) == 0
    reset(second)
    assert second.stats().connector["weights_superseded"] == 0
    assert hits(second, before) > 0


def test_a_reset_from_within_an_engine_begins_the_next_epoch(pool: RealPool, engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    asked = prompt(1)
    assert hits(engine, asked) == 0
    until(lambda: hits(engine, asked) > 0)
    assert engine.connector is not None
    stored = [group.fingerprint for group in engine.executor.layout.groups]
    assert not reset_pool("127.0.0.1:1", lambda: stored, engine.connector)
    assert hits(engine, asked) > 0, "nobody was told, so nothing is forgotten"
    assert reset_pool(pool.address, lambda: stored, engine.connector)
    with AdminClient(pool.address) as admin:
        assert {row.epoch for row in admin.namespaces()} == {1}
    engine.step()
    until(lambda: is_ready(engine))
    assert hits(engine, asked) == 0
    until(lambda: hits(engine, asked) > 0)
