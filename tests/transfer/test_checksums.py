"""Checksums of many blocks at once are those of each, in pieces or whole."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import xxhash

from kvstrata.transfer.checksums import block_checksum, checksums
from kvstrata.transfer.compact import PIECE_BYTES_MIN
from kvstrata.transfer.regions import BlockView, Region


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.bytes = np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_checksums_of_a_call_are_those_of_its_blocks(count: int, pieces: int) -> None:
    memory = Memory(4096)
    rng = np.random.default_rng(count)
    table = np.stack([rng.integers(0, 4000, (count, pieces)), rng.integers(1, 96, (count, pieces))], axis=2)
    view = BlockView(cast(Region, memory), table, pieces * PIECE_BYTES_MIN)  # too large to be put together first
    found = checksums(view)
    assert found.dtype == np.uint64 and found.shape == (count,)
    for at in range(count):
        whole = b"".join(memory.bytes[start : start + length].tobytes() for start, length in table[at].tolist())
        assert int(found[at]) == block_checksum(view, at) == xxhash.xxh3_64_intdigest(whole)
