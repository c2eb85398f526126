"""Nodes for tests of copies; each is left quiet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.storage.copying.nodes import CopyNode, MakeNode


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[CopyNode] = []

    def one(**options: Any) -> CopyNode:
        made.append(CopyNode(tmp_path / str(len(made)), **options))
        return made[-1]

    yield one
    try:
        for each in made:
            each.assert_quiet()
    finally:
        for each in made:
            each.close()
