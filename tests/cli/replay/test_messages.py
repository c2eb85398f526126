from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.cli.replay.messages import Finish, Message, Outcome, Pipe, PipeClosed, Ready, Work
from kvstrata.proto.errors import ProtocolError, Unavailable


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours), Pipe(theirs), theirs


messages = st.one_of(
    st.builds(Work, st.integers(0, 1 << 40), st.text(max_size=20), st.integers(0, 9), st.integers(0, 9), st.binary()),
    st.builds(
        Outcome, st.integers(0, 9), reasons=st.dictionaries(st.text(max_size=5), st.integers(0, 9)), body=st.binary()
    ),
    st.builds(Ready, st.integers(0, 9), st.text(max_size=50)),
    st.just(Finish()),
)


@given(messages)
def test_what_is_sent_is_received(message: Message) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Pipe(ours).send(message, 1.0)
        assert Pipe(theirs).receive_any(1.0) == message


def test_a_large_body_goes_through_while_it_is_read(ends: tuple[Pipe, Pipe, socket.socket]) -> None:
    work = Work(1, "", 0, 0, bytes(range(256)) * 40_000)
    sender = threading.Thread(target=ends[0].send, args=(work, 5.0))
    sender.start()
    assert ends[1].receive(Work, 5.0) == work
    sender.join(5.0)


def test_silence_ends_at_the_deadline(ends: tuple[Pipe, Pipe, socket.socket]) -> None:
    with pytest.raises(Unavailable, match="in time"):
        ends[0].receive(Work, 0.05)
    ends[2].send(b"\x08\0\0")
    with pytest.raises(Unavailable, match="in time"):
        ends[0].receive(Work, 0.05)


def test_an_end_that_closes_is_known(ends: tuple[Pipe, Pipe, socket.socket]) -> None:
    ends[2].send(struct.pack("<II", 100, 0) + b"{")
    ends[2].close()
    with pytest.raises(PipeClosed):
        ends[0].receive(Work, 1.0)
    with pytest.raises(PipeClosed):
        ends[0].send(Work(1, "", 0, 0, bytes(1 << 22)), 1.0)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<II", 1 << 30, 0),
        struct.pack("<II", 2, 1 << 30),
        struct.pack("<II", 2, 0) + b"{}",
        struct.pack("<II", 2, 0) + b"[]",
        struct.pack("<II", 3, 0) + b"\xff\xfe\xfd",
        struct.pack("<II", 17, 0) + b'{"kind":"nobody"}',
        struct.pack("<II", 15, 0) + b'{"kind":"work"}',
        struct.pack("<II", 25, 0) + b'{"kind":"finish","no":17}',
    ],
)
def test_a_frame_that_is_no_message_is_refused(ends: tuple[Pipe, Pipe, socket.socket], frame: bytes) -> None:
    ends[2].sendall(frame)
    with pytest.raises(ProtocolError):
        ends[0].receive_any(1.0)


def test_another_message_than_expected_is_refused(ends: tuple[Pipe, Pipe, socket.socket]) -> None:
    ends[1].send(Finish(), 1.0)
    with pytest.raises(ProtocolError, match="expected 'work', got 'finish'"):
        ends[0].receive(Work, 1.0)
