"""What an engine shows to a secured pool: passed on whole, and its token never shown to a reader of settings."""

from __future__ import annotations

import msgspec

from kvstrata.engine_adapter.connector.config import PoolConfig
from kvstrata.engine_adapter.paged.config import EngineConfig
from kvstrata.engine_adapter.sglang.settings import read_settings as read_sglang
from kvstrata.engine_adapter.vllm.settings import read_settings as read_vllm

GIVEN = {"token": "kvs_secret", "tls_ca": "/ca", "tls_cert": "/cert", "tls_key": "/key"}
SHOWN = {**GIVEN, "token_file": None}


def test_settings_of_every_adapter_reach_the_client() -> None:
    vllm = read_vllm(GIVEN)
    assert vllm.shown() == vllm.pool_config(stores=True, loads=True).shown() == SHOWN
    assert read_sglang({"interface_v1": 1, "kvstrata": GIVEN}).shown() == SHOWN
    assert read_vllm({"token_file": "/f"}).pool_config(stores=True, loads=True).shown()["token_file"] == "/f"


def test_ranks_are_told_the_token_and_logs_are_not() -> None:
    config = EngineConfig(pool=read_vllm(GIVEN).pool_config(stores=True, loads=True))
    assert "kvs_secret" not in repr(config) and "'***'" in repr(config.pool)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert PoolConfig().shown() == dict.fromkeys(SHOWN), "nothing given is what the environment says"
