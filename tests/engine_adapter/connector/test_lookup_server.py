"""The lookup server over real ZMQ sockets: right answers, none held up by another, nothing ended by garbage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import zmq

from kvstrata.client.results import Lookup, prefix
from kvstrata.engine_adapter.connector import lookup_server
from kvstrata.engine_adapter.connector.base import GroupBlocks
from kvstrata.engine_adapter.connector.layout import PoolLayout
from kvstrata.engine_adapter.connector.lookup_messages import LookupAnswer, LookupAsk
from kvstrata.engine_adapter.connector.lookup_server import LookupServer, decoded
from kvstrata.engine_adapter.connector.presence import answer_lookup
from kvstrata.engine_adapter.connector.stored_groups import stored_groups
from kvstrata.proto.errors import InvalidArgument, KVError, ProtocolError, Unavailable
from kvstrata.proto.keys import split_hashes
from tests.engine_adapter.connector.scripted_client import FULL, STATE, WAIT_S, WIDTH, WINDOW, Gate, layout, names
from tests.waiting import until

Answer = Callable[[LookupAsk], LookupAnswer]

#: Another message than an answer.
NO_ANSWER = cast(LookupAnswer, GroupBlocks(group=0, hashes=b"", block_ids=[]))


class Asker:
    """A scheduler's end of the socket."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1e3))
        self.socket.connect(endpoint)

    def ask(self, lookup_id: int, *hashes: bytes, prefetch: bool = False) -> None:
        ask = LookupAsk(lookup_id=lookup_id, cache_salt="", hashes=list(hashes), prefetch=prefetch)
        self.socket.send(msgspec.msgpack.encode(ask))

    def answer(self) -> LookupAnswer:
        return msgspec.msgpack.decode(self.socket.recv(), type=LookupAnswer)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/lookups"


@pytest.fixture
def serve(endpoint: str) -> Iterator[Callable[[Answer], LookupServer]]:
    servers: list[LookupServer] = []

    def start(answer: Answer) -> LookupServer:
        servers.append(LookupServer(endpoint, answer, bound_s=5.0))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def asker(endpoint: str) -> Iterator[Asker]:
    asker = Asker(endpoint)
    yield asker
    asker.close()


def echo(ask: LookupAsk) -> LookupAnswer:
    return LookupAnswer(lookup_id=ask.lookup_id, present=[b"\1" * (len(part) // WIDTH) for part in ask.hashes])


def test_each_asker_gets_its_answers(serve: Callable[[Answer], LookupServer], asker: Asker, endpoint: str) -> None:
    serve(echo)
    other = Asker(endpoint)
    for i in range(20):
        asker.ask(i, names(i), b"")
        other.ask(100 + i, names(1))
    assert {(a.lookup_id, a.present[0]) for a in (asker.answer() for _ in range(20))} == {
        (i, b"\1" * i) for i in range(20)
    }
    assert {other.answer().lookup_id for _ in range(20)} == set(range(100, 120))
    other.close()


def test_a_slow_lookup_holds_up_no_other(serve: Callable[[Answer], LookupServer], asker: Asker) -> None:
    gate = Gate()
    gate.shut()

    def answer(ask: LookupAsk) -> LookupAnswer:
        if ask.lookup_id == 1:
            gate.through()
        return echo(ask)

    serve(answer)
    asker.ask(1, names(1))
    gate.came()
    asker.ask(2, names(1))
    assert asker.answer().lookup_id == 2
    gate.open()
    assert asker.answer().lookup_id == 1


def test_past_the_bound_the_oldest_question_is_dropped(
    serve: Callable[[Answer], LookupServer], asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_server, "QUEUE_MAX", 3)
    gate = Gate()
    gate.shut()

    def answer(ask: LookupAsk) -> LookupAnswer:
        gate.through()
        return echo(ask)

    server = serve(answer)
    for i in range(lookup_server.THREADS):
        asker.ask(i, b"")
        gate.came()
    for i in range(100, 105):
        asker.ask(i, b"")
    until(lambda: server.stats()["lookups_dropped"] == 2)
    gate.open()
    got = [asker.answer().lookup_id for _ in range(lookup_server.THREADS + 3)]
    assert sorted(got) == [*range(lookup_server.THREADS), 102, 103, 104]


def test_garbage_is_counted_and_ignored(
    serve: Callable[[Answer], LookupServer], asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_server, "LOOKUP_BYTES_MAX", 4096)
    server = serve(echo)
    good = msgspec.msgpack.encode(LookupAsk(lookup_id=1, cache_salt="", hashes=[names(1)]))
    for message in (b"", b"\xff" * 40, good[:-3], msgspec.msgpack.encode([1, 2]), good + bytes(5000)):
        asker.socket.send(message)
    asker.socket.send_multipart([good, good])
    oversized = msgspec.msgpack.encode(LookupAsk(lookup_id=9, cache_salt="", hashes=[bytes(8192)]))
    asker.socket.send(oversized)
    asker.ask(2, names(3))
    assert asker.answer().lookup_id == 2
    assert server.stats()["lookups_garbage"] == 7 and not server.problems()


def test_an_answer_that_fails_says_that_nobody_could_be_asked(
    serve: Callable[[Answer], LookupServer], asker: Asker
) -> None:
    def answer(ask: LookupAsk) -> LookupAnswer:
        if ask.lookup_id == 1:
            raise RuntimeError("a bug")
        return echo(ask)

    server = serve(answer)
    asker.ask(1, names(2), names(1))
    assert asker.answer() == LookupAnswer(lookup_id=1, present=[b"", b""], answered=False)
    until(lambda: server.failures() == 1)
    asker.ask(2, names(1))
    assert asker.answer().answered


def test_an_asker_that_leaves_harms_nobody(
    serve: Callable[[Answer], LookupServer], asker: Asker, endpoint: str
) -> None:
    gate = Gate()
    gate.shut()

    def answer(ask: LookupAsk) -> LookupAnswer:
        gate.through()
        return echo(ask)

    server = serve(answer)
    gone = Asker(endpoint)
    gone.ask(1, names(1))
    gate.came()
    gone.close()
    gate.open()
    asker.ask(2, names(1))
    assert asker.answer().lookup_id == 2 and not server.problems()


def test_nothing_is_left_after_close(endpoint: str, tmp_path: Path) -> None:
    server = LookupServer(endpoint, echo, bound_s=5.0)
    asker = Asker(endpoint)
    asker.ask(1, names(1))
    assert asker.answer().answered and len(list(tmp_path.iterdir())) == 1
    server.close()
    server.close()
    assert not list(tmp_path.iterdir())
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvstrata-connector-lookup")]
    asker.close()


def test_a_file_left_by_a_dead_server_is_taken_over_and_anothers_is_left_alone(endpoint: str) -> None:
    old = LookupServer(endpoint, echo, bound_s=5.0)
    new = LookupServer(endpoint, echo, bound_s=5.0)  # as after a kill: the old one's file is in the way
    old.close()
    asker = Asker(endpoint)
    asker.ask(1, names(1))
    assert asker.answer().answered
    asker.close()
    new.close()


def test_an_endpoint_that_cannot_be_bound(tmp_path: Path) -> None:
    for bad in (f"ipc://{tmp_path}/no/such/folder", f"ipc://{tmp_path}/{'x' * 200}", "nonsense"):
        with pytest.raises(InvalidArgument, match="lookup endpoint"):
            LookupServer(bad, echo, bound_s=5.0)


def test_only_whole_messages_are_decoded() -> None:
    message = msgspec.msgpack.encode(LookupAsk(lookup_id=1, cache_salt="", hashes=[names(1)]))
    assert decoded([b"peer", message]) is not None
    assert all(decoded([b"peer", message[:cut]]) is None for cut in range(len(message)))
    assert decoded([b"peer"]) is None and decoded([b"peer", b"", message]) is None


# -------------------------------------------------------------------- what is answered


class Directory:
    """Presence by hash; group 1 may be out of reach."""

    def __init__(self, layout: PoolLayout, *present: bytes) -> None:
        self.layout, self.present = layout, set(present)
        self.not_yet, self.reached = False, True
        self.prefetched: list[tuple[int, bytes]] = []
        self.requests: list[str] = []

    def lookup(self, salt: str, group: int, hashes: bytes, request: str = "") -> Lookup | None:
        self.requests.append(request)
        if not self.reached:
            return None
        mask = np.array([row in self.present for row in split_hashes(hashes, WIDTH)], bool)
        return Lookup(None if self.not_yet else prefix(mask), mask, np.zeros(len(mask), np.uint8), {})

    def prefetch(self, salt: str, group: int, hashes: bytes) -> None:
        if hashes:
            self.prefetched.append((group, hashes))


def ask(*hashes: bytes, prefetch: bool = False) -> LookupAsk:
    return LookupAsk(lookup_id=5, cache_salt="", hashes=list(hashes), prefetch=prefetch, request="req-1")


def test_presence_is_told_for_each_group_that_was_asked_about() -> None:
    directory = Directory(layout(FULL, WINDOW, STATE), *split_hashes(names(2) + names(1, 3) + names(1, 50), WIDTH))
    answer = answer_lookup(directory, ask(names(5), names(2, 49), b""))
    assert answer == LookupAnswer(lookup_id=5, present=[b"\1\1\0\1\0", b"\0\1", b""])
    assert not directory.prefetched
    assert directory.requests == ["req-1"] * 2, "the pool is told who asks"


def test_only_what_a_load_could_want_is_prefetched() -> None:
    directory = Directory(layout(FULL, WINDOW), *split_hashes(names(2) + names(1, 3) + names(1, 50), WIDTH))
    answer_lookup(directory, ask(names(5), names(2, 49), prefetch=True))
    assert directory.prefetched == [(0, names(2)), (1, names(1, 50))]


def test_a_directory_that_is_being_rebuilt_or_out_of_reach() -> None:
    directory = Directory(layout(FULL, WINDOW), names(1))
    directory.not_yet = True
    answer = answer_lookup(directory, ask(names(1), prefetch=True))
    assert answer.not_yet and answer.answered and not directory.prefetched
    directory.reached = False
    assert answer_lookup(directory, ask(names(1))) == LookupAnswer(lookup_id=5, present=[b""], answered=False)


@pytest.mark.parametrize("hashes", [(names(1)[:-1],), (names(1), names(1), names(1))])
def test_a_question_that_does_not_fit_the_layout(hashes: tuple[bytes, ...]) -> None:
    assert not answer_lookup(Directory(layout(FULL, WINDOW)), ask(*hashes)).answered


def test_rank_0_says_what_its_groups_are_called_also_while_the_pool_is_away(
    serve: Callable[[Answer], LookupServer], endpoint: str
) -> None:
    directory = Directory(layout(FULL, STATE, WINDOW))
    directory.reached = False
    serve(partial(answer_lookup, directory))
    assert stored_groups(endpoint, WAIT_S) == [FULL.fingerprint, WINDOW.fingerprint]


def test_a_rank_0_that_does_not_say_is_waited_for_no_longer_than_asked(endpoint: str) -> None:
    with pytest.raises(Unavailable, match=r"has not said within 0\.05 s"):
        stored_groups(endpoint, 0.05)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (LookupAnswer(lookup_id=0, present=[], answered=False), Unavailable),
        (LookupAnswer(lookup_id=0, present=[]), Unavailable),
        (NO_ANSWER, ProtocolError),
    ],
)
def test_an_answer_that_names_no_groups_is_an_error(
    serve: Callable[[Answer], LookupServer], endpoint: str, answer: LookupAnswer, expected: type[KVError]
) -> None:
    serve(lambda _: answer)
    with pytest.raises(expected):
        stored_groups(endpoint, WAIT_S)
