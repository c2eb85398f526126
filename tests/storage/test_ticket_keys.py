"""A node's ticket keys: a file that has gone bad is a problem in its health."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.transfer.security import watched_file
from kvstrata.transfer.security.files import SecurityFiles
from tests.transfer.security.doors import write_keys


def test_keys_that_went_bad_make_a_node_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "LOOK_S", 0.0)
    keys, any_port = tmp_path / "keys", "127.0.0.1:0"
    write_keys(keys, "one")
    files = SecurityFiles(ticket_keys=keys)
    node = StorageNode(
        StorageConfig((), any_port, any_port, tmp_path / "node", 8 << 20, slab_bytes=1 << 20, security=files)
    )
    try:
        assert node.report.problems() == [] and node.report.health()["security"]["tickets"]
        keys.write_text("nonsense")
        (problem,) = node.report.problems()
        assert str(keys) in problem
    finally:
        node.stop()
