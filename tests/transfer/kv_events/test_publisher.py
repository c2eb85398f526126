"""The publisher over real ZMQ: order, replay, gaps where something was lost, endpoints."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.kv_events import publisher as module
from kvstrata.transfer.kv_events.events import AllBlocksCleared, BlockRemoved, decode
from kvstrata.transfer.kv_events.publisher import END, EPOCH_SHIFT, Publisher, endpoint_of
from kvstrata.transfer.loops import Loops

WAIT_MS = 10_000


@pytest.fixture
def publisher() -> Iterator[Callable[..., Publisher]]:
    loops, made = Loops(), []

    def make(**more: Any) -> Publisher:
        made.append(Publisher(loops, endpoint_of("0"), endpoint_of("0"), clock=lambda: 1000.0, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.close()
    assert loops.problems() == []
    loops.stop()


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def past(context: Any, publisher: Publisher, start: int = 0) -> list[tuple[int, list[Any]]]:
    """What the replay socket gives from ``start`` on."""
    found = []
    with context.socket(zmq.DEALER) as request:
        request.connect(publisher.replay)
        request.send_multipart((b"", start.to_bytes(8, "big")))
        while request.poll(WAIT_MS):
            _, sequence, payload = request.recv_multipart()
            if sequence == END:
                return found
            found.append((int.from_bytes(sequence, "big"), decode(payload).events))
    raise AssertionError("no end of the answer")


def sent(context: Any, publisher: Publisher, count: int) -> list[tuple[int, list[Any]]]:
    """All, once there are ``count`` of them."""
    while len(found := past(context, publisher)) < count:
        pass
    return found


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(list(numbers), "GPU")


def test_batches_come_in_order_with_topic_and_sequence(publisher: Callable[..., Publisher], context: Any) -> None:
    ours = publisher()
    with context.socket(zmq.SUB) as reader:
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(ours.endpoint)
        known = 0
        while not reader.poll(20):  # until it has joined
            ours.publish([AllBlocksCleared()], "kv@hello")
            known += 1
        ours.publish([removed(1), removed(2)], "kv@a")
        ours.publish([], "kv@nothing")
        ours.publish([removed(3)], "kv@b")
        heard = []
        while not heard or heard[-1][0] != b"kv@b":
            assert reader.poll(WAIT_MS)
            heard.append(reader.recv_multipart())
        sequences = [int.from_bytes(frames[1], "big") for frames in heard]
        assert sequences[-1] == (1000 << EPOCH_SHIFT) + known + 1 == sequences[-2] + 1
        assert decode(heard[-2][2]).events == [removed(1), removed(2)] and heard[-2][0] == b"kv@a"


def test_the_past_is_told_again_from_a_sequence_on(publisher: Callable[..., Publisher], context: Any) -> None:
    ours = publisher()
    for number in range(5):
        ours.publish([removed(number)])
    everything = sent(context, ours, 5)
    assert [said for _, said in everything] == [[removed(number)] for number in range(5)]
    assert past(context, ours, everything[3][0]) == everything[3:]
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(ours.replay)
        for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"]):
            stranger.send_multipart(frames)
    assert past(context, ours) == everything, "it lives"


def test_what_is_kept_is_bounded(
    publisher: Callable[..., Publisher], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 3)
    ours = publisher()
    for number in range(8):
        ours.publish([removed(number)])
    while ours.published < 8:
        past(context, ours)
    assert [said for _, said in past(context, ours)] == [[removed(number)] for number in (5, 6, 7)]


def test_a_full_queue_leaves_a_gap(
    publisher: Callable[..., Publisher], context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 0)
    ours = publisher()
    ours.publish([removed(1)])
    ours.skip(2)
    monkeypatch.setattr(module, "WAITING_MAX", 10)
    ours.publish([removed(2)])
    assert [sequence & 0xFFFFFFFF for sequence, _ in sent(context, ours, 1)] == [3] and ours.dropped == 3


def test_endpoints() -> None:
    assert endpoint_of("7403") == endpoint_of("127.0.0.1:7403") == "tcp://127.0.0.1:7403"
    assert endpoint_of("tcp://*:5557") == "tcp://*:5557" and endpoint_of("tcp://0.0.0.0:0") == "tcp://0.0.0.0:*"
    assert endpoint_of("ipc:///run/x") == "ipc:///run/x" and endpoint_of("[::1]:5") == "tcp://[::1]:5"
    for wrong in ("", "tcp://", "host", "tcp://a:b", "70000", "udp://a:1", "a b:1", "ipc://"):
        with pytest.raises(ConfigError, match="no place for KV events"):
            endpoint_of(wrong)


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    loops = Loops()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another port"):
            Publisher(loops, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert loops.ages_s() == {}


def test_a_turn_that_does_not_end_keeps_its_sockets_until_it_does(
    publisher: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    ours, within, go_on, failures = publisher(), threading.Event(), threading.Event(), []
    usual = ours._send

    def slow() -> None:
        within.set()
        assert go_on.wait(WAIT_MS / 1e3)
        try:
            usual()
        except BaseException as error:
            failures.append(error)
            raise

    monkeypatch.setattr(ours, "_send", slow)
    ours.publish([removed(1)])
    assert within.wait(WAIT_MS / 1e3)
    ours.close()
    assert not ours._socket.closed
    go_on.set()
    ours._loop.stop(WAIT_MS / 1e3)
    assert ours._socket.closed and not failures and ours.published == 1
