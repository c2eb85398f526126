"""How long after a step its blocks are in the pool: stored beside the step, layer by layer, and after it.

``python bench/layered_stores.py [--rounds N] [--transports shm,tcp,rdma-cma] [--shapes MODEL:TOKENS,...] [--json]``.
The bundled engine on a CPU and one node on this host. Two engines take turns at prompts of their own, which nobody
has. Medians over rounds: milliseconds of the step, and from its end until the store has ended; CPU milliseconds of a
request in the engine and in the node; and the median of each round's ratio of all of the time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from layerwise import config
from transfer_idle import cpu_s

from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.request import SamplingParams
from tests.e2e.real_engine import settle
from tests.e2e.real_pool import RealPool

WAYS: Final = ("after", "beside")
FIELDS: Final = ("step_ms", "to_stored_ms", "engine_cpu_ms", "node_cpu_ms")
SHAPES: Final = "kv:512,kv:1024,100m:1024"
WARM_UP: Final = 3


def engine(model: str, tokens: int, masters: str, transport: str, way: str) -> Engine:
    plain = config(model, tokens + 2, masters, "never", transport, store=True)
    pool = msgspec.structs.replace(plain.pool, layered_stores=way == "beside")
    return Engine.create(msgspec.structs.replace(plain, pool=pool))


def one(engine: Engine, node: psutil.Process, prompt: list[int]) -> tuple[float, ...]:
    """See :data:`FIELDS`; nothing where nothing was stored."""
    assert engine.reset_prefix_cache()
    stored, spent, used = engine.stats().connector["store_blocks"], time.process_time(), cpu_s(node)
    began = time.perf_counter()
    engine.add_request("r", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while not any(output.new_token_ids for output in engine.step()):
        engine.wait(1.0)
    computed = time.perf_counter()
    settle(engine)
    ended = time.perf_counter()
    took = (computed - began, ended - computed, time.process_time() - spent, cpu_s(node) - used)
    return tuple(1e3 * s for s in took) if engine.stats().connector["store_blocks"] > stored else ()


def measure(shape: str, transport: str, rounds: int, folder: Path) -> dict[str, Any]:
    model, tokens = shape.split(":")
    options = ("--rdma", "cma") if transport.startswith("rdma") else ()
    pool = RealPool(folder, nodes=1, dram="1GiB", options=options)
    engines: dict[str, Engine] = {}
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    draw = random.Random(1)
    try:
        node = psutil.Process(pool.node().process.pid)
        for way in WAYS:
            engines[way] = engine(model, int(tokens), pool.address, transport, way)
        for turn in range(rounds + WARM_UP):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                row = one(engines[way], node, [draw.randrange(256) for _ in range(int(tokens))])
                if turn >= WARM_UP:
                    assert row, "nothing was stored"
                    found[way].append(row)
        counts = engines["beside"].stats().connector
    finally:
        for each in engines.values():
            each.close()
        pool.end()
    medians = {
        f"{way}_{name}": statistics.median(column)
        for way in WAYS
        for name, column in zip(FIELDS, zip(*found[way], strict=True), strict=True)
    }
    whole = [sum(beside[:2]) / sum(after[:2]) for after, beside in zip(found["after"], found["beside"], strict=True)]
    return {
        "model": model,
        "tokens": int(tokens),
        "transport": transport,
        "store_mb": counts["store_bytes"] / counts["stores_ended"] / 1e6,
        "layered": counts["stores_layered"] / counts["stores_ended"],
        **medians,
        "whole": statistics.median(whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with this
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", default="shm,tcp,rdma-cma")
    parser.add_argument("--shapes", default=SHAPES, help="model:tokens, comma-separated")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    given = parser.parse_args()
    if not given.json:
        print("model tokens  MB  transport | way     step ms  to stored ms  CPU ms: engine  node | all of it, to after")
    for shape in given.shapes.split(","):
        for transport in given.transports.split(","):
            with tempfile.TemporaryDirectory(prefix="kvstrata-stores-") as folder:
                row = measure(shape, transport, given.rounds, Path(folder))
            if given.json:
                print(json.dumps(row), flush=True)
                continue
            head = f"{row['model']:5s} {row['tokens']:6d} {row['store_mb']:4.0f} {transport:9s}"
            for way in WAYS:
                step, stored, engine_cpu, node_cpu = (row[f"{way}_{name}"] for name in FIELDS)
                tail = f"{row['whole']:.2f} ({row['layered']:.0%} by layers)" if way == "beside" else ""
                numbers = f"{step:8.1f} {stored:13.1f} {engine_cpu:15.1f} {node_cpu:5.1f}"
                print(f"{head} | {way:6s} {numbers} | {tail}", flush=True)


if __name__ == "__main__":
    main()
