"""Layers with a sliding window beside full ones: two KV cache groups, of which a load brings what a hit needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, draw
from tests.vllm.engine import BLOCK, Prompt, VllmEngine, arguments
from tests.vllm.tiny_llama import Shape, make_model

SHARED = 20 * BLOCK
LENGTH = SHARED + 50
OUTPUT = 3 * BLOCK
WINDOW = 3 * BLOCK
#: Two requests and a half: each has 10 blocks in the full layers' group in the end, and 4 or 5 in the other.
FEW_BLOCKS = {"num_gpu_blocks_override": 36, "max_model_len": 20 * BLOCK, "max_num_batched_tokens": 4 * BLOCK}
PREEMPTIONS = "vllm:num_preemptions"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid") / "model", Shape(layers=4, window=WINDOW))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return draw(5, seed=70, length=LENGTH, shared=SHARED)


@pytest.fixture(scope="module")
def expected(hybrid: Path, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> list[Prompt | None]:
    log = tmp_path_factory.mktemp("plain") / "vllm.log"
    engine = VllmEngine(log, arguments(hybrid, enable_prefix_caching=False))
    try:
        return [engine.generate([prompt], max_tokens=OUTPUT).tokens[0] for prompt in prompts]
    finally:
        engine.end()


@pytest.fixture(scope="module")
def writer(
    pool: RealPool, hybrid: Path, open_shared: OpenEngine, prompts: list[Prompt], expected: list[Prompt | None]
) -> Iterator[VllmEngine]:
    """Has computed the first prompt and its answer."""
    engine = open_shared(pool.address, changed={"model": str(hybrid)})
    assert engine.generate_with_pool(prompts[:1], max_tokens=OUTPUT).tokens == expected[:1]
    yield engine


def test_a_hit_loads_all_of_the_full_layers_and_the_window_of_the_others(
    writer: VllmEngine,
    pool: RealPool,
    hybrid: Path,
    open_engine: OpenEngine,
    prompts: list[Prompt],
    expected: list[Prompt | None],
) -> None:
    reader = open_engine(pool.address, changed={"model": str(hybrid)})
    assert sorted(reader.groups()) == [("FullAttentionSpec", 2), ("SlidingWindowSpec", 2)]
    before = reader.counters()["load_blocks_loaded"]
    answer = reader.generate_with_pool(prompts[:1], max_tokens=OUTPUT)
    blocks = LENGTH // BLOCK
    assert (answer.cached, answer.tokens) == ([blocks * BLOCK], expected[:1])
    assert reader.counters()["load_blocks_loaded"] - before == blocks + WINDOW // BLOCK
    rest = reader.generate(prompts[1:], max_tokens=OUTPUT)
    assert (rest.cached, rest.tokens) == ([SHARED] * 4, expected[1:])
    reader.settle()
    reader.forget()
    again = reader.generate_with_pool(prompts, max_tokens=OUTPUT)
    assert again.tokens == expected and 0 not in again.cached


def test_loads_that_fail_in_some_group_cost_no_answer(
    writer: VllmEngine,
    pool: RealPool,
    hybrid: Path,
    open_engine: OpenEngine,
    prompts: list[Prompt],
    expected: list[Prompt | None],
) -> None:
    engine = open_engine(
        pool.address, changed={"model": str(hybrid)}, transport="auto+faults:lose=0.02,corrupt=0.02,seed=6"
    )
    for _ in range(40):
        answer = engine.generate(prompts, max_tokens=OUTPUT)
        assert answer.tokens == expected
        engine.settle()
        engine.forget()
        found = engine.counters()
        if 0 < found["load_tokens"] < found["load_tokens_asked"]:
            break
    else:
        raise AssertionError(f"nothing failed, or all: the test shows nothing: {found}")


def test_preempted_requests_with_windows_say_the_same(
    pool: RealPool, hybrid: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    prompts = draw(6, seed=71, length=6 * BLOCK + 3)
    model = {"model": str(hybrid)}
    plain = VllmEngine(tmp_path / "plain.log", arguments(hybrid, enable_prefix_caching=False))
    expected = [plain.generate([prompt], max_tokens=OUTPUT).tokens[0] for prompt in prompts]
    plain.end()
    engine = open_engine(pool.address, changed=model | FEW_BLOCKS)
    for _ in range(3):  # computed; from the pool, in part; from the pool
        assert engine.generate(prompts, max_tokens=OUTPUT).tokens == expected
        engine.settle()
        engine.forget()
    found = engine.metrics()
    assert found[PREEMPTIONS] > 0 and found["vllm:external_prefix_cache_hits"] > 0, found
