"""A node with a key file: tenants' blocks outlive it, erasing a tenant destroys its key, and mistakes are named."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.ssd.base import SECTOR_BYTES
from kvstrata.storage.ssd.tenant_keys import TenantKeys, read_key_file
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from tests.waiting import until

from .test_orders_on_disk import NUMBERS, loaded, on_disk, store_all


@pytest.fixture
def config(tmp_path: Path) -> StorageConfig:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(bytes(range(32)).hex())
    return StorageConfig(
        (), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, slab_bytes=1 << 20,
        ssd=((tmp_path / "ssd", 16 << 20),), ssd_policy=SsdPolicy.WRITE_THROUGH, ssd_key_file=key,
    )  # fmt: skip


@pytest.fixture
def node(config: StorageConfig) -> Iterator[StorageNode]:
    one = StorageNode(config)
    assert one.start()["ssd_encrypted"] is True
    store_all(one)
    yield one
    one.stop()


def keys_in_file(config: StorageConfig) -> TenantKeys:
    assert config.ssd_key_file is not None
    return TenantKeys(config.data / "ssd-keys", read_key_file(config.ssd_key_file))


def test_blocks_outlive_the_node_and_are_in_no_file(node: StorageNode, config: StorageConfig) -> None:
    assert on_disk(config, "secret") == on_disk(config, "other") == 0
    node.stop()
    again = StorageNode(config)
    again.start()
    try:
        assert loaded(again, "secret") == loaded(again, "other") == len(NUMBERS)
    finally:
        again.stop()


def test_erasing_a_tenant_destroys_its_key(node: StorageNode, config: StorageConfig) -> None:
    before = keys_in_file(config)
    stale = (config.ssd[0][0] / "extents").read_bytes()
    done: list[control.CommandDone] = []
    node.commands.drop(control.DropCommand(command=1, salt="secret", erase=True), done.append)
    until(lambda: bool(done))
    assert not done[0].error
    kept = keys_in_file(config)
    assert before.key("secret") is not None and kept.key("secret") is None and kept.key("other") is not None
    assert loaded(node, "secret") == 0 and loaded(node, "other") == len(NUMBERS)
    assert stale.count(b"secret") >= len(
        NUMBERS
    )  # a copy of the device still has the blocks, with nothing to read them
    store_all(node, ("secret",))
    assert loaded(node, "secret") == len(NUMBERS)
    again = keys_in_file(config).key("secret")
    assert again is not None and again != before.key("secret")


def test_dropping_without_erasure_or_one_model_of_a_tenant_keeps_its_key(
    node: StorageNode, config: StorageConfig
) -> None:
    done: list[control.CommandDone] = []
    with node.lock:
        group = node.state.entry(1).namespace.group
    node.commands.drop(control.DropCommand(command=1, salt="secret"), done.append)
    node.commands.drop(control.DropCommand(command=2, salt="other", group=group, erase=True), done.append)
    until(lambda: len(done) == 2)
    assert [each.error for each in done] == ["", ""]
    kept = keys_in_file(config)
    assert kept.key("secret") is not None and kept.key("other") is not None


def test_erasure_waits_until_the_key_is_gone_from_the_file(
    node: StorageNode, config: StorageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        tried.append(True)
        raise OSError(28, "no space")

    tried: list[bool] = []
    done: list[control.CommandDone] = []
    with monkeypatch.context() as patch:
        patch.setattr(node.commands._keys, "_replace", full)
        node.commands.drop(control.DropCommand(command=1, any_salt=True, erase=True), done.append)
        until(lambda: bool(tried))
        assert not done and keys_in_file(config).count == 2
    until(lambda: bool(done))
    assert not done[0].error and keys_in_file(config).count == 0


# ---------------------------------------------------------------------- mistakes


def test_another_key_is_refused_and_the_right_one_still_works(node: StorageNode, config: StorageConfig) -> None:
    node.stop()
    assert config.ssd_key_file is not None
    right = config.ssd_key_file.read_text()
    config.ssd_key_file.write_text(bytes(SECTOR_BYTES % 251 for _ in range(32)).hex())
    with pytest.raises(ConfigError, match="give the key file that this node had before"):
        StorageNode(config)
    with pytest.raises(ConfigError, match="is encrypted: give --ssd-key-file"):
        StorageNode(dataclasses.replace(config, ssd_key_file=None))
    config.ssd_key_file.write_text(right)
    again = StorageNode(config)
    again.start()
    try:
        assert loaded(again, "secret") == len(NUMBERS)
    finally:
        again.stop()


def test_a_key_without_an_ssd_is_refused(config: StorageConfig) -> None:
    with pytest.raises(ConfigError, match="--ssd-key-file need an SSD"):
        dataclasses.replace(config, ssd=(), ssd_policy=SsdPolicy.DEMOTE).validated()


def test_a_missing_package_is_named(config: StorageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "kvstrata.storage.ssd.tenant_keys")
    monkeypatch.delitem(sys.modules, "kvstrata.storage.ssd.cipher")
    with pytest.raises(ConfigError, match=r"pip install 'kvstrata\[encryption\]'"):
        StorageNode(config)
    plain = StorageNode(dataclasses.replace(config, ssd_key_file=None))
    plain.stop()
