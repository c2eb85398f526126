"""vLLM clears its caches to pause and to sleep, the connector's too: what becomes of the pool, and of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.real_pool import RealPool, until
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK, Prompt, VllmEngine
from tests.vllm.tiny_llama import make_model

BLOCKS = 4
REFUSED = "Failed to reset the KV connector cache."  #: vLLM's words


def cached_from_pool(engine: VllmEngine, prompts: list[Prompt]) -> int | None:
    engine.forget()
    return engine.generate_with_pool(prompts).cached[0]


@pytest.mark.parametrize(("extra", "problem"), [({}, REFUSED), ({"fixed_weights": True}, "")])
def test_a_pause_leaves_the_pool_as_it_is_and_works_where_weights_are_fixed(
    open_engine: OpenEngine, pool: RealPool, plain: Plain, extra: dict[str, Any], problem: str
) -> None:
    prompts = draw(1, seed=40 + len(extra), length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, **extra)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    assert [engine.pause(), engine.pause()] == [problem] * 2
    again = engine.generate_with_pool(prompts)
    assert again.tokens == plain(prompts) and again.cached == [BLOCKS * BLOCK]


def test_a_pause_for_new_weights_ends_what_is_in_the_pool_and_goes_on_with_it(
    open_engine: OpenEngine, pool: RealPool, plain: Plain
) -> None:
    prompts = draw(1, seed=42, length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, reset_external=True)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    assert engine.pause() == ""
    again = engine.generate(prompts)  # the pool is away until its namespaces are opened anew, or has nothing
    assert again.tokens == plain(prompts) and again.cached == [0]
    engine.settle()
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)


def test_a_pause_ends_what_was_stored_before_the_model_s_files_were_replaced(
    open_engine: OpenEngine, pool: RealPool, plain: Plain, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    prompts = draw(1, seed=43, length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, changed={"model": str(folder)}, reset_external=True)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    make_model(folder, seed=1)
    assert engine.pause() == ""
    again = engine.generate(prompts)  # the engine itself has not loaded them
    assert again.tokens == plain(prompts) and again.cached == [0]


def test_a_pause_with_fixed_weights_fails_where_the_model_s_files_are_others(
    open_engine: OpenEngine, pool: RealPool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    engine = open_engine(pool.address, changed={"model": str(folder)}, fixed_weights=True)
    assert engine.pause() == ""
    make_model(folder, seed=1)
    assert engine.pause() == REFUSED
