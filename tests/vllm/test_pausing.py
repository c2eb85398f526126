"""vLLM clears its caches to pause and to sleep, the connector's too: what becomes of the pool, and of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, Plain, draw
from tests.vllm.engine import BLOCK, Prompt, VllmEngine, transfer
from tests.vllm.server import ApiServer
from tests.vllm.tiny_llama import make_model
from tests.waiting import until

BLOCKS = 4
REFUSED = "Failed to reset the KV connector cache."  #: vLLM's words


def cached_from_pool(engine: VllmEngine, prompts: list[Prompt]) -> int | None:
    engine.forget()
    return engine.generate_with_pool(prompts).cached[0]


@pytest.mark.parametrize(("extra", "problem"), [({}, REFUSED), ({"fixed_weights": True}, "")])
def test_a_pause_leaves_the_pool_as_it_is_and_works_where_weights_are_fixed(
    open_engine: OpenEngine, pool: RealPool, plain: Plain, extra: dict[str, Any], problem: str
) -> None:
    prompts = draw(1, seed=40 + len(extra), length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, **extra)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    assert [engine.pause(), engine.pause()] == [problem] * 2
    again = engine.generate_with_pool(prompts)
    assert again.tokens == plain(prompts) and again.cached == [BLOCKS * BLOCK]


def test_a_pause_for_new_weights_ends_what_is_in_the_pool_and_goes_on_with_it(
    open_engine: OpenEngine, pool: RealPool, plain: Plain
) -> None:
    prompts = draw(1, seed=42, length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, reset_external=True)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    assert engine.pause() == ""
    again = engine.generate(prompts)  # the pool is away until its namespaces are opened anew, or has nothing
    assert again.tokens == plain(prompts) and again.cached == [0]
    engine.settle()
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)


def test_a_pause_ends_what_was_stored_before_the_model_s_files_were_replaced(
    open_engine: OpenEngine, pool: RealPool, plain: Plain, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    prompts = draw(1, seed=43, length=BLOCKS * BLOCK + 1)
    engine = open_engine(pool.address, changed={"model": str(folder)}, reset_external=True)
    until(lambda: cached_from_pool(engine, prompts) == BLOCKS * BLOCK, 60)
    make_model(folder, seed=1)
    assert engine.pause() == ""
    again = engine.generate(prompts)  # the engine itself has not loaded them
    assert again.tokens == plain(prompts) and again.cached == [0]


def test_a_pause_with_fixed_weights_fails_where_the_model_s_files_are_others(
    open_engine: OpenEngine, pool: RealPool, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model")
    engine = open_engine(pool.address, changed={"model": str(folder)}, fixed_weights=True)
    assert engine.pause() == ""
    make_model(folder, seed=1)
    assert engine.pause() == REFUSED


@pytest.fixture
def server(pool: RealPool, tmp_path: Path) -> Iterator[ApiServer]:
    """With fixed weights; its model is a folder of its own."""
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_prompt_tokens_details": True,
        "kv_transfer_config": transfer(pool.address, fixed_weights=True),
    }
    started = ApiServer(tmp_path / "server.log", make_model(tmp_path / "model"), options, {"VLLM_SERVER_DEV_MODE": "1"})
    yield started
    started.end()


def test_a_server_pauses_while_it_stores_and_loads_from_the_pool_when_it_goes_on(
    server: ApiServer, tmp_path: Path
) -> None:
    """Its core is a process of its own, which waits for stores under way before it clears its caches."""
    (prompt,) = draw(1, seed=44, length=BLOCKS * BLOCK + 1)

    def said() -> tuple[str, int]:
        answer = post(server, "/v1/completions", model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def again() -> tuple[str, int]:
        assert post(server, "/pause") == {"status": "paused"}
        assert post(server, "/resume") == {"status": "resumed"}
        return said()

    text, _ = said()
    until(lambda: again() == (text, BLOCKS * BLOCK), 60)
    make_model(tmp_path / "model", seed=1)
    refused = httpx.post(f"{server.url}/pause", timeout=60)
    assert refused.status_code == 500 and REFUSED in refused.text
    assert "others than at the start" in server.log()
    assert post(server, "/resume") == {"status": "resumed"} and said()[0] == text


def post(server: ApiServer, path: str, **body: object) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body or None, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
