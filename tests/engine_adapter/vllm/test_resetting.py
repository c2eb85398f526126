"""A reset of vLLM's caches, as the settings say what becomes of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvstrata.engine_adapter.connector.access import PoolAccess
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.lookup_server import LookupServer
from kvstrata.engine_adapter.connector.presence import answer_lookup
from kvstrata.engine_adapter.connector.stored_groups import stored_groups
from kvstrata.engine_adapter.vllm import resetting
from kvstrata.engine_adapter.vllm.identity import Identity, weights_digest
from kvstrata.engine_adapter.vllm.layout import make_layout, rank_shards
from kvstrata.engine_adapter.vllm.resetting import reset_cache
from kvstrata.engine_adapter.vllm.settings import read_settings
from kvstrata.proto.errors import InvalidArgument, Unavailable
from tests.engine_adapter.connector.scripted_client import FULL, STATE, WAIT_S, layout
from tests.engine_adapter.vllm.stand_ins import (
    CacheGroup,
    FullAttentionSpec,
    KVCacheConfig,
    UniformTypeKVCacheSpecs,
    for_the_scheduler,
)


class Planner:
    resets = 0

    def reset(self) -> None:
        self.resets += 1


class NoPool:
    """A rank's pool, of which nothing but the layout is asked."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout

    def lookup(self, salt: str, group: int, hashes: bytes, request: str = "") -> None:
        raise AssertionError("nobody asks for blocks")

    def prefetch(self, salt: str, group: int, hashes: bytes) -> None:
        raise AssertionError("nobody asks for blocks")


class Masters:
    """What was asked of them; ``away``: nobody answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.away = False

    def begin_epochs(self, masters: str, groups: Sequence[str], access: PoolAccess) -> None:
        if self.away:
            raise Unavailable("no master answers")
        self.asked.append((masters, list(groups)))


@pytest.fixture
def masters(monkeypatch: pytest.MonkeyPatch) -> Masters:
    made = Masters()
    monkeypatch.setattr(resetting, "begin_epochs", made.begin_epochs)
    return made


STARTED = layout(FULL, STATE)


def stored() -> list[str]:
    return [FULL.fingerprint]


def reset(
    planner: Planner,
    now: Callable[[], PoolLayout] = lambda: STARTED,
    stored: Callable[[], Sequence[str]] = stored,
    **extra: object,
) -> bool:
    return reset_cache(read_settings({"masters": "pool:1", **extra}), STARTED, now, planner, stored)


def of(folder: Path) -> PoolLayout:
    """As an engine makes it anew: its fingerprint is of what the model's files hold by then."""
    return layout(msgspec.structs.replace(FULL, fingerprint=weights_digest(folder)), STATE)


def test_without_a_word_of_weights_it_is_refused_and_the_log_says_both_remedies(
    masters: Masters, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner()
    assert not reset(planner)
    assert "fixed_weights" in caplog.text and "reset_external" in caplog.text
    assert not masters.asked and not planner.resets


def test_with_fixed_weights_it_succeeds_and_the_pool_stays_as_it_is(masters: Masters) -> None:
    planner = Planner()
    assert reset(planner, fixed_weights=True)
    assert not masters.asked and not planner.resets


def test_with_reset_external_the_next_epoch_begins_and_a_pool_that_is_away_fails_it(masters: Masters) -> None:
    planner = Planner()
    assert reset(planner, reset_external=True)
    assert masters.asked == [("pool:1", [FULL.fingerprint])] and planner.resets == 1
    masters.away = True
    assert not reset(planner, reset_external=True)
    assert planner.resets == 1


def test_fixed_weights_are_not_believed_where_the_model_s_files_have_changed_or_are_gone(
    masters: Masters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planner, settings = Planner(), read_settings({"masters": "pool:1", "fixed_weights": True})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    started = of(tmp_path)
    assert reset_cache(settings, started, lambda: of(tmp_path), planner, stored)
    weights.write_bytes(b"new")
    assert not reset_cache(settings, started, lambda: of(tmp_path), planner, stored)
    assert "others than at the start" in caplog.text
    assert not reset_cache(settings, started, lambda: of(tmp_path / "gone"), planner, stored)
    assert "cannot be read" in caplog.text
    assert not masters.asked and not planner.resets


def test_what_ends_is_what_was_stored_also_when_the_model_s_files_have_changed(masters: Masters) -> None:
    now = layout(msgspec.structs.replace(FULL, fingerprint="of the new files"), STATE)
    assert reset(Planner(), lambda: now, reset_external=True)
    assert masters.asked == [("pool:1", [FULL.fingerprint])]


def uniform(*heads: int) -> KVCacheConfig:
    """One group, whose layers have so many KV heads."""
    specs = {f"layer{i}": FullAttentionSpec(page_size_bytes=64 * n, num_kv_heads=n) for i, n in enumerate(heads)}
    return KVCacheConfig([CacheGroup(list(specs), UniformTypeKVCacheSpecs(specs))])


def layout_of(config: KVCacheConfig, kv_shards: int = 0) -> PoolLayout:
    identity = Identity(model="m", kv="float32/auto/cpu", hashes="vllm 0.32/sha256_cbor")
    return make_layout(config, identity, hash_bytes=32, tensor_parallel=1, kv_shards=kv_shards)


def test_of_layers_that_differ_in_size_what_the_ranks_store_ends_not_what_the_scheduler_would_call_it(
    masters: Masters, tmp_path: Path
) -> None:
    config, planner, endpoint = uniform(4, 2), Planner(), f"ipc://{tmp_path}/lookups"
    scheduler, rank = layout_of(for_the_scheduler(config)), layout_of(config)
    settings = read_settings({"masters": "pool:1", "reset_external": True})

    def now() -> PoolLayout:
        return layout_of(for_the_scheduler(config))

    assert not reset_cache(settings, scheduler, now, planner, partial(stored_groups, endpoint, 0.05))
    assert not masters.asked and not planner.resets, "nobody has said what is stored"
    server = LookupServer(endpoint, partial(answer_lookup, NoPool(rank)), bound_s=WAIT_S)
    try:
        assert reset_cache(settings, scheduler, now, planner, partial(stored_groups, endpoint, WAIT_S))
    finally:
        server.close()
    assert masters.asked == [("pool:1", [rank.groups[0].fingerprint])] and planner.resets == 1
    assert "(16 tokens, 384 bytes, window 0)" in rank.groups[0].fingerprint
    fixed = read_settings({"masters": "pool:1", "fixed_weights": True})
    assert reset_cache(fixed, scheduler, now, planner, stored), "it compares what the scheduler is told, then and now"


def test_of_layers_that_differ_in_size_both_halves_count_the_same_shards_and_the_ranks_refuse_what_cannot_be_cut() -> (
    None
):
    config = uniform(4, 2)
    assert layout_of(config, 2).shards_per_rank == layout_of(for_the_scheduler(config), 2).shards_per_rank == 2
    with pytest.raises(InvalidArgument, match="the 2 KV heads of a rank cannot be cut into 4 shards"):
        rank_shards(config, 1, 4)
    assert rank_shards(for_the_scheduler(config), 1, 4) == 4, "it sees the first layer alone"
