"""What one vLLM computed, another loads, and says the same tokens as one that caches nothing."""

from __future__ import annotations

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK, Prompt, VllmEngine

SHARED = 20 * BLOCK
LENGTH = SHARED + 50
#: Until a fault was seen, at one in a hundred.
ROUNDS = 40
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"


@pytest.fixture(scope="module")
def writer(pool: RealPool, open_shared: OpenEngine) -> VllmEngine:
    return open_shared(pool.address)


@pytest.fixture(scope="module")
def reader(pool: RealPool, open_shared: OpenEngine) -> VllmEngine:
    return open_shared(pool.address)


def stored(writer: VllmEngine, prompts: list[Prompt], salt: str = "") -> None:
    """Computed by the writer, and in the pool."""
    for prompt in prompts:
        writer.generate([prompt], max_tokens=1, salt=salt)
    writer.settle()


def external_hits(engine: VllmEngine) -> float:
    return engine.metrics()[EXTERNAL_HITS]


def test_the_second_engine_loads_the_prefix_and_says_the_same(
    writer: VllmEngine, reader: VllmEngine, plain: Plain
) -> None:
    prompts = draw(3, seed=1, length=LENGTH, shared=SHARED)
    expected = plain(prompts)
    assert writer.generate(prompts[:1]).tokens == expected[:1]
    writer.settle()
    before = external_hits(reader)
    first = reader.generate(prompts[:1])
    assert first.tokens == expected[:1]
    assert first.cached == [LENGTH // BLOCK * BLOCK]
    assert external_hits(reader) - before == LENGTH // BLOCK * BLOCK
    rest = reader.generate(prompts[1:])
    assert rest.tokens == expected[1:]
    assert rest.cached == [SHARED, SHARED]
    reader.settle()


def test_a_whole_prompt_of_blocks_is_loaded_but_for_its_last_token(
    writer: VllmEngine, reader: VllmEngine, plain: Plain
) -> None:
    (prompt,) = draw(1, seed=2, length=8 * BLOCK)
    stored(writer, [prompt])
    answer = reader.generate([prompt])
    assert answer.tokens == plain([prompt])
    assert answer.cached[0] is not None and 7 * BLOCK <= answer.cached[0] < 8 * BLOCK
    reader.settle()


def test_answers_are_shared_too(writer: VllmEngine, reader: VllmEngine, plain: Plain) -> None:
    (prompt,) = draw(1, seed=3, length=3 * BLOCK)
    (generated,) = writer.generate([prompt], max_tokens=2 * BLOCK + 1).tokens
    assert generated is not None
    writer.settle()
    asked = [prompt + generated + [7, 8, 9]]
    answer = reader.generate(asked)
    assert answer.cached == [5 * BLOCK]
    assert answer.tokens == plain(asked)


def test_many_requests_at_once_share_one_prefix(writer: VllmEngine, reader: VllmEngine, plain: Plain) -> None:
    prompts = draw(8, seed=4, length=LENGTH, shared=SHARED)
    expected = plain(prompts)
    stored(writer, prompts[:1])
    answer = reader.generate(prompts)
    assert answer.tokens == expected
    assert all(cached is not None and cached >= SHARED for cached in answer.cached)
    reader.settle()


def test_a_cache_salt_separates(writer: VllmEngine, reader: VllmEngine, plain: Plain) -> None:
    prompts = draw(1, seed=5, length=LENGTH)
    expected = plain(prompts)
    stored(writer, prompts, salt="tenant-a")
    for other in ("", "tenant-b"):
        answer = reader.generate(prompts, salt=other)
        assert (answer.cached, answer.tokens) == ([0], expected)
    answer = reader.generate(prompts, salt="tenant-a")
    assert (answer.cached, answer.tokens) == ([LENGTH // BLOCK * BLOCK], expected)
    reader.settle()


def test_prompt_tokens_are_counted_by_their_source(writer: VllmEngine, reader: VllmEngine) -> None:
    prompts = draw(1, seed=6, length=LENGTH)
    stored(writer, prompts)
    before = reader.metrics()
    reader.generate(prompts)
    reader.settle()
    after = reader.metrics()
    name = "vllm:prompt_tokens_by_source{source=%s}"
    moved = {source: after[name % source] - before.get(name % source, 0.0) for source in ("external_kv_transfer",)}
    assert moved == {"external_kv_transfer": LENGTH // BLOCK * BLOCK}


def test_vllm_and_the_connector_count_the_same(writer: VllmEngine, reader: VllmEngine) -> None:
    prompts = draw(3, seed=9, length=LENGTH)
    stored(writer, prompts)
    reader.generate(prompts)
    reader.settle()
    counters, metrics = reader.counters(), reader.metrics()
    assert counters["load_tokens"] == counters["chosen_tokens"] == metrics[EXTERNAL_HITS]
    assert counters["load_tokens"] == metrics["vllm:prompt_tokens_by_source{source=external_kv_transfer}"]


@pytest.mark.parametrize("faults", ["lose=0.01,corrupt=0.01", "lose=0.25,corrupt=0.25", "lose=1", "corrupt=1"])
def test_loads_that_fail_cost_time_and_no_answer(
    faults: str, writer: VllmEngine, pool: RealPool, open_engine: OpenEngine, plain: Plain
) -> None:
    prompts = draw(6, seed=7, length=LENGTH, shared=SHARED // 2)
    expected = plain(prompts)
    stored(writer, prompts)
    engine = open_engine(pool.address, transport=f"auto+faults:{faults},seed=3", role="kv_consumer")
    for _ in range(ROUNDS):
        assert engine.generate(prompts[:3]).tokens == expected[:3]
        for prompt, tokens in zip(prompts[3:], expected[3:], strict=True):
            assert engine.generate([prompt]).tokens == [tokens]
        engine.settle()
        engine.forget()
        found = engine.counters()
        blocks = {name: found.get(f"load_blocks_{name}", 0.0) for name in ("loaded", "node_lost", "corrupt")}
        if blocks["node_lost"] + blocks["corrupt"] > 0:
            break
    else:
        raise AssertionError(f"nothing failed: the test shows nothing: {found}")
    assert (blocks["loaded"] == 0) == faults.endswith("=1"), found
    engine.stop()


def test_an_engine_whose_loads_all_failed_stores_nothing_wrong(
    pool: RealPool, reader: VllmEngine, open_engine: OpenEngine, writer: VllmEngine, plain: Plain
) -> None:
    prompts = draw(2, seed=8, length=LENGTH)
    expected = plain(prompts)
    stored(writer, prompts)
    failing = open_engine(pool.address, transport="auto+faults:lose=0.5,corrupt=0.5,seed=5")
    assert failing.generate(prompts, max_tokens=2 * BLOCK).tokens[0] is not None
    failing.settle()
    answer = reader.generate(prompts)
    assert answer.tokens == expected
    reader.settle()
