"""What a store does on its own is watched by its node, and ends with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.storage.config import StorageConfig
from kvstrata.storage.node import StorageNode
from kvstrata.storage.ssd.log import SsdLog
from kvstrata.storage.ssd.removal_book import RemovalBook
from tests.waiting import until

MIB = 1 << 20


def test_compaction_is_in_the_nodes_health_and_ends_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: RemovalBook) -> None:
        raise OSError("a log that cannot be compacted")

    monkeypatch.setattr(RemovalBook, "tend", full)
    ssd = ((tmp_path / "ssd", 128 * MIB),)
    node = StorageNode(StorageConfig((), "127.0.0.1:0", "127.0.0.1:0", tmp_path / "data", 16 * MIB, ssd=ssd))
    try:
        assert node.ssd is not None
        store = node.ssd.store
        assert isinstance(store, SsdLog)
        node.start()
        assert "ssd-removals" in node.report.health()["loop_age_seconds"]
        until(lambda: "ssd-removals: OSError: a log that cannot be compacted" in node.report.health()["problems"])
    finally:
        node.stop()
    assert not store.loop._thread.is_alive()
