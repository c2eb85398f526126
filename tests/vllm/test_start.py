"""What an engine says at its start, and which engines share nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.real_pool import RealPool
from tests.vllm.conftest import OpenEngine, draw
from tests.vllm.engine import BLOCK, VllmEngine, arguments, transfer
from tests.vllm.tiny_llama import make_model


@pytest.mark.parametrize(
    ("changed", "extra", "said"),
    [
        ({"prefix_caching_hash_algo": "sha256"}, {}, "start with --prefix-caching-hash-algo sha256_cbor"),
        ({"enable_prefix_caching": False}, {}, "start with --enable-prefix-caching"),
        ({}, {"save_decode_cash": True}, "did you mean 'save_decode_cache'?"),
    ],
)
def test_settings_under_which_nothing_would_be_found_are_refused(
    changed: dict[str, Any], extra: dict[str, Any], said: str, pool: RealPool, open_engine: OpenEngine
) -> None:
    with pytest.raises(AssertionError) as refusal:
        open_engine(pool.address, changed=changed, **extra)
    assert said in str(refusal.value)


def test_the_failure_policy_that_ends_requests_is_warned_of(pool: RealPool, model: Path, tmp_path: Path) -> None:
    configured = transfer(pool.address)
    del configured["kv_load_failure_policy"]
    engine = VllmEngine(tmp_path / "vllm.log", arguments(model, kv_transfer_config=configured))
    try:
        assert '"kv_load_failure_policy": "recompute"' in engine.log()
    finally:
        engine.end()


def test_other_weights_share_nothing_and_a_copy_shares_all(
    pool: RealPool, open_engine: OpenEngine, tmp_path: Path
) -> None:
    prompts = draw(1, seed=50, length=4 * BLOCK + 1)
    writer = open_engine(pool.address)
    said = writer.generate(prompts).tokens
    writer.settle()
    other = open_engine(pool.address, changed={"model": str(make_model(tmp_path / "other", seed=1))})
    assert other.generate(prompts).cached == [0]
    other.end()
    copy = open_engine(pool.address, changed={"model": str(make_model(tmp_path / "copy"))})
    answer = copy.generate(prompts)
    assert (answer.cached, answer.tokens) == ([4 * BLOCK], said)
