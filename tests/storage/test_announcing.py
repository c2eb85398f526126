"""When a master hears of what became visible: soon, and not once a store while stores follow each other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from kvstrata.proto import control_pb2 as control
from kvstrata.storage.masters import outbox as masters_outbox
from kvstrata.storage.masters.outbox import Outbox

from .conftest import Node

SOON_S = 20.0


class Listener:
    """A session's stream, taken as fast as it comes."""

    def __init__(self, node: Node) -> None:
        self._node, self._lock = node, threading.Lock()
        self.outbox = Outbox(node.state, self._lock, control.Attach(), lambda told: control.NodeStatus())
        self.outbox.attached.set()
        self._heard: queue.Queue[control.NodeMessage] = queue.Queue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        for message in self.outbox.messages():
            self._heard.put(message)

    def store(self, number: int) -> None:
        with self._lock:
            self._node.store([number])
        self.outbox.wake()

    def next(self) -> str:
        while (body := str(self._heard.get(timeout=SOON_S).WhichOneof("body"))) == "status":
            pass
        return body

    def end(self) -> None:
        self.outbox.end()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


@pytest.fixture
def listener(node: Node) -> Iterator[Listener]:
    one = Listener(node)
    assert [one.next() for _ in range(2)] == ["attach", "snapshot"]
    yield one
    one.end()


def test_stores_that_follow_each_other_are_told_together(node: Node, listener: Listener) -> None:
    began = time.monotonic()
    for number in range(40):
        listener.store(number)
        time.sleep(0.001)
    while listener.outbox.sent_seq < node.state.deltas.answer_seq or node.state.deltas.gathers:
        assert time.monotonic() < began + SOON_S
        time.sleep(0.001)
    messages = node.state.deltas.open_seq - 1
    assert 1 <= messages <= 2 + (time.monotonic() - began) / masters_outbox.PACE_S


@pytest.mark.parametrize("urgent", ["answer", "report", "snapshot", "goodbye"])
def test_what_somebody_waits_for_waits_for_no_further_changes(
    listener: Listener, urgent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.store(1)
    assert listener.next() == "delta"
    monkeypatch.setattr(masters_outbox, "PACE_S", 3600.0)
    listener.store(2)
    if urgent == "answer":
        listener.outbox.confirm(control.CommandDone(command=1))
        assert [listener.next(), listener.next()] == ["delta", "done"]
    elif urgent == "report":
        listener.outbox.report_soon()
        assert listener.next() == "delta"
    elif urgent == "snapshot":
        listener.outbox.resync()
        assert listener.next() == "snapshot"
    else:
        listener.outbox.detach("the node is stopping")
        assert [listener.next(), listener.next()] == ["delta", "detach"]
