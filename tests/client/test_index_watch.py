"""A mirror's thread: a snapshot takes as long as it takes, silence ends a stream, and what does not end is said."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvstrata.client import index_watch as module
from kvstrata.client.admin import AdminClient, IndexStream
from kvstrata.client.index_mirror import IndexMirror
from kvstrata.client.index_watch import IndexWatch
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import InvalidArgument
from kvstrata.proto.keys import Namespace
from tests.waiting import until

WAIT_S = 10.0
M = control.IndexMessage


class Master:
    """Each stream says what the test puts, and is over when it is cancelled."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.says: queue.SimpleQueue[control.IndexMessage | None] = queue.SimpleQueue()

    def watch_index(self, **query: Any) -> IndexStream:
        self.asked.put(query)
        self.says = queue.SimpleQueue()
        return cast(IndexStream, _Stream(self.says))

    def close(self) -> None:
        pass


class _Stream:
    def __init__(self, says: queue.SimpleQueue[control.IndexMessage | None]) -> None:
        self._says = says

    def __iter__(self) -> Iterator[control.IndexMessage]:
        return iter(lambda: self._says.get(timeout=WAIT_S), None)

    def cancel(self) -> None:
        self._says.put(None)


def change(hashes: bytes, namespace: Namespace) -> control.IndexChange:
    table = control.IndexTable(group=namespace.group, shard=0, salt="")
    return control.IndexChange(kind=control.IndexChange.STORED, table=table, slot=1, tier=0, hashes=hashes)


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def watch(master: Master, monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexWatch]:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    with IndexWatch(lambda: cast(AdminClient, master)) as watch:
        yield watch


def test_a_stream_has_no_end_but_its_silence(
    master: Master, watch: IndexWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert master.asked.get(timeout=WAIT_S)["timeout_s"] is None
    master.says.put(M(epoch=7, sequence=3, reset="begin"))
    master.says.put(M(epoch=7, sequence=5, live=True))
    assert watch.wait_live(WAIT_S) and watch.problem() == "" and master.asked.empty()
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    again = master.asked.get(timeout=WAIT_S)
    assert (again["epoch"], again["sequence"]) == (7, 5), "it goes on from where it was"


def test_a_snapshot_that_is_begun_again_and_again_is_a_problem(master: Master, watch: IndexWatch) -> None:
    master.asked.get(timeout=WAIT_S)
    master.says.put(M(epoch=7, sequence=3, reset="begin"))
    until(lambda: watch.read(lambda mirror: mirror.resets) == 1)
    assert watch.problem() == "", "the first one is on its way"
    master.says.put(M(epoch=7, sequence=9, reset="it was too slow"))
    until(lambda: watch.read(lambda mirror: mirror.resets) == 2)
    assert "begun 2 times" in watch.problem() and not watch.wait_live(0.0)
    master.says.put(M(epoch=7, sequence=9, live=True))
    assert watch.wait_live(WAIT_S) and watch.problem() == ""


def test_a_stream_that_the_master_ends_is_a_problem_until_the_next_one_speaks(
    master: Master, watch: IndexWatch
) -> None:
    master.asked.get(timeout=WAIT_S)
    master.says.put(None)
    until(lambda: "ended" in watch.problem())
    master.asked.get(timeout=WAIT_S)
    master.says.put(M(epoch=7, sequence=1, reset="begin"))
    until(lambda: watch.problem() == "")


def test_longer_hashes_are_asked_for_as_the_directory_knows_them() -> None:
    """16 bytes, those past them XORed in."""
    namespace = Namespace("g", block_bytes=64, block_tokens=4, hash_bytes=24)
    first, second = (bytes([number]) * 8 for number in (1, 2))
    nodes = control.IndexChange(kind=control.IndexChange.NODES, nodes=[control.IndexNode(slot=1, node_id="n")])
    known = bytes([1 ^ 3]) * 8 + second
    mirror = IndexMirror()
    mirror.apply(M(epoch=1, sequence=1, reset="begin", live=True, changes=[nodes, change(known, namespace)]))
    mirror.check()
    assert mirror.prefix(namespace, "", first + second + bytes([3]) * 8) == (1, {"n": 1})
    assert mirror.prefix(namespace, "", known + bytes(8)) == (1, {"n": 1}), "of one fold"
    assert mirror.prefix(namespace, "", first + second + bytes(8)) == (0, {})
    with pytest.raises(InvalidArgument, match="not a multiple of hash_bytes = 24"):
        mirror.prefix(namespace, "", known)
