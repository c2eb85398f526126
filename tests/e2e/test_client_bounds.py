"""The bounds that a daemon is started with hold at its channel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.master.daemon import Master, MasterConfig
from kvstrata.proto.errors import Busy
from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity
from kvstrata.transfer.security.rates import Bounds

ANY = "127.0.0.1:0"


@contextlib.contextmanager
def running(daemon: str, folder: Path, bounds: Bounds) -> Iterator[str]:
    """Its channel's address."""
    if daemon == "master":
        with Master(MasterConfig(ANY, ANY, ANY, None, seed=1, bounds=bounds)) as master:
            yield master.endpoints.channel
        return
    node = StorageNode(StorageConfig((), ANY, ANY, folder, 8 << 20, bounds=bounds))
    try:
        yield str(node.start()["channel"])
    finally:
        node.stop()


@pytest.mark.parametrize("daemon", ["master", "storage"])
def test_a_client_has_as_many_connections_as_its_daemon_was_told(daemon: str, tmp_path: Path) -> None:
    with running(daemon, tmp_path, Bounds(connections=2)) as address, contextlib.ExitStack() as held:
        one, another = Identity.new("client"), Identity.new("client")
        for _ in range(2):
            held.callback(Connection.open(address, one, silence_s=10.0, connect_s=10.0).close)
        with pytest.raises(Busy, match="at most 2 connections"):
            Connection.open(address, one, silence_s=10.0, connect_s=10.0)
        held.callback(Connection.open(address, another, silence_s=10.0, connect_s=10.0).close)
