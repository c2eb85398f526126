"""An engine whose KV is on a device that is no host memory: a pool changes none of its tokens either.

The device is the strict stand-in, whose bits are numpy's: so tokens are held against those of an engine on the host,
and what the two store is one namespace that both load from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.model.arrays import HOST, Arrays
from kvstrata.engine_adapter.paged.ranks import worker
from tests.e2e.real_engine import counters_are_zero, settle
from tests.e2e.real_pool import RealPool
from tests.e2e.test_engine_tokens import config, conversations, serve
from tests.engine_adapter.paged.model.strict_device import StrictArrays


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    real = RealPool(tmp_path_factory.mktemp("pool"), nodes=1, dram="64MiB")
    yield real
    real.end()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[EngineConfig], Engine]]:
    def arrays_of(device: str, rank: int) -> Arrays:
        return HOST if device == "cpu" else StrictArrays()

    monkeypatch.setattr(worker, "make_arrays", arrays_of)
    engines: list[Engine] = []

    def open_engine(wanted: EngineConfig) -> Engine:
        engines.append(Engine.create(wanted))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("model", ["tiny", "tiny-swa"])
def test_what_one_stored_the_others_load(model: str, pool: RealPool, opened: Callable[[EngineConfig], Engine]) -> None:
    def engine(device: str, **pool_options: object) -> Engine:
        return opened(msgspec.structs.replace(config(model, **pool_options), device=device))

    prompts = conversations()
    expected = serve(engine("cpu"), prompts)
    first = engine("cuda", masters=pool.address)
    assert serve(first, prompts, "device") == expected
    settle(first)
    for device, options in (
        ("cuda", {"verify": "always"}),
        ("cpu", {"verify": "always"}),
        ("cuda", {"transport": "auto+faults:lose=0.5,seed=3"}),
        ("cuda", {"layered_loads": "always"}),
        ("cuda", {"layered_loads": "always", "transport": "auto+faults:corrupt=0.3,seed=3"}),
    ):
        reader = engine(device, masters=pool.address, store=False, **options)
        assert serve(reader, prompts, "device") == expected
        assert reader.stats().external_prefix_cache_hits > 0
        if model == "tiny" and "layered_loads" in options:  # loads of several groups come before the step
            assert reader.stats().connector["loads_layered"] > 0
        counters_are_zero(reader)
    counters_are_zero(first)
