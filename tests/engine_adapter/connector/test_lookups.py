"""The lookup client over a real ZMQ IPC socket: silent, slow, lying and dead workers all end as a clear outcome."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvstrata.engine_adapter.connector import lookups as lookups_module
from kvstrata.engine_adapter.connector.lookup_messages import LookupAnswer, LookupAsk
from kvstrata.engine_adapter.connector.lookups import RETRY_S, LookupClient, LookupEnd, LookupReason
from tests.engine_adapter.connector.scheduler_fakes import Clock

DEADLINE_S = 60  # on the injected clock
WAIT_MS = 10_000  # how long a test waits for what must come; it never waits for time to pass


class FakeWorker:
    """A ROUTER that the test answers by hand."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._peer = b""

    def take(self) -> LookupAsk:
        assert self._socket.poll(WAIT_MS), "no question came"
        self._peer, message = self._socket.recv_multipart()
        return msgspec.msgpack.decode(message, type=LookupAsk)

    def idle(self) -> bool:
        return not self._socket.poll(0)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._peer, *frames])

    def answer(self, ask: LookupAsk, *present: bytes, **more: bool) -> None:
        self.send(msgspec.msgpack.encode(LookupAnswer(lookup_id=ask.lookup_id, present=list(present), **more)))

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class Pair:
    def __init__(self, endpoint: str) -> None:
        self.clock = Clock()
        self.worker = FakeWorker(endpoint)
        self.client = LookupClient(endpoint, hash_bytes=16, deadline_ms=DEADLINE_S * 1000, clock=self.clock)

    def connect(self) -> None:
        """The connection is made in the background: a first question proves it."""
        self.client.ask("", [b""], prefetch=False)
        self.worker.answer(self.take(), b"")
        assert [end.reason for end in self.ends()] == [LookupReason.ANSWERED]

    def take(self) -> LookupAsk:
        """The next question, sent again until the connection is there."""
        for _ in range(WAIT_MS // 10):
            if not self.worker.idle():
                return self.worker.take()
            self.clock.now += RETRY_S
            assert self.client.poll() == []
            select.select([self.client.fileno()], [], [], 0.01)
        raise AssertionError("no question came")

    def parted(self) -> None:
        """Wait until the client knows that nobody is there; what it sent before is lost, and ends late."""
        retries = self.client.stats()["lookup_retries"]
        for _ in range(WAIT_MS // 10):
            self.client.ask("", [b""], prefetch=False)
            if self.client.stats()["lookup_retries"] > retries:
                self.clock.now += DEADLINE_S
                assert {end.reason for end in self.client.poll()} == {LookupReason.LATE}
                return
            select.select([], [], [], 0.01)
        raise AssertionError("the client still sends to a worker that is gone")

    def ends(self) -> list[LookupEnd]:
        """Wait until the descriptor says that there is something, as an idle engine does."""
        for _ in range(100):
            readable, _, _ = select.select([self.client.fileno()], [], [], WAIT_MS / 1000)
            assert readable, "no answer came"
            if ends := self.client.poll():
                return ends
        raise AssertionError("readable, and nothing there")

    def settled(self, name: str, value: float) -> None:
        """Poll until a counter has a value."""
        for _ in range(WAIT_MS // 10):
            assert self.client.poll() == []
            if self.client.stats()[name] == value:
                return
            select.select([self.client.fileno()], [], [], 0.01)
        raise AssertionError(f"{name} is {self.client.stats()[name]}")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(f"ipc://{tmp_path}/lookup")
    try:
        made.connect()
        yield made
    finally:
        made.client.close()
        made.worker.close()


H = [bytes([number]) * 16 for number in range(8)]


def test_a_question_is_answered(pair: Pair) -> None:
    lookup_id = pair.client.ask("tenant", [H[0] + H[1], b"", H[2]], prefetch=True, request="r" * 300)
    ask = pair.worker.take()
    assert ask == LookupAsk(
        lookup_id=lookup_id,
        cache_salt="tenant",
        hashes=[H[0] + H[1], b"", H[2]],
        prefetch=True,
        request="r" * 256,
    )
    pair.worker.answer(ask, b"\1\0", b"", b"\1")
    assert pair.ends() == [LookupEnd(lookup_id, (b"\1\0", b"", b"\1"), LookupReason.ANSWERED)]
    assert pair.client.poll() == [] and pair.client.stats()["lookups_pending"] == 0


def test_answers_in_any_order_find_their_questions(pair: Pair) -> None:
    first, second = (pair.client.ask("", [h], prefetch=False) for h in H[:2])
    asks = [pair.worker.take(), pair.worker.take()]
    pair.worker.answer(asks[1], b"\1")
    assert [end.lookup_id for end in pair.ends()] == [second]
    pair.worker.answer(asks[0], b"\0")
    assert [end.lookup_id for end in pair.ends()] == [first]


def test_an_answer_that_asking_took_in_is_still_signalled(pair: Pair) -> None:
    """Sending may consume the socket's signal: an idle engine must not sleep on an answer that is here."""
    pair.client.ask("", [H[0]], prefetch=False)
    pair.worker.answer(pair.worker.take(), b"\1")
    for _ in range(WAIT_MS // 10):
        pair.client.ask("", [H[1]], prefetch=False)
        pair.worker.take()
        if pair.client.stats()["lookups_answered"] == 2:  # the first one of the fixture, and ours
            break
        select.select([], [], [], 0.01)
    assert len(pair.ends()) == 1


def test_a_silent_worker_is_nothing_at_the_deadline(pair: Pair) -> None:
    lookup_id = pair.client.ask("", [H[0] + H[1]], prefetch=False)
    ask = pair.worker.take()
    pair.clock.now += DEADLINE_S - 0.001
    assert pair.client.poll() == []
    pair.clock.now += 0.002
    assert pair.client.poll() == [LookupEnd(lookup_id, (b"\0\0",), LookupReason.LATE)]
    pair.worker.answer(ask, b"\1\1")  # slow: too late, counted, and nobody sees it
    pair.settled("lookup_answers_late", 1)


@pytest.mark.parametrize(
    "frames",
    [
        (b"\xff\x00 no msgpack",),
        (b"",),
        (msgspec.msgpack.encode({"lookup_id": "x", "present": 3}),),
        (msgspec.msgpack.encode([1, 2, 3]),),
        (b"two", b"frames"),
        (os.urandom(200),),
    ],
)
def test_garbage_is_counted_and_the_next_answer_is_read(pair: Pair, frames: tuple[bytes, ...]) -> None:
    lookup_id = pair.client.ask("", [H[0]], prefetch=False)
    ask = pair.worker.take()
    pair.worker.send(*frames)
    pair.worker.answer(ask, b"\1")
    assert pair.ends() == [LookupEnd(lookup_id, (b"\1",), LookupReason.ANSWERED)]
    assert pair.client.stats()["lookup_garbage"] == 1


@pytest.mark.parametrize("present", [(b"\1",), (b"\1\1\1",), (b"\1\1", b""), ()])
def test_an_answer_of_another_shape_is_nothing(pair: Pair, present: tuple[bytes, ...]) -> None:
    lookup_id = pair.client.ask("", [H[0] + H[1]], prefetch=False)
    pair.worker.answer(pair.worker.take(), *present)
    assert pair.ends() == [LookupEnd(lookup_id, (b"\0\0",), LookupReason.GARBLED)]


def test_a_pool_that_cannot_be_asked_is_nothing(pair: Pair) -> None:
    lookup_id = pair.client.ask("", [H[0]], prefetch=False)
    pair.worker.answer(pair.worker.take(), b"", answered=False)
    assert pair.ends() == [LookupEnd(lookup_id, (b"\0",), LookupReason.ABSENT)]


def test_not_yet_is_asked_again_until_it_is_answered(pair: Pair) -> None:
    lookup_id = pair.client.ask("", [H[0]], prefetch=False)
    ask = pair.worker.take()
    for _ in range(3):
        pair.worker.answer(ask, b"", not_yet=True)
        pair.worker.answer(ask, b"", not_yet=True)  # twice: must not double the questions
        before = pair.client.stats()["lookup_retries"]
        pair.settled("lookup_retries", before + 1)
        pair.clock.now += RETRY_S
        assert pair.client.poll() == []
        ask = pair.worker.take()
        assert ask.lookup_id == lookup_id
        pair.clock.now += 0.001
    pair.worker.answer(ask, b"\1")
    assert pair.ends() == [LookupEnd(lookup_id, (b"\1",), LookupReason.ANSWERED)]


def test_not_yet_is_nothing_at_the_deadline(pair: Pair) -> None:
    lookup_id = pair.client.ask("", [H[0]], prefetch=False)
    pair.worker.answer(pair.worker.take(), b"", not_yet=True)
    pair.settled("lookup_retries", pair.client.stats()["lookup_retries"] + 1)
    pair.clock.now += DEADLINE_S
    assert pair.client.poll() == [LookupEnd(lookup_id, (b"\0",), LookupReason.NOT_YET)]


def test_a_dead_worker_costs_a_deadline_and_another_one_is_found(tmp_path: Path) -> None:
    pair = Pair(f"ipc://{tmp_path}/lookup")
    try:
        pair.connect()
        pair.worker.close()
        pair.client.ask("", [H[0]], prefetch=False)
        pair.clock.now += DEADLINE_S
        assert [end.reason for end in pair.client.poll()] == [LookupReason.LATE]
        pair.parted()
        pair.worker = FakeWorker(f"ipc://{tmp_path}/lookup")
        pair.connect()
    finally:
        pair.client.close()
        pair.worker.close()


def test_without_a_worker_every_question_ends_and_closing_does_not_wait(tmp_path: Path) -> None:
    clock = Clock()
    client = LookupClient(f"ipc://{tmp_path}/nobody", hash_bytes=16, deadline_ms=DEADLINE_S * 1000, clock=clock)
    ids = [client.ask("", [H[0]], prefetch=False) for _ in range(5)]
    clock.now = DEADLINE_S
    ends = client.poll()
    assert [end.lookup_id for end in ends] == ids and {end.reason for end in ends} == {LookupReason.LATE}
    client.ask("", [H[0]], prefetch=False)
    client.close()
    client.close()


def test_questions_under_way_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "OUTSTANDING_MAX", 3)
    for _ in range(3):
        pair.client.ask("", [H[0]], prefetch=False)
    shed = pair.client.ask("", [H[0]], prefetch=False)
    assert pair.ends() == [LookupEnd(shed, (b"\0",), LookupReason.SHED)]
    monkeypatch.setattr(lookups_module, "OUTSTANDING_MAX", 9)
    monkeypatch.setattr(lookups_module, "LOOKUP_BYTES_MAX", 100)
    large = pair.client.ask("", [b"".join(H)], prefetch=False)
    assert [(end.lookup_id, end.reason) for end in pair.ends()] == [(large, LookupReason.TOO_LARGE)]
    stats = pair.client.stats()
    assert stats["lookups"] == 1 + 5 and stats["lookups_pending"] == 3


def test_a_flood_is_taken_in_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "QUEUE_MAX", 2)
    pair.client.ask("", [H[0]], prefetch=False)
    ask = pair.worker.take()
    for _ in range(7):
        pair.worker.send(b"\xff")
    pair.worker.answer(ask, b"\1")
    assert [end.reason for end in pair.ends()] == [LookupReason.ANSWERED]


def test_closing_leaves_no_descriptor(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def open_and_close() -> None:
        LookupClient(f"ipc://{tmp_path}/x", hash_bytes=16, deadline_ms=9).close()

    open_and_close()
    before = opened()
    for _ in range(3):
        open_and_close()
    assert opened() == before
