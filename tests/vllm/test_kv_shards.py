"""Engines of different tensor-parallel size share blocks that are cut by heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK

LENGTH = 9 * BLOCK + 7
TWO: dict[str, Any] = {
    "changed": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


@pytest.mark.parametrize(("writing", "reading"), [(TWO, {}), ({}, TWO)], ids=["2to1", "1to2"])
def test_an_engine_of_another_size_hits_all_of_it(
    writing: dict[str, Any], reading: dict[str, Any], pool: RealPool, open_engine: OpenEngine, plain: Plain
) -> None:
    prompts = draw(3, seed=80 + len(writing), length=LENGTH)
    expected = plain(prompts)
    writer = open_engine(pool.address, kv_shards=2, **writing)
    assert writer.generate_with_pool(prompts).tokens == expected
    writer.end()
    reader = open_engine(pool.address, kv_shards=2, **reading)
    answer = reader.generate_with_pool(prompts)
    assert answer.cached == [9 * BLOCK] * len(prompts)
    assert answer.tokens == expected
    reader.settle()


def test_shards_that_heads_cannot_be_cut_into_are_refused_at_the_start(open_engine: OpenEngine) -> None:
    with pytest.raises(AssertionError, match="kv_shards is 4: the 2 KV heads of a rank cannot be cut into 4"):
        open_engine("127.0.0.1:1", kv_shards=4)
