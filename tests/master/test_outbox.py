"""What waits for one node's stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from kvstrata.master import messages as m
from kvstrata.master import outbox as outbox_module
from kvstrata.master.outbox import Outbox

SOON_S = 20.0
ORDER = m.SendResync(1, "why")


class Reader:
    """Takes what comes, in a thread of its own."""

    def __init__(self, outbox: Outbox) -> None:
        self.said: queue.Queue[m.Send] = queue.Queue()
        self._outbox = outbox
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._outbox.closed is None:
            said = self._outbox.get(SOON_S)
            if said is not None:
                self.said.put(said[0])

    def next(self) -> m.Send:
        return self.said.get(timeout=SOON_S)

    def join(self) -> None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close("the end")


def test_acknowledgements_go_out_apart_and_the_newest_speaks_for_all(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "ACK_S", 3 * SOON_S)
    reader = Reader(outbox)
    outbox._acked_at = -3 * SOON_S
    outbox.put(m.SendAck(1, 1))
    assert reader.next() == m.SendAck(1, 1), "the first need not wait"
    for seq in range(2, 50):
        outbox.put(m.SendAck(1, seq))
    outbox.put(ORDER)  # which waits for nothing, and comes after what was acknowledged before
    assert [reader.next(), reader.next()] == [m.SendAck(1, 49), ORDER]
    outbox.put(m.SendAck(1, 50))
    outbox.close("the end")
    reader.join()


def test_an_acknowledgement_alone_is_sent_when_it_is_time(outbox: Outbox) -> None:
    reader = Reader(outbox)
    for seq in range(1, 6):
        outbox.put(m.SendAck(1, seq))
        while reader.next() != m.SendAck(1, seq):
            pass
    outbox.close("the end")
    reader.join()
