"""Time to the first token when a prefix is loaded beside the forward pass that needs it, and before it.

``python bench/layerwise.py [--rounds N] [--transport T] [--shapes MODEL:PREFIX:REST,...] [--json]``. The bundled engine
on a CPU and one node on this host. Three engines take turns at the same prompts: one that loads first and computes
then, one that does both at once, one that chooses. Medians over rounds, the median of each round's ratio, and the
ratio of the quickest ones, which other work on the machine disturbs least, and that of CPU seconds a request.
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

sys.path.insert(0, str(Path(__file__).parents[1]))
from kvstrata.engine_adapter.paged.config import CacheConfig, EngineConfig, ModelConfig, PoolConfig, StepConfig
from kvstrata.engine_adapter.paged.engine import Engine
from kvstrata.engine_adapter.paged.model.sizes import SIZES
from kvstrata.engine_adapter.paged.request import SamplingParams
from tests.e2e.real_engine import settle
from tests.e2e.real_pool import RealPool

BLOCK: Final = 16
WAYS: Final = ("never", "always", "auto")
#: As much KV to a flop as a model of some billions has: 64 KiB a token.
SIZES["kv"] = msgspec.structs.replace(
    SIZES["13m"], hidden_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=256, intermediate_size=512
)
SHAPES: Final = "13m:2048:64,13m:4096:256,100m:2048:128,kv:512:128,kv:2048:16,kv:2048:128,kv:2048:512"


def config(model: str, tokens: int, masters: str, way: str, transport: str, store: bool) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, max_model_len=tokens),
        cache=CacheConfig(block_size=BLOCK, num_blocks=2 * tokens // BLOCK + 8),
        step=StepConfig(max_num_batched_tokens=1024, max_num_seqs=4),
        pool=msgspec.convert(
            {
                "masters": masters,
                "transport": transport,
                "load_policy": "always",
                "layered_loads": way,
                "store": store,
                "lookup_deadline_ms": 5_000,
                "load_deadline_ms": 20_000,
            },
            PoolConfig,
        ),
    )


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from the request to its first token, and the token; the engine is left with nothing under way."""
    assert engine.reset_prefix_cache()
    started, first, at = time.perf_counter(), -1, 0.0
    engine.add_request("r", prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    while True:
        outputs = engine.step()
        if first < 0 and any(output.new_token_ids for output in outputs):
            first, at = outputs[0].new_token_ids[0], time.perf_counter() - started
        if any(output.finish_reason for output in outputs):
            break
        engine.wait(1.0)
    settle(engine)
    return at, first


def measure(shape: str, rounds: int, transport: str, folder: Path) -> dict[str, Any]:
    model, prefix_tokens, rest_tokens = shape.split(":")
    prefix, rest = int(prefix_tokens), int(rest_tokens)
    draw = random.Random(1)
    beginning = [draw.randrange(256) for _ in range(prefix)]
    length = prefix + rest + 2
    pool = RealPool(folder, nodes=1, dram="1GiB")
    engines: dict[str, Engine] = {}
    try:
        writer = Engine.create(config(model, length, pool.address, "never", "auto", store=True))
        for _ in range(5):  # a pool that is slow to come up has taken nothing yet
            writer.generate([[*beginning, 1]], SamplingParams(max_tokens=1))
            settle(writer)
            seen = writer.stats().connector
            if seen["store_blocks"] >= prefix // BLOCK:
                break
            writer.reset_prefix_cache()
        writer.close()
        why = {name: count for name, count in seen.items() if name.startswith("store") and count}
        assert seen["store_blocks"] >= prefix // BLOCK, f"too little was stored: {why}, pool ready {seen['pool_ready']}"
        for way in WAYS:
            engines[way] = Engine.create(config(model, length, pool.address, way, transport, store=False))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        used: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 2):
            prompt = beginning + [draw.randrange(256) for _ in range(rest)]
            tokens = set()
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                before = time.process_time()
                seconds, token = first_token_s(engines[way], prompt)
                tokens.add(token)
                if turn > 1:  # the first ones warm up
                    times[way].append(seconds)
                    used[way].append(time.process_time() - before)
            assert len(tokens) == 1, "another token"
        stats = {way: engine.stats().connector for way, engine in engines.items()}
        nbytes = stats["never"]["load_bytes"] / stats["never"]["loads"]
    finally:
        for engine in engines.values():
            engine.close()
        pool.end()
    whole, beside = stats["never"], stats["always"]
    return {
        "model": model,
        "prefix": prefix,
        "rest": rest,
        "load_mb": nbytes / 1e6,
        "load_ms": 1e3 * whole["load_seconds"] / whole["loads"],
        "compute_ms": 1e3 * rest / whole["prefill_tokens_s"],
        "waited_ms": 1e3 * beside["load_waited_seconds"] / beside["loads"],
        **{f"{way}_ms": 1e3 * statistics.median(times[way]) for way in WAYS},
        "always_to_never": statistics.median(a / b for a, b in zip(times["always"], times["never"], strict=True)),
        "auto_to_never": statistics.median(a / b for a, b in zip(times["auto"], times["never"], strict=True)),
        "quickest": min(times["always"]) / min(times["never"]),
        "cpu": statistics.median(used["always"]) / statistics.median(used["never"]),
        "auto_layered": stats["auto"]["loads_layered"] / stats["auto"]["loads"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with this
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--shapes", default=SHAPES, help="model:prefix tokens:rest tokens, comma-separated")
    parser.add_argument("--json", action="store_true", help="one JSON object a shape")
    given = parser.parse_args()
    if not given.json:
        print("model prefix  rest   MB | load ms  rest ms  waited | first, then  both  chosen ms | ratios to the first")
    for shape in given.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="kvstrata-layerwise-") as folder:
            row = measure(shape, given.rounds, given.transport, Path(folder))
        if given.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{row['model']:5s} {row['prefix']:6d} {row['rest']:5d} {row['load_mb']:5.0f} | {row['load_ms']:7.1f} "
            f"{row['compute_ms']:8.1f} {row['waited_ms']:7.1f} | {row['never_ms']:10.1f} {row['always_ms']:6.1f} "
            f"{row['auto_ms']:6.1f}    | {row['always_to_never']:9.2f}  {row['auto_to_never']:9.2f} "
            f"({row['auto_layered']:.0%} by layers); quickest {row['quickest']:.2f}, CPU {row['cpu']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
