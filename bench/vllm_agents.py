"""Agents' conversations through two ``vllm serve`` behind a client of OpenAI's, with a pool and without.

``python bench/vllm_agents.py TRACE [--sessions N] [--requests N] [--tokens N] [--json]``, with an interpreter that has
vllm and openai (see docs/vllm.md). TRACE is recorded text as for ``kvstrata replay --engine paged``; a token of the
model here is a byte of it. Requests of a session go to the two servers in turns, so that a server alone has seen every
other one. Three passes over the same requests, each on servers that start empty: one server that caches nothing says
what the tokens are; two with caches of their own; two with a pool.

Asserted: the text of every request is the same in all passes, and vLLM's and the connector's counters agree: what
requests say was cached is what own caches and the pool had, and what the pool had was loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
from openai import OpenAI

from kvstrata.cli.paged_replay.plan import Turn
from kvstrata.cli.paged_replay.simulator import cache_each, one_cache
from kvstrata.cli.paged_replay.text_trace import read_text_trace
from tests.e2e.real_pool import RealPool
from tests.vllm.engine import BLOCK, transfer
from tests.vllm.server import ApiServer
from tests.vllm.tiny_llama import Shape, make_model

#: As bench/vllm_ttft.py, a half of it: as much KV to a FLOP as a model of some billions has.
SHAPE = Shape(hidden=256, layers=4, heads=4, kv_heads=4, head_dim=256, intermediate=512)
KV_BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 4
ANSWER_TOKENS = 8
ANSWER_S = 120.0
#: Between an answer and the next request: an agent's tool runs.
THINK_S = 0.3
SERVERS = 2
HITS = "vllm:external_prefix_cache_hits_total"
OWN_HITS = "vllm:prefix_cache_hits_total"
LOADED = "kvstrata:connector_load_tokens_total"


@dataclass(frozen=True, slots=True)
class Told:
    """What a request came to: prompt tokens, those of them that were not computed, seconds to the first token."""

    text: str
    prompt: int
    cached: int
    ttft_s: float


def requests(trace: Path, sessions: int, most: int, tokens: int) -> list[Turn]:
    """Of the sessions with the most to read, at most ``most`` requests each and none longer than ``tokens``: first the
    first of all of them, then the second. ``engine`` is the server that a request goes to."""
    begun = [
        [prompt for prompt in prompts if 0 < len(prompt) <= tokens][:most]
        for prompts in ([request.prompt.encode() for request in s.requests] for s in read_text_trace(trace).sessions)
    ]
    begun = sorted((prompts for prompts in begun if len(prompts) > 1), key=lambda each: -sum(map(len, each)))[:sessions]
    in_turns = [
        (number, session, prompts[number])
        for number in range(most)
        for session, prompts in enumerate(begun)
        if number < len(prompts)
    ]
    return [
        Turn(index, session, number % SERVERS, np.frombuffer(prompt, np.uint8).astype(np.int32), ANSWER_TOKENS, THINK_S)
        for index, (number, session, prompt) in enumerate(in_turns)
    ]


def ask(server: ApiServer, prompt: str) -> Told:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=ANSWER_S)
    text, prompt_tokens, cached, first = "", 0, 0, None
    began = time.perf_counter()
    for part in client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        if part.choices and first is None:
            first = time.perf_counter() - began
        text += part.choices[0].text if part.choices else ""
        if part.usage is not None:
            prompt_tokens = part.usage.prompt_tokens
            if part.usage.prompt_tokens_details is not None:
                cached = part.usage.prompt_tokens_details.cached_tokens or 0
    client.close()
    assert first is not None, "an answer without a token"
    return Told(text, prompt_tokens, cached, first)


def one_pass(servers: Sequence[ApiServer], asked: Sequence[Turn]) -> list[Told]:
    """Every request, one after the other."""
    told = []
    for turn in asked:
        told.append(ask(servers[turn.engine % len(servers)], turn.tokens.astype(np.uint8).tobytes().decode()))
        time.sleep(turn.think_s)
    return told


@contextmanager
def servers_of(count: int, folder: Path, model: Path, options: dict[str, Any]) -> Iterator[list[ApiServer]]:
    folder.mkdir()
    started: list[ApiServer] = []
    try:
        for number in range(count):
            started.append(ApiServer(folder / f"server{number}.log", model, options))
        yield started
    finally:
        for server in started:
            server.end()


def measure(asked: Sequence[Turn], folder: Path, tokens: int) -> dict[str, Any]:
    model = make_model(folder / "model", SHAPE)
    longest = tokens + ANSWER_TOKENS + BLOCK
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": longest,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 4 * longest * KV_BYTES,
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_prompt_tokens_details": True,
    }
    with servers_of(1, folder / "plain", model, options | {"no_enable_prefix_caching": True}) as servers:
        plain = one_pass(servers, asked)
    with servers_of(SERVERS, folder / "private", model, options) as servers:
        private = one_pass(servers, asked)
    tokens_asked = sum(len(turn.tokens) for turn in asked)
    pool_bytes = tokens_asked * KV_BYTES + (64 << 20)
    pool = RealPool(folder, nodes=1, dram=f"{pool_bytes >> 20}MiB")
    try:
        connected = options | {"kv_transfer_config": transfer(pool.address)}
        with servers_of(SERVERS, folder / "pooled", model, connected) as servers:
            pooled = one_pass(servers, asked)
            counted = {name: sum(server.metric(name) for server in servers) for name in (HITS, OWN_HITS, LOADED)}
    finally:
        pool.end()
    for other, name in ((private, "with caches of their own"), (pooled, "with the pool")):
        wrong = [at for at, (one, two) in enumerate(zip(plain, other, strict=True)) if one.text != two.text]
        assert not wrong, f"requests {wrong} say something else {name}"
    cached = sum(one.cached for one in pooled)
    assert counted[HITS] + counted[OWN_HITS] == cached, (counted, cached)
    assert counted[LOADED] == counted[HITS], counted
    return {
        "requests": len(asked),
        "prompt_tokens": sum(one.prompt for one in plain),
        "hit_rate_private": rate(private),
        "hit_rate_pool": rate(pooled),
        "hit_rate_ceiling_private": int(cache_each(asked, BLOCK).sum()) / tokens_asked,
        "hit_rate_ceiling_pool": int(one_cache(asked, BLOCK).sum()) / tokens_asked,
        "external_hit_tokens": counted[HITS],
        "ttft_s_plain": ttft(plain),
        "ttft_s_private": ttft(private),
        "ttft_s_pool": ttft(pooled),
        "ttft_mean_private_to_pool": mean(private) / mean(pooled),
    }


def rate(told: Sequence[Told]) -> float:
    return sum(one.cached for one in told) / sum(one.prompt for one in told)


def ttft(told: Sequence[Told]) -> float:
    return statistics.median(one.ttft_s for one in told)


def mean(told: Sequence[Told]) -> float:
    return statistics.fmean(one.ttft_s for one in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--requests", type=int, default=8, help="of a session, at most")
    parser.add_argument("--tokens", type=int, default=8192, help="longer prompts are left out")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    asked = requests(chosen.trace, chosen.sessions, chosen.requests, chosen.tokens)
    if not asked:
        parser.error(f"{chosen.trace} has no session of two prompts that are short enough")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder), chosen.tokens)
    if chosen.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")


if __name__ == "__main__":
    main()
