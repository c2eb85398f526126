"""Orders on a node with real files: what was dropped with erasure is nowhere in them, and nothing of it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.status import BlockStatus
from kvstrata.proto.wire import Kind
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.tiers.ssd_policy import SsdPolicy
from kvstrata.transfer.connection import Connection, expect
from kvstrata.transfer.identity import Identity
from tests.waiting import until

from .conftest import keys, payload
from .test_channel import digests, handle, reserve, write

NUMBERS = range(6)
DATA = {
    salt: b"".join(payload(keys([number]), version, 5000) for number in NUMBERS)
    for version, salt in enumerate(("secret", "other"))
}


@pytest.fixture
def config(tmp_path: Path) -> StorageConfig:
    return StorageConfig(
        (), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "node", 8 << 20, slab_bytes=1 << 20,
        ssd=((tmp_path / "ssd", 16 << 20),), ssd_policy=SsdPolicy.WRITE_THROUGH,
    )  # fmt: skip


@pytest.fixture
def node(config: StorageConfig) -> Iterator[StorageNode]:
    one = StorageNode(config)
    one.start()
    store_all(one)
    yield one
    one.stop()


def store_all(one: StorageNode, salts: tuple[str, ...] = tuple(DATA)) -> None:
    """Until all of it is on SSD."""
    for salt in salts:
        data = DATA[salt]
        connection = Connection.open(one.channel, Identity.new(), silence_s=5.0)
        try:
            reserved = reserve(connection, NUMBERS, salt)
            assert set(write(connection, reserved.reservation, data, digests(data))) == {int(BlockStatus.STORED)}
        finally:
            connection.close()
    assert one.state.ssd is not None
    ssd = one.state.ssd
    until(lambda: ssd.visible == 2 * len(NUMBERS))


def on_disk(config: StorageConfig, salt: str) -> int:
    """How many of the tenant's blocks have a piece in any file."""
    files = [path.read_bytes() for path in config.ssd[0][0].rglob("*") if path.is_file()]
    pieces = [DATA[salt][5000 * at : 5000 * at + 64] for at in range(len(NUMBERS))]
    return sum(any(piece in content for content in files) for piece in pieces)


def loaded(node: StorageNode, salt: str) -> int:
    connection = Connection.open(node.channel, Identity.new(), silence_s=5.0)
    try:
        ask = pb.Acquire(ns=handle(connection), salt=salt, hashes=keys(NUMBERS), deadline_ms=2000)
        answer = expect(pb.AcquireOk, connection.call(Kind.ACQUIRE, ask.SerializeToString()), Kind.ACQUIRE_OK)
        return list(answer.status).count(int(BlockStatus.LOADED))
    finally:
        connection.close()


def test_a_dropped_tenant_is_in_no_file_and_does_not_come_back(node: StorageNode, config: StorageConfig) -> None:
    assert on_disk(config, "secret") == on_disk(config, "other") == 6
    done: list[control.CommandDone] = []
    node.commands.drop(control.DropCommand(command=1, salt="secret", erase=True), done.append)
    assert loaded(node, "secret") == 0
    until(lambda: bool(done))
    assert not done[0].error
    assert on_disk(config, "secret") == 0 and on_disk(config, "other") == 6
    node.stop()
    again = StorageNode(config)
    again.start()
    try:
        assert loaded(again, "secret") == 0 and loaded(again, "other") == 6
    finally:
        again.stop()


def test_removed_blocks_and_old_weights_do_not_come_back(node: StorageNode, config: StorageConfig) -> None:
    done: list[control.CommandDone] = []
    with node.lock:
        namespace = node.state.entry(1).namespace
    removal = control.RemoveCommand(command=1, spec=namespace.to_spec(), salt="other", hashes=keys(range(2)))
    node.commands.remove(removal, done.append)
    until(lambda: len(done) == 1)
    node.stop()
    second = StorageNode(config)
    second.start()
    assert loaded(second, "other") == 4 and loaded(second, "secret") == 6
    second.commands.advance(control.NamespaceEpoch(group=namespace.group, epoch=1, command=2), done.append)
    until(lambda: len(done) == 2)
    assert [each.error for each in done] == ["", ""]
    second.stop()
    third = StorageNode(config)
    third.start()
    try:
        assert loaded(third, "other") == loaded(third, "secret") == 0
        with third.lock:
            assert third.state.ssd is not None and third.state.ssd.visible == 0
            assert third.state.known.epoch(namespace.group) == 1
    finally:
        third.stop()
