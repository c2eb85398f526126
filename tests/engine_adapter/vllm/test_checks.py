"""Settings under which nothing would be found are refused at the start, all at once, with what to change."""

from __future__ import annotations

import pytest

from kvstrata.engine_adapter.vllm.checks import Findings, check_start
from kvstrata.proto.errors import InvalidArgument
from tests.engine_adapter.vllm.stand_ins import (
    CacheGroup,
    CacheSettings,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    ParallelSettings,
)


def check(
    cache: CacheSettings | None = None,
    parallel: ParallelSettings | None = None,
    kv: KVCacheConfig | None = None,
    failure_policy: str = "recompute",
    loads: bool = True,
    kv_shards: int = 0,
) -> Findings:
    kv = kv or KVCacheConfig([CacheGroup(["a"], FullAttentionSpec())])
    return check_start(
        cache or CacheSettings(),
        parallel or ParallelSettings(),
        kv,
        failure_policy=failure_policy,
        loads=loads,
        kv_shards=kv_shards,
    )


def test_good_settings_pass_in_silence() -> None:
    found = check()
    found.raise_refused()
    assert found == Findings()


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "of_the_future"])
def test_hashes_of_one_process_are_refused(algorithm: str) -> None:
    (text,) = check(CacheSettings(prefix_caching_hash_algo=algorithm)).refused
    assert algorithm in text and "--prefix-caching-hash-algo sha256_cbor" in text


def test_a_seeded_hash_needs_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheSettings(prefix_caching_hash_algo="xxhash_cbor")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED" in check(cache).refused[0]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert not check(cache).refused


def test_no_prefix_caching_no_pool() -> None:
    assert "--enable-prefix-caching" in check(CacheSettings(enable_prefix_caching=False)).refused[0]


def test_a_state_cannot_be_pooled() -> None:
    kv = KVCacheConfig([CacheGroup(["a"], FullAttentionSpec()), CacheGroup(["b"], MambaSpec())])
    assert "MambaSpec" in check(kv=kv).refused[0]


def test_block_sizes_must_be_multiples_of_what_is_hashed() -> None:
    kv = KVCacheConfig([CacheGroup(["a"], FullAttentionSpec(block_size=24))], hash_block_size=16)
    assert "16 tokens" in check(kv=kv).refused[0]


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = check(CacheSettings(False, "sha256"), ParallelSettings(1, 2, 2))
    with pytest.raises(InvalidArgument, match=r"prefix caching.*hash_algo.*pipeline.*decode_context"):
        found.raise_refused()


def test_a_failed_load_that_ends_a_request_is_warned_of() -> None:
    assert "recompute" in check(failure_policy="fail").warnings[0]
    assert not check(failure_policy="fail", loads=False).warnings


def test_shards_that_heads_cannot_be_cut_into_are_refused_with_the_rest() -> None:
    found = check(CacheSettings(enable_prefix_caching=False), ParallelSettings(tensor_parallel_size=2), kv_shards=3)
    assert ["--enable-prefix-caching" in found.refused[0], "kv_shards is 3" in found.refused[1]] == [True, True]
    assert not check(parallel=ParallelSettings(tensor_parallel_size=2), kv_shards=4).refused
