"""The pool changes no token: real engines on a real pool, compared token by token with an engine that has none.

The model's arithmetic is bit-reproducible (see docs/design.md), so equality is exact and never a matter of luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, PoolConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.request import SamplingParams
from tests.e2e.real_engine import counters_are_zero, settle
from tests.e2e.real_pool import RealPool

BLOCK = 16
OUTPUT = SamplingParams(max_tokens=6, ignore_eos=True)

Prompt = list[int]


def conversations(seed: int = 0) -> list[Prompt]:
    """Two agents of four growing turns that share a system prompt, and the prompts around block edges."""
    draw = random.Random(seed)

    def text(length: int) -> Prompt:
        return [draw.randrange(256) for _ in range(length)]

    system = text(5 * BLOCK + 3)
    prompts: list[Prompt] = []
    for _ in range(2):
        turn = system + text(37)
        for _ in range(4):
            prompts.append(turn)
            turn = turn + text(draw.randrange(20, 90))
    edges = text(2 * BLOCK)
    return prompts + [edges[:n] for n in (1, BLOCK - 1, BLOCK, BLOCK + 1)] + [edges, edges]


def config(model: str = "tiny", *, num_blocks: int = 400, longest: int = 1024, **pool: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, max_model_len=longest),
        cache=CacheConfig(block_size=BLOCK, num_blocks=num_blocks),
        step=StepConfig(max_num_batched_tokens=128, max_num_seqs=8),
        pool=msgspec.convert({"load_policy": "always", "lookup_deadline_ms": 2_000, **pool}, PoolConfig),
    )


def serve(engine: Engine, prompts: list[Prompt], salt: str = "") -> list[Prompt]:
    """One after the other, as turns of a conversation are."""
    return [engine.generate([prompt], OUTPUT, salt)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """One for all: tests keep apart by their salts."""
    real = RealPool(tmp_path_factory.mktemp("pool"), nodes=1, dram="64MiB")
    yield real
    real.end()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Prompt]]:
    """Tokens of engines with no cache at all, by model."""
    found: dict[str, list[Prompt]] = {}
    for model in ("tiny", "tiny-swa"):
        bare = config(model)
        engine = Engine.create(
            msgspec.structs.replace(bare, cache=msgspec.structs.replace(bare.cache, enable_prefix_caching=False))
        )
        found[model] = serve(engine, conversations())
        engine.close()
    return found


@pytest.mark.parametrize("model", ["tiny", "tiny-swa"])
def test_private_cache_and_pool_change_no_token(
    model: str, pool: RealPool, plain: dict[str, list[Prompt]], opened: Callable[[EngineConfig], Engine]
) -> None:
    private = opened(config(model))
    assert serve(private, conversations()) == plain[model]
    assert private.stats().prefix_cache_hits > 0

    first = opened(config(model, masters=pool.address))
    assert serve(first, conversations(), "same") == plain[model]
    settle(first)
    second = opened(config(model, masters=pool.address))
    assert serve(second, conversations(), "same") == plain[model]
    assert second.stats().external_prefix_cache_hits > 0
    counters_are_zero(first)
    counters_are_zero(second)


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("fault", ["lose", "corrupt"])
def test_failed_loads_change_no_token(
    fault: str, rate: float, pool: RealPool, plain: dict[str, list[Prompt]], opened: Callable[[EngineConfig], Engine]
) -> None:
    writer = opened(config(masters=pool.address))
    salt = f"{fault} {rate}"
    serve(writer, conversations(), salt)
    settle(writer)
    reader = opened(config(masters=pool.address, transport=f"auto+faults:{fault}={rate},seed=3"))
    assert serve(reader, conversations(), salt) == plain["tiny"]
    counters_are_zero(reader)
    seen = reader.stats().connector
    assert seen["loads"] > 0 and seen["loads_ended"] == seen["loads"]
    if rate >= 0.5:
        assert seen["load_tokens"] < seen["load_tokens_asked"]


def test_preemption_changes_no_token(pool: RealPool, opened: Callable[[EngineConfig], Engine]) -> None:
    """All requests at once, each growing by two blocks, in a cache that holds the longest one and little more."""
    prompts, growing = conversations(), SamplingParams(max_tokens=2 * BLOCK + 1, ignore_eos=True)
    expected = opened(config()).generate(prompts, growing)
    longest = max(len(prompt) for prompt in prompts) + growing.max_tokens
    few = -(-longest // BLOCK) + 4
    for masters in ("", pool.address, pool.address):
        engine = opened(config(num_blocks=few, longest=longest, masters=masters))
        assert engine.generate(prompts, growing, "preempted") == expected
        assert engine.stats().preemptions > 0
        counters_are_zero(engine)


def test_two_ranks_share_what_two_ranks_stored(pool: RealPool, opened: Callable[[EngineConfig], Engine]) -> None:
    """Each rank stores and loads its own shard; a load counts as far as both have it."""
    prompts = conversations()[:4]

    def ranks(**pool_options: object) -> Engine:
        return opened(msgspec.structs.replace(config(**pool_options), tensor_parallel=2))

    expected = serve(ranks(), prompts)
    first = ranks(masters=pool.address)
    assert serve(first, prompts, "two ranks") == expected
    settle(first)
    for transport in ("auto", "auto+faults:lose=0.5,seed=5"):
        second = ranks(masters=pool.address, transport=transport)
        assert serve(second, prompts, "two ranks") == expected
        counters_are_zero(second)
        seen = second.stats().connector
        assert (seen["load_tokens"] < seen["load_tokens_asked"]) == ("lose" in transport)
    one = opened(config(masters=pool.address))
    serve(one, prompts, "two ranks")
    assert one.stats().external_prefix_cache_hits == 0, "another number of ranks has other shards"


def test_what_is_stored_late_is_what_was_computed(pool: RealPool, opened: Callable[[EngineConfig], Engine]) -> None:
    """Stores are slow, and their requests end, are aborted or give way at once: others want their blocks. What the
    pool gets is the old bytes or nothing."""
    prompts, growing = conversations(seed=7), SamplingParams(max_tokens=2 * BLOCK + 1, ignore_eos=True)
    expected = opened(config()).generate(prompts, growing)
    longest = max(len(prompt) for prompt in prompts) + growing.max_tokens
    few = 2 * -(-longest // BLOCK) + 8  # slow stores may hold half of it
    slow = opened(config(num_blocks=few, longest=longest, masters=pool.address, transport="auto+faults:delay_ms=150"))
    for number, prompt in enumerate(prompts):
        slow.add_request(f"aborted-{number}", prompt, growing, cache_salt="late")
        slow.step()
        slow.abort(f"aborted-{number}")
    assert slow.generate(prompts, growing, "late") == expected
    counters_are_zero(slow)
    assert slow.stats().connector["store_blocks_stored"] > 0
    reader = opened(config(masters=pool.address, verify="always", store=False))
    assert reader.generate(prompts, growing, "late") == expected
    assert reader.stats().external_prefix_cache_hits > 0
