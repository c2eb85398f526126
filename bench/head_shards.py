"""What cutting blocks by heads costs: one rank's stores and loads through a pool, whole and in ``kv_shards`` shards.

The layout has tokens before heads (the bundled engine's), or, with ``--heads-first``, heads before tokens, as most of
vLLM's. CPU seconds are of this process and the node. Start it with ``python bench/head_shards.py``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from kvstrata.engine_adapter.connector.base import ConnectorMeta, GroupBlocks, Job, JobKind, PoolState
from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.connector.layout import BlockPieces, EngineMemory, GroupLayout, PoolLayout
from kvstrata.engine_adapter.connector.worker_side import make_worker_side
from tests.e2e.real_pool import RealPool, until

WIDTH, TOKENS, LAYERS, HEADS, HEAD_BYTES = 16, 16, 32, 8, 256  # Llama-3.1-8B in 16 bits: 2 MiB a block
PAGE = 2 * TOKENS * HEADS * HEAD_BYTES
DEADLINE_S = 60.0


def layout_of(shards: int, blocks: int) -> PoolLayout:
    return PoolLayout(
        groups=(GroupLayout(fingerprint=f"bench/{shards}", block_tokens=TOKENS, layers=LAYERS),),
        num_blocks=blocks + 1,
        num_tensors=LAYERS,
        page_bytes=PAGE,
        parts=2,
        hash_block_tokens=TOKENS,
        hash_bytes=WIDTH,
        aligned_tokens=TOKENS,
        shard_count=shards,
        shards_per_rank=shards,
    )


def heads_first(plan: PoolLayout) -> EngineMemory:
    """The same memory, whose pages have K and V of a head together: a shard is one piece of each page."""
    memory = np.zeros(plan.memory_bytes, np.uint8)
    pages = np.arange(LAYERS, dtype=np.int64) * (plan.num_blocks * PAGE)
    size = PAGE // plan.shards_per_rank
    strides, lengths = np.full_like(pages, PAGE), np.full_like(pages, size)
    shards = tuple(BlockPieces(pages + index * size, strides, lengths) for index in range(plan.shards_per_rank))
    whole = BlockPieces(pages, strides, np.full_like(pages, PAGE)).rows(np.arange(plan.num_blocks))
    return EngineMemory(memory, (whole,), memory, (plan.layer_ends(0),), shards=(shards,))


def measure(
    pool: RealPool, shards: int, blocks: int, rounds: int, transport: str, first: bool
) -> dict[str, list[float]]:
    plan = layout_of(shards, blocks)
    config = PoolConfig(masters=pool.address, transport=transport, load_deadline_ms=int(2e3 * DEADLINE_S))
    side = make_worker_side(plan, config, engine_memory=heads_first(plan) if first else None)
    side.memory[:] = np.random.default_rng(shards).integers(0, 256, len(side.memory), np.uint8)
    node = psutil.Process(pool.node().process.pid)
    own = psutil.Process()
    found: dict[str, list[float]] = {"store_s": [], "load_s": [], "cpu_s": []}
    ids = [int(block) for block in 1 + np.random.default_rng(0).permutation(blocks)]
    try:
        until(lambda: side.take_output().pool is PoolState.READY, DEADLINE_S)
        for round_ in range(rounds + 1):
            hashes = np.random.default_rng(round_).bytes(WIDTH * blocks)
            cpu = sum(sum(process.cpu_times()[:2]) for process in (own, node))
            for kind in (JobKind.STORE, JobKind.LOAD):
                part = GroupBlocks(group=0, hashes=hashes, block_ids=ids)
                job = Job(
                    job_id=2 * round_ + kind, kind=kind, request_id="r", cache_salt=f"{shards} {transport} {first}",
                    groups=[part], deadline_s=2 * DEADLINE_S,
                )  # fmt: skip
                began = time.perf_counter()
                side.start(ConnectorMeta(loads=[job]) if kind is JobKind.LOAD else ConnectorMeta(stores=[job]))
                side.forward_ended()
                outcomes = side.take_output().outcomes
                while not outcomes:
                    assert time.perf_counter() - began < 2 * DEADLINE_S, "no outcome"
                    time.sleep(0.0005)
                    outcomes = side.take_output().outcomes
                seconds = time.perf_counter() - began
                if 0 in outcomes[0].done:
                    print(f"not counted: {outcomes[0].reasons}", file=sys.stderr)
                elif round_:  # the first touches all memory
                    found["load_s" if kind is JobKind.LOAD else "store_s"].append(seconds)
            if round_:
                found["cpu_s"].append(sum(sum(process.cpu_times()[:2]) for process in (own, node)) - cpu)
    finally:
        side.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", default="1,2,4,8")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--heads-first", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pool = RealPool(Path(folder), nodes=1, dram="1GiB")
        try:
            for shards in map(int, chosen.shards.split(",")):
                rounds = measure(pool, shards, chosen.blocks, chosen.rounds, chosen.transport, chosen.heads_first)
                size = chosen.blocks * LAYERS * PAGE
                figures = {
                    "shards": shards,
                    "store_GB_s": round(size / statistics.median(rounds["store_s"]) / 1e9, 2),
                    "load_GB_s": round(size / statistics.median(rounds["load_s"]) / 1e9, 2),
                    "cpu_s_GiB": round(statistics.median(rounds["cpu_s"]) / size * (1 << 30), 2),
                }
                print(msgspec.json.encode(figures).decode(), flush=True)
        finally:
            pool.end()


if __name__ == "__main__":
    main()
