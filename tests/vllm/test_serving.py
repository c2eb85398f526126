"""Two OpenAI servers of vLLM on one pool, asked by the ``openai`` client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.real_pool import RealPool
from tests.vllm.engine import BLOCK, transfer
from tests.vllm.server import ApiServer
from tests.waiting import until

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "prefix_caching_hash_algo": "sha256_cbor",
    "enable_prompt_tokens_details": True,
    "shutdown_timeout": 20,
}
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
STORY = "The cache of a block is a prefix of the next one. " * 8


@pytest.fixture(scope="module")
def servers(pool: RealPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ApiServer]]:
    folder = tmp_path_factory.mktemp("servers")
    options = OPTIONS | {"kv_transfer_config": transfer(pool.address)}
    started: list[ApiServer] = []
    try:
        for number in range(2):
            started.append(ApiServer(folder / f"server{number}.log", model, options))
        yield started
    finally:
        for server in started:
            server.end()


def streamed(server: ApiServer, content: str) -> tuple[str, int]:
    """The text, and the prompt tokens that were not computed."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60)
    text, cached = "", 0
    for part in client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += part.choices[0].delta.content or "" if part.choices else ""
        if part.usage is not None and part.usage.prompt_tokens_details is not None:
            cached = part.usage.prompt_tokens_details.cached_tokens or 0
    client.close()
    return text, cached


def test_the_second_server_streams_from_what_the_first_computed(pool: RealPool, servers: list[ApiServer]) -> None:
    first, second = servers
    text, cached = streamed(first, STORY)
    assert text and cached == 0
    until(lambda: streamed(first, STORY)[0] == text)
    stored = "kvstrata:connector_store_blocks_total"
    until(lambda: first.metric(stored) >= len(STORY) // BLOCK, seconds=20)
    again, cached = streamed(second, STORY)
    assert again == text
    assert cached >= len(STORY) // BLOCK * BLOCK
    assert second.metric(EXTERNAL_HITS) == cached


def test_a_conversation_moves_between_the_servers(servers: list[ApiServer]) -> None:
    content = "Once upon a time there was a pool. " * 6
    for turn in range(4):
        hits = servers[turn % 2].metric(EXTERNAL_HITS)
        text, _ = streamed(servers[turn % 2], content)
        if turn:
            assert servers[turn % 2].metric(EXTERNAL_HITS) > hits, f"turn {turn} was computed from its beginning"
        content += text + "And then? " * 12


def test_a_server_ends_well(servers: list[ApiServer]) -> None:
    for server in servers:
        assert server.stop() in (0, -15), server.log()[-3000:]
        # vLLM's own processes may complain about each other; none of the complaints may come from the connector.
        assert "engine_adapter/" not in server.log(), server.log()[-6000:]
