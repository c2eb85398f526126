"""More than one rank, and more than one connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK, VllmEngine, arguments, transfer

LENGTH = 9 * BLOCK + 7
HITS = "vllm:external_prefix_cache_hits"


def test_two_ranks_store_and_load_a_shard_each(pool: RealPool, open_engine: OpenEngine) -> None:
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    prompts = draw(4, seed=40, length=LENGTH)
    writer = open_engine(pool.address, changed=two, environment=cores)
    expected = writer.generate(prompts).tokens
    writer.settle()
    writer.end()
    reader = open_engine(pool.address, changed=two, environment=cores)
    answer = reader.generate(prompts)
    assert answer.tokens == expected
    assert answer.cached == [9 * BLOCK] * len(prompts)
    reader.settle()
    reader.end()
    failing = open_engine(
        pool.address, changed=two, environment=cores, transport="auto+faults:lose=0.5,corrupt=0.3,seed=4"
    )
    assert failing.generate(prompts).tokens == expected
    failing.settle()
    found = failing.counters()
    assert found["load_tokens"] < found["load_tokens_asked"], f"nothing failed: the test shows nothing: {found}"
    failing.end()
    # One rank has other bytes in a block: it must find nothing of theirs.
    alone = open_engine(pool.address)
    assert alone.generate(prompts).cached == [0] * len(prompts)


def multi(model: Path, *children: dict[str, Any]) -> dict[str, Any]:
    return arguments(
        model,
        disable_hybrid_kv_cache_manager=True,  # the example connector knows one group of blocks
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": list(children)},
        },
    )


def disk(folder: Path) -> dict[str, Any]:
    """vLLM's own example connector: what another store, or a prefill instance, would be."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def test_the_pool_stands_beside_another_connector(pool: RealPool, model: Path, tmp_path: Path, plain: Plain) -> None:
    prompts = draw(2, seed=42, length=LENGTH)
    expected = plain(prompts)
    engines: list[VllmEngine] = []
    try:
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        store = transfer(pool.address)
        engines.append(VllmEngine(tmp_path / "writer.log", multi(model, disk(folders[0]), store)))
        engines[0].wait_attached()
        assert engines[0].generate(prompts[:1]).tokens == expected[:1]
        engines[0].settle()
        # Its own folder is empty: only the pool can have given these.
        engines.append(VllmEngine(tmp_path / "reader.log", multi(model, disk(folders[1]), store)))
        engines[1].wait_attached()
        before = engines[1].metrics()[HITS]
        answer = engines[1].generate(prompts[:1])
        assert (answer.tokens, answer.cached) == (expected[:1], [9 * BLOCK])
        engines[1].settle()
        # And what neither has is computed, and kept by both.
        assert engines[1].generate(prompts[1:]).tokens == expected[1:]
        engines[1].settle()
        assert engines[1].metrics()[HITS] - before == 9 * BLOCK
    finally:
        for engine in engines:
            engine.end()
