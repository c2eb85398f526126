"""Time to the first token of a long prompt on the real vLLM: cold, from the pool, from its own cache.

``python bench/vllm_ttft.py [--tokens N] [--rounds N] [--dtype D] [--json]``, with an interpreter that has vllm (see
docs/vllm.md). Three engines on one machine, one at work at a time: one without a connector, one that stores, one that
loads. Each round has a prompt of its own; medians over rounds. The token of every engine is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import draw
from tests.vllm.engine import VllmEngine, arguments, transfer
from tests.vllm.tiny_llama import Shape, make_model

#: 12.5 million parameters and 16,384 KV values a token: as much KV to a FLOP as a model of some billions has.
SHAPE = Shape(hidden=256, layers=8, heads=4, kv_heads=4, head_dim=256, intermediate=512)
KV_VALUES = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK = 128


def measure(tokens: int, rounds: int, dtype: str, policy: str, folder: Path) -> dict[str, float]:
    """Seconds by kind, and the ratios of them."""
    prompt_bytes = tokens * KV_VALUES * ITEM_BYTES[dtype]
    model = make_model(folder / "model", SHAPE)
    wanted = arguments(
        model,
        dtype=dtype,
        block_size=BLOCK,
        max_model_len=tokens + 64,
        max_num_batched_tokens=2048,
        # Blocks held for stores are bounded by a part of the cache: what is past it would not be stored.
        kv_cache_memory_bytes=prompt_bytes * 4,
    )
    pool = RealPool(folder, nodes=1, dram=f"{int(prompt_bytes * (rounds + 1) * 1.2) >> 20}MiB")
    engines: list[VllmEngine] = []
    try:
        connected = wanted | {"kv_transfer_config": transfer(pool.address, load_policy=policy, load_deadline_ms=30_000)}
        for name, options in (("plain", wanted), ("writer", connected), ("reader", connected)):
            engines.append(VllmEngine(folder / f"{name}.log", options))
        for engine in engines[1:]:
            engine.wait_attached()
        rows = [one_round(engines, prompt) for prompt in draw(rounds + 1, seed=1, length=tokens)]
    finally:
        for engine in engines:
            engine.end()
        pool.end()
    seconds = {kind: statistics.median(row[kind] for row in rows[1:]) for kind in rows[0]}  # the first warms up
    return seconds | {
        "cold_to_external": seconds["cold"] / seconds["external"],
        "cold_to_local": seconds["cold"] / seconds["local"],
        "storing_to_cold": seconds["storing"] / seconds["cold"],
    }


def one_round(engines: list[VllmEngine], prompt: list[int]) -> dict[str, float]:
    """One prompt through all of them, each empty of it before."""
    plain, writer, reader = engines
    found: dict[str, float] = {}
    said = []
    for kind, engine in (("cold", plain), ("storing", writer), ("external", reader), ("local", reader)):
        answer = engine.generate([prompt], max_tokens=1)
        assert answer.ttft_s[0] is not None and answer.cached[0] is not None
        assert (answer.cached[0] > len(prompt) * 0.9) == (kind in ("external", "local")), (kind, answer.cached)
        found[kind] = answer.ttft_s[0]
        said.append(answer.tokens[0])
        engine.settle()
    for engine in engines:
        engine.forget()
    assert all(tokens == said[0] for tokens in said), f"the engines disagree: {said}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="float32")
    parser.add_argument("--load-policy", choices=["auto", "always"], default="always")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(chosen.tokens, chosen.rounds, chosen.dtype, chosen.load_policy, Path(folder))
    if chosen.json:
        print(json.dumps(found))
        return
    for kind, value in found.items():
        print(f"{kind:20} {value:8.3f}{'' if '_to_' in kind else ' s'}")


if __name__ == "__main__":
    main()
