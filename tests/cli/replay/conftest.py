"""Small traces on disk and in memory, and a pool that is a dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstrata.cli.replay.messages import Setup
from kvstrata.client.results import NO_TIER, LoadResult
from kvstrata.proto.errors import Unavailable
from kvstrata.proto.keys import Namespace, split_hashes
from kvstrata.proto.status import BlockStatus
from kvstrata.transfer.regions import BlockView, Region, flat_bytes


class DictClient:
    """The client's face over a dict of rows; tests break it in the ways a pool can break."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], bytes] = {}
        self.stores: list[tuple[bytes | None, int, int]] = []
        self.down = False
        self.masterless = False
        self.rebuilding = False
        self.hidden: set[bytes] = set()
        self.lost: set[bytes] = set()

    def namespace(self, group: str, **parts: int) -> Namespace:
        return Namespace(group, **parts).validated()

    def allocate(self, nbytes: int) -> Region:
        memory = np.zeros(nbytes, dtype=np.uint8)
        return Region(flat_bytes(memory), memory)

    def lookup(self, namespace: Namespace, salt: str, hashes: bytes) -> SimpleNamespace:
        self._up()
        names = list(split_hashes(hashes, 16))
        present = np.array([(salt, name) in self.rows and name not in self.hidden for name in names], dtype=bool)
        hit_blocks = len(names) if present.all() else int(present.argmin())
        if self.masterless:
            nothing = np.zeros(len(names), dtype=bool)
            return SimpleNamespace(present=nothing, hit_blocks=0, answered=False, reasons={"node_lost": len(names)})
        return SimpleNamespace(
            present=present, hit_blocks=None if self.rebuilding else hit_blocks, answered=True, reasons={}
        )

    def load(self, namespace: Namespace, salt: str, hashes: bytes, blocks: BlockView) -> LoadResult:
        self._up()
        names = list(split_hashes(hashes, 16))
        loaded = np.array([(salt, name) in self.rows and name not in self.lost for name in names], dtype=bool)
        for position in np.flatnonzero(loaded):
            start = int(blocks.table[position, 0, 0])
            row = np.frombuffer(self.rows[salt, names[position]], dtype=np.uint8)
            blocks.region.bytes[start : start + len(row)] = row
        status = np.where(loaded, BlockStatus.LOADED, BlockStatus.NODE_LOST).astype(np.uint8)
        return LoadResult.of(status, np.where(loaded, 0, NO_TIER).astype(np.uint8), 0.0, 0)

    def store(
        self, namespace: Namespace, salt: str, hashes: bytes, blocks: BlockView, parent: bytes | None, first_index: int
    ) -> SimpleNamespace:
        self._up()
        names = list(split_hashes(hashes, 16))
        self.stores.append((parent, first_index, len(names)))
        status = np.full(len(names), BlockStatus.STORED, dtype=np.uint8)
        for position, name in enumerate(names):
            start = int(blocks.table[position, 0, 0])
            if (salt, name) in self.rows:
                status[position] = BlockStatus.ALREADY_PRESENT
            self.rows[salt, name] = bytes(blocks.region.bytes[start : start + namespace.block_bytes])
        return SimpleNamespace(stored=np.ones(len(names), dtype=bool), status=status)

    def _up(self) -> None:
        if self.down:
            raise Unavailable("the pool is down")


@pytest.fixture
def pool() -> DictClient:
    return DictClient()


@pytest.fixture
def setup() -> Setup:
    return Setup(
        engine=0,
        masters="",
        group="test",
        block_bytes=100,
        block_tokens=16,
        private_blocks=8,
        staging_blocks=4,
        settle_s=0.01,
    )


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Write records (or raw text) as lines of a trace file."""

    def write(lines: Iterable[dict[str, Any] | str], name: str = "small.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write
