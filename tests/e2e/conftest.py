"""Engines that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.paged.engine import Engine


@pytest.fixture
def opened() -> Iterator[Callable[[EngineConfig], Engine]]:
    engines: list[Engine] = []

    def open_engine(wanted: EngineConfig) -> Engine:
        engines.append(Engine.create(wanted))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()
