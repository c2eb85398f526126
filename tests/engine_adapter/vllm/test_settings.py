"""Settings: known keys, right types, and what they become for the core."""

from __future__ import annotations

import pytest

from kvstrata.engine_adapter.vllm.settings import Settings, read_settings
from kvstrata.proto.errors import InvalidArgument


def test_defaults_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTRATA_MASTER", raising=False)
    assert read_settings({}) == Settings(masters="127.0.0.1:7400")


def test_masters_come_from_the_settings_first_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_MASTER", "pool:7400")
    assert read_settings({}).masters == "pool:7400"
    assert read_settings({"masters": "other:1"}).masters == "other:1"


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InvalidArgument, match=r"'load_polcy': did you mean 'load_policy'\?"):
        read_settings({"load_polcy": "auto"})
    with pytest.raises(InvalidArgument, match=r"'xyz': known: .*masters, transport"):
        read_settings({"xyz": 1})


@pytest.mark.parametrize(
    "extra",
    [
        {"load_policy": "often"},
        {"load_deadline_ms": 0},
        {"save_decode_cache": "yes"},
        {"masters": 7400},
        {"kv_shards": -1},
    ],
)
def test_a_wrong_value_is_refused_by_its_key(extra: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(extra))):
        read_settings(extra)


def test_the_role_bounds_what_the_settings_ask_for() -> None:
    settings = read_settings({"load_policy": "always", "save_decode_cache": False})
    both = settings.pool_config(stores=True, loads=True)
    assert (both.store, both.store_decode, both.load_policy) == (True, False, "always")
    producer = settings.pool_config(stores=True, loads=False)
    assert (producer.store, producer.load_policy) == (True, "never")
    assert not settings.pool_config(stores=False, loads=True).store


def test_the_pool_is_reset_only_where_that_is_said() -> None:
    assert not read_settings({}).reset_external and read_settings({"reset_external": True}).reset_external


def test_weights_that_never_change_end_nothing() -> None:
    assert read_settings({"fixed_weights": True}).fixed_weights
    with pytest.raises(InvalidArgument, match="reset_external and fixed_weights"):
        read_settings({"reset_external": True, "fixed_weights": True})


def test_shards_are_the_cores_too() -> None:
    settings = read_settings({"kv_shards": 8})
    assert settings.kv_shards == settings.pool_config(stores=True, loads=True).kv_shards == 8
