"""Tests on the real vLLM. They need it installed and take minutes: ``./dev test --vllm`` runs them."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.engine import Prompt, VllmEngine, arguments, transfer
from tests.vllm.tiny_llama import make_model

ASKED = os.environ.get("KVSTRATA_VLLM") == "1"
OpenEngine = Callable[..., VllmEngine]
Plain = Callable[..., list[Prompt]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if ours and ASKED and importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("KVSTRATA_VLLM=1, but vllm is not installed here: ./dev test --vllm installs it")
    for item in ours:
        item.add_marker(pytest.mark.timeout(600))
        if not ASKED:
            item.add_marker(pytest.mark.skip(reason="real vLLM: ./dev test --vllm"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """Greedy tokens of an engine that caches nothing: what every other engine must say too."""
    engine = VllmEngine(tmp_path_factory.mktemp("plain") / "vllm.log", arguments(model, enable_prefix_caching=False))

    def tokens(prompts: list[Prompt], max_tokens: int = 8) -> list[Prompt]:
        found = [engine.generate([prompt], max_tokens).tokens[0] for prompt in prompts]
        return [row for row in found if row is not None]

    yield tokens
    engine.end()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    real = RealPool(tmp_path_factory.mktemp("pool"), nodes=1, dram="128MiB")
    yield real
    real.end()


@pytest.fixture(scope="module")
def open_shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenEngine]:
    """As ``open_engine``, for engines that the tests of a module share."""
    yield from _opener(model, tmp_path_factory.mktemp("engines"))


@pytest.fixture
def open_engine(model: Path, tmp_path: Path) -> Iterator[OpenEngine]:
    """``open_engine(masters, changed={...}, **extra)``: an engine on a pool, ended with the test.

    ``attached=False``: there is no pool to wait for."""
    yield from _opener(model, tmp_path)


def _opener(model: Path, folder: Path) -> Iterator[OpenEngine]:
    engines: list[VllmEngine] = []

    def open_engine(
        masters: str,
        *,
        changed: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        attached: bool = True,
        **extra: Any,
    ) -> VllmEngine:
        wanted = arguments(model, kv_transfer_config=transfer(masters, **extra)) | (changed or {})
        engines.append(VllmEngine(folder / f"vllm{len(engines)}.log", wanted, environment))
        if attached:
            engines[-1].wait_attached()
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.end()


def draw(count: int, seed: int, length: int = 200, shared: int = 0) -> list[Prompt]:
    """Random prompts of ``length`` tokens, the first ``shared`` of which they all have."""
    source = random.Random(seed)
    common = [source.randrange(3, 2048) for _ in range(shared)]
    return [common + [source.randrange(3, 2048) for _ in range(length - shared)] for _ in range(count)]
