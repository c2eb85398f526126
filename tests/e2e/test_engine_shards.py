"""Engines of different tensor-parallel size on a real pool: what one size stored, the other loads, token by token.

Sums over ranks round otherwise than sums of one rank, so KV differs in last bits with the size that computed it: tokens
are compared on prompts whose greedy tokens both sizes agree on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.proto.errors import InvalidArgument
from tests.e2e.real_engine import counters_are_zero
from tests.e2e.real_pool import RealPool
from tests.e2e.test_engine_tokens import BLOCK, Prompt, config, serve
from tests.waiting import until

#: Blocks of a prompt, and some tokens more.
WHOLE = 9
HITS_S = 60.0
Open = Callable[[EngineConfig], Engine]


def prompts_of(count: int = 4) -> list[Prompt]:
    draw = random.Random(11)
    return [[draw.randrange(256) for _ in range(WHOLE * BLOCK + 5)] for _ in range(count)]


def sized(ranks: int, model: str = "tiny", **pool: object) -> EngineConfig:
    return msgspec.structs.replace(config(model, **pool), tensor_parallel=ranks)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    """One for all: tests keep apart by their salts."""
    real = RealPool(tmp_path_factory.mktemp("pool"), nodes=2, dram="64MiB")
    yield real
    real.end()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Prompt]]:
    """Tokens of engines without a pool, by model; of both sizes the same."""
    found: dict[str, list[Prompt]] = {}
    for model in ("tiny", "tiny-swa"):
        said = []
        for ranks in (1, 2):
            engine = Engine.create(sized(ranks, model))
            said.append(serve(engine, prompts_of()))
            engine.close()
        assert said[0] == said[1], "sizes say different things: choose other prompts"
        found[model] = said[0]
    return found


def hits_all(engine: Engine, salt: str, expected: list[Prompt]) -> None:
    """All blocks of the prompts are loaded, but in passes in which a busy machine was late."""
    deadline = time.monotonic() + HITS_S
    while True:
        before = engine.stats().external_prefix_cache_hits
        assert serve(engine, prompts_of(), salt) == expected
        counters_are_zero(engine)
        if engine.stats().external_prefix_cache_hits - before == len(prompts_of()) * WHOLE * BLOCK:
            return
        assert time.monotonic() < deadline, engine.stats().connector
        assert engine.reset_prefix_cache()


@pytest.mark.parametrize("model", ["tiny", "tiny-swa"])
@pytest.mark.parametrize(
    ("writers", "readers", "options"),
    [
        (2, 1, {}),
        (1, 2, {}),
        (2, 1, {"transport": "tcp"}),
        (1, 2, {"layered_stores": True, "layered_loads": "always"}),
        (2, 1, {"layered_stores": True, "layered_loads": "always"}),
    ],
    ids=["2to1", "1to2", "2to1-tcp", "1to2-layers", "2to1-layers"],
)
def test_an_engine_of_another_size_loads_everything(
    writers: int,
    readers: int,
    options: dict[str, object],
    model: str,
    pool: RealPool,
    plain: dict[str, list[Prompt]],
    opened: Open,
) -> None:
    salt = f"{writers} {readers} {options}"
    shared = {"masters": pool.address, "kv_shards": 2, **options}
    writer = opened(sized(writers, model, **shared))
    hits_all(writer, salt, plain[model])  # it finds what it has stored itself
    reader = opened(sized(readers, model, **shared, store=False))
    hits_all(reader, salt, plain[model])


def test_blocks_of_before_are_found_by_a_smaller_engine_that_cuts_its_own(
    pool: RealPool, plain: dict[str, list[Prompt]], opened: Open
) -> None:
    """Two ranks without the option have what two shards have."""
    writer = opened(sized(2, masters=pool.address))
    hits_all(writer, "before", plain["tiny"])
    reader = opened(sized(1, masters=pool.address, kv_shards=2, store=False))
    hits_all(reader, "before", plain["tiny"])
    without = opened(sized(1, masters=pool.address))
    serve(without, prompts_of(), "before")
    assert without.stats().external_prefix_cache_hits == 0, "one rank without it has blocks of its own"


@pytest.mark.parametrize("fault", ["lose", "corrupt"])
def test_a_block_is_there_with_all_of_its_shards_or_computed(
    fault: str, pool: RealPool, plain: dict[str, list[Prompt]], opened: Open
) -> None:
    shared = {"masters": pool.address, "kv_shards": 2, "verify": "always"}
    writer = opened(sized(2, **shared))
    hits_all(writer, fault, plain["tiny"])
    reader = opened(sized(1, **shared, transport=f"auto+faults:{fault}=0.3,seed=3"))

    def asked() -> bool:
        """Something is loaded: not while a busy machine is late with its lookups."""
        assert reader.reset_prefix_cache()
        assert serve(reader, prompts_of(), fault) == plain["tiny"]
        return bool(reader.stats().connector["load_tokens_asked"])

    until(asked)
    counters_are_zero(reader)
    seen = reader.stats().connector
    assert seen["load_tokens"] < seen["load_tokens_asked"]


@pytest.mark.parametrize(("ranks", "shards"), [(1, 4), (2, 3), (2, 4)])
def test_heads_that_cannot_be_cut_are_an_error_at_the_start(ranks: int, shards: int, pool: RealPool) -> None:
    with pytest.raises(InvalidArgument, match=f"kv_shards is {shards}.*choose"):
        Engine.create(sized(ranks, masters=pool.address, kv_shards=shards))
