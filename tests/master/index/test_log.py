"""The log of the directory: what it holds, and what is read of it at once, are bounded by bytes."""

from __future__ import annotations

import threading

import pytest

from kvstrata.master.directory.directory import Directory
from kvstrata.master.index import log as module
from kvstrata.master.index.converters import change_message
from kvstrata.master.index.following import BYTES_MAX, ENTRIES_MAX
from kvstrata.master.index.log import IndexLog
from kvstrata.master.messages import NodeFacts
from kvstrata.master.namespaces import Namespaces
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.wire import MESSAGE_BYTES_MAX


def _rerouted(nodes: int, times: int) -> tuple[IndexLog, int]:
    """A log of a pool whose nodes come and go: each entry names them all. With where it began."""
    known: dict[int, NodeFacts] = {}
    log = IndexLog(Directory(), Namespaces(), lambda: known)
    log.join(threading.Event())
    begun = log.sequence
    facts = NodeFacts("a-node-with-a-name", 1 << 60, channel="x:1", dram_bytes=1, boot_id="b" * 36, host="a-host")
    for turn in range(times):
        known = dict.fromkeys(range(nodes + turn % 2), facts)
        log.rerouted()
    return log, begun


def test_entries_about_many_nodes_fit_a_message() -> None:
    log, begun = _rerouted(1000, 150)
    log.check()
    told = log.since(begun, ENTRIES_MAX, BYTES_MAX)
    assert told
    changes = [change for entry in told if (change := change_message(entry, lambda key: None)) is not None]
    assert control.IndexMessage(changes=changes).ByteSize() < MESSAGE_BYTES_MAX // 2


def test_entries_about_many_nodes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES_MAX", 1 << 20)
    log, begun = _rerouted(1000, 100)
    log.check()
    assert log.since(begun, 1, 1) is None
    kept = log.since(log.sequence - 4, 100, 1 << 30)
    assert kept is not None and len(kept) == 4
