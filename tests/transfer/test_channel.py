"""The framed channel, both ends, over real sockets."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import wire
from kvstrata.proto.errors import (
    Busy,
    Closed,
    InvalidArgument,
    KVError,
    ProtocolError,
    QuotaExceeded,
    Unavailable,
    VersionMismatch,
)
from kvstrata.proto.wire import Kind
from kvstrata.transfer import server as server_module
from kvstrata.transfer.channel import Channel
from kvstrata.transfer.connection import UNPOLLED_MAX, Connection
from kvstrata.transfer.frames import Disconnected, Frame, FrameStream, Late, Silent
from kvstrata.transfer.identity import Identity, parse_address
from kvstrata.transfer.server import Reply
from kvstrata.transfer.sessions import ServerConnection
from tests.waiting import until

Serve = Callable[..., Any]


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def me() -> Identity:
    return Identity.new(name="test")


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
@pytest.mark.parametrize("local", [True, False])
def test_a_message_of_any_size_comes_back(serve: Serve, me: Identity, size: int, local: bool) -> None:
    running = serve()
    channel = Channel([f"unix:{running.unix}" if local else running.address], me)
    message = os.urandom(size)
    for _ in range(3):
        assert channel.call(Kind.PING, message, soon()).message == message
    assert len(running.server.sessions) == 1
    channel.close()
    until(lambda: len(running.ended) == 1)


def test_raw_bytes_land_where_they_should(serve: Serve, me: Identity) -> None:
    payload = os.urandom(5_000_000)
    whole = memoryview(payload)
    parts = [whole[i : i + 3000] for i in range(0, len(payload), 3000)]

    def acquire(_: ServerConnection, __: Frame) -> Reply:
        return Reply(Kind.ACQUIRE_OK, b"", raw=parts)

    channel = Channel([serve({Kind.ACQUIRE: acquire}).address], me)
    target = bytearray(len(payload))
    view = memoryview(target)
    pieces = [view[i : i + 70_001] for i in range(0, len(payload), 70_001)]
    order: list[int] = []
    with channel.exchange(Kind.ACQUIRE, b"", soon()) as (connection, frame):
        assert frame.raw_bytes == len(payload)
        connection.receive_raw(pieces, soon(), order.append)
    assert target == payload and order == list(range(len(pieces)))
    channel.close()


def test_unread_raw_bytes_cost_the_connection_not_the_next_call(serve: Serve, me: Identity) -> None:
    def acquire(_: ServerConnection, __: Frame) -> Reply:
        return Reply(Kind.ACQUIRE_OK, b"", raw=[memoryview(b"x" * 100_000)])

    channel = Channel([serve({Kind.ACQUIRE: acquire}).address], me)
    with channel.exchange(Kind.ACQUIRE, b"", soon()):
        pass
    assert channel.call(Kind.PING, b"ok", soon()).message == b"ok"
    channel.close()


def test_errors_travel_by_name_and_leave_the_connection_usable(serve: Serve, me: Identity) -> None:
    def refuse(_: ServerConnection, __: Frame) -> Reply:
        raise QuotaExceeded("tenant t is full")

    def crash(_: ServerConnection, __: Frame) -> Reply:
        raise ZeroDivisionError("boom")

    running = serve({Kind.RESERVE: refuse, Kind.COMMIT: crash})
    channel = Channel([running.address], me)
    with pytest.raises(QuotaExceeded, match="tenant t"):
        channel.call(Kind.RESERVE, b"", soon())
    with pytest.raises(KVError, match="ZeroDivisionError"):
        channel.call(Kind.COMMIT, b"", soon())
    assert running.server.counts["handler_errors"] == 1
    assert channel.call(Kind.PING, b"", soon()).kind == Kind.PONG and channel.breaker.closed
    channel.close()


@pytest.mark.parametrize("pays", [False, True])
def test_answers_are_polled_for_where_that_pays(
    serve: Serve, me: Identity, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = 0

    def spin(_: FrameStream, __: float) -> bool:
        nonlocal polls
        polls += 1
        return pays

    monkeypatch.setattr(FrameStream, "spin", spin)
    connection = Connection.open(serve().address, me)
    connection.spins = True
    polls, calls = 0, 300
    for number in range(calls):
        assert connection.call(Kind.PING, b"%d" % number, soon()).message == b"%d" % number
    if pays:
        assert polls == calls
    else:
        assert calls // (UNPOLLED_MAX + 1) <= polls < 20, "each in vain keeps a core busy"
        pays = True
        for _ in range(UNPOLLED_MAX + 1):
            connection.call(Kind.PING, b"", soon())
        polls = 0
        connection.call(Kind.PING, b"", soon())
        connection.call(Kind.PING, b"", soon())
        assert polls == 2, "and it is tried again"
        polls, pays = 0, False
        for _ in range(3):
            connection.call(Kind.PING, b"", soon())
        assert polls == 2, "what paid last is soon tried again"
    connection.close()


def test_progress_keeps_a_slow_answer_alive(serve: Serve, me: Identity) -> None:
    def slow(_: ServerConnection, __: Frame) -> Reply:
        time.sleep(0.8)
        return Reply(Kind.OK)

    channel = Channel([serve({Kind.COMMIT: slow}).address], me)
    assert channel.call(Kind.COMMIT, b"", soon()).kind == Kind.OK
    with pytest.raises(Late):
        channel.call(Kind.COMMIT, b"", soon(0.4))
    assert channel.breaker.closed, "a peer that is at work is not a dead peer"
    channel.close()


def test_progress_comes_also_after_a_time_in_which_nobody_asked(
    serve: Serve, me: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "AWAKE_S", 0.0)
    monkeypatch.setattr(server_module, "DOZE_S", 60.0)
    monkeypatch.setattr(server_module, "DOZE_BOUND_S", 200.0)

    def slow(_: ServerConnection, __: Frame) -> Reply:
        time.sleep(0.8)
        return Reply(Kind.OK)

    running = serve({Kind.COMMIT: slow})
    channel = Channel([running.address], me)
    for _ in range(2):
        until(lambda: running.server._dozing)
        assert channel.call(Kind.COMMIT, b"", soon()).kind == Kind.OK
    channel.close()


def test_a_short_deadline_is_kept_and_blames_nobody(serve: Serve, me: Identity) -> None:
    def slow(_: ServerConnection, __: Frame) -> Reply:
        time.sleep(0.5)
        return Reply(Kind.OK)

    channel = Channel([serve({Kind.COMMIT: slow}).address], me)
    channel.call(Kind.PING, b"", soon())
    with pytest.raises(Late):
        channel.call(Kind.COMMIT, b"", soon(0.05))
    assert channel.breaker.closed
    assert channel.call(Kind.PING, b"", soon()).kind == Kind.PONG
    channel.close()


def test_silence_opens_the_breaker_and_a_probe_closes_it(me: Identity) -> None:
    """A listener that accepts and says nothing is what a stopped process looks like."""
    mute = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    channel = Channel([address], me, self_probing=False)
    with pytest.raises(Silent):
        channel.call(Kind.PING, b"", soon())
    started = time.monotonic()
    for _ in range(100):
        with pytest.raises(Unavailable, match="breaker open"):
            channel.call(Kind.PING, b"", soon())
    assert time.monotonic() - started < 0.25, "with the breaker open nobody waits"
    mute.close()
    channel.close()


def test_a_restarted_peer_is_found_again(serve: Serve, me: Identity) -> None:
    first = serve()
    port = first.address
    channel = Channel([port], me, self_probing=False)
    channel.call(Kind.PING, b"", soon())
    first.stop()
    with pytest.raises(Unavailable):
        channel.call(Kind.PING, b"", soon())
    second = serve()
    channel.addresses = (second.address,)
    until(channel.probe)
    assert channel.call(Kind.PING, b"", soon()).kind == Kind.PONG
    channel.close()


def test_an_idle_connection_that_died_is_replaced_unseen(serve: Serve, me: Identity) -> None:
    running = serve()
    channel = Channel([running.address], me)
    channel.call(Kind.PING, b"", soon())
    for session in list(running.server.sessions.values()):
        for connection in list(session.connections):
            connection.stream.sock.shutdown(socket.SHUT_RDWR)
    assert channel.call(Kind.PING, b"", soon()).kind == Kind.PONG
    channel.close()


def test_another_incarnation_can_be_refused(serve: Serve, me: Identity) -> None:
    def accept(hello: pb.HelloOk) -> None:
        if hello.incarnation != 8:
            raise Disconnected("restarted")

    channel = Channel([serve(incarnation=7).address], me, accept=accept)
    with pytest.raises(Disconnected):
        channel.call(Kind.PING, b"", soon())
    channel.close()


def test_connections_are_bounded(serve: Serve, me: Identity) -> None:
    release = threading.Event()

    def wait(_: ServerConnection, __: Frame) -> Reply:
        release.wait(5)
        return Reply(Kind.OK)

    channel = Channel([serve({Kind.COMMIT: wait}).address], me, connections_max=2)
    threads = [threading.Thread(target=channel.call, args=(Kind.COMMIT, b"", soon())) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: channel._in_use == 2)
    with pytest.raises(Busy):
        channel.call(Kind.PING, b"", soon(0.3))
    release.set()
    for thread in threads:
        thread.join(5)
    assert channel.call(Kind.PING, b"", soon()).kind == Kind.PONG
    channel.close()


@pytest.mark.parametrize(("oldest", "newest", "works"), [(0, 1, True), (1, 9, True), (2, 9, False), (0, 0, False)])
def test_versions_are_agreed_or_refused_by_name(
    serve: Serve, me: Identity, oldest: int, newest: int, works: bool
) -> None:
    running = serve()
    hello = me.hello()
    hello.protocol, hello.protocol_min = newest, oldest
    sock = socket.create_connection(_where(running.address))
    sock.sendall(_frame(Kind.HELLO, hello.SerializeToString()))
    kind, message = _read_frame(sock)
    if works:
        assert kind == Kind.HELLO_OK and pb.HelloOk.FromString(message).protocol == 1
    else:
        failure = pb.Failure.FromString(message)
        assert failure.code == VersionMismatch.__name__ and "upgrade" in failure.message
        assert running.server.counts["version_mismatches"] == 1
        assert running.server.refused_versions.counts() == {hello.software: 1}
    sock.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=200), greeted=st.booleans())
def test_garbage_ends_its_connection_only(serve: Serve, me: Identity, garbage: bytes, greeted: bool) -> None:
    running = _shared(serve)
    sock = socket.create_connection(_where(running.address), timeout=10)
    if greeted:
        sock.sendall(_frame(Kind.HELLO, me.hello().SerializeToString()))
        _read_frame(sock)
    sock.sendall(garbage)
    sock.shutdown(socket.SHUT_WR)
    while sock.recv(65536):
        pass
    sock.close()
    channel = Channel([running.address], me)
    assert channel.call(Kind.PING, b"alive", soon()).message == b"alive"
    channel.close()


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<2sBBIIQ", b"KV", 1, Kind.PING, 1, 0xFFFFFFFF, 0),
        struct.pack("<2sBBIIQ", b"KV", 1, Kind.WRITE, 1, 0, 1 << 60),
        struct.pack("<2sBBIIQ", b"KV", 1, Kind.PING, 1, 0, 5),
        struct.pack("<2sBBIIQ", b"KV", 9, Kind.PING, 1, 0, 0),
        struct.pack("<2sBBIIQ", b"KV", 1, 250, 1, 0, 0),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["oversized message", "oversized raw", "raw where none may be", "version", "kind", "http"],
)
def test_a_bad_header_is_refused_before_anything_is_allocated(serve: Serve, me: Identity, header: bytes) -> None:
    running = serve()
    sock = socket.create_connection(_where(running.address), timeout=10)
    sock.sendall(_frame(Kind.HELLO, me.hello().SerializeToString()))
    _read_frame(sock)
    sock.sendall(header)
    kind, message = _read_frame(sock)
    assert kind == Kind.FAILURE and pb.Failure.FromString(message).code == ProtocolError.__name__
    assert sock.recv(1) == b""
    assert running.server.counts["malformed_frames"] == 1
    sock.close()


def test_a_forked_child_cannot_use_or_hold_the_parents_channel(serve: Serve, me: Identity) -> None:
    running = serve()
    channel = Channel([f"unix:{running.unix}"], me)
    channel.call(Kind.PING, b"", soon())
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            channel.call(Kind.PING, b"", soon())
        except Closed:
            code = 0
        os.write(ready[1], b"%d" % code)
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"0"
        assert channel.call(Kind.PING, b"parent", soon()).message == b"parent"
        channel.close()
        until(lambda: len(running.ended) == 1)
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *go):
            os.close(fd)


def test_a_dead_process_ends_its_session_though_a_child_holds_the_socket(serve: Serve, me: Identity) -> None:
    running = serve()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        connection = Connection.open(f"unix:{running.unix}", me)
        os.set_inheritable(connection.stream.sock.fileno(), True)
        sock = connection.stream.sock.fileno()
        grandchild = os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", f"exec 9<&{sock}; sleep 30"])
        os.write(write, b"%d" % grandchild)
        os._exit(0)
    os.waitpid(child, 0)
    grandchild = int(os.read(read, 20))
    try:
        until(lambda: len(running.ended) == 1)
    finally:
        os.kill(grandchild, 9)
        os.close(read)
        os.close(write)


def test_use_after_close_is_a_clear_error(serve: Serve, me: Identity) -> None:
    channel = Channel([serve().address], me)
    channel.close()
    channel.close()
    with pytest.raises(Closed, match="closed"):
        channel.call(Kind.PING, b"", soon())


@pytest.mark.parametrize("address", ["", "nohost", "host:", "host:99999", "host:x", ":1"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(address)


_kept: list[Any] = []


def _shared(serve: Serve) -> Any:
    """One server for all examples of one property."""
    if not _kept or _kept[-1].server._stopping:
        _kept.append(serve())
    return _kept[-1]


def _where(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _frame(kind: int, message: bytes) -> bytes:
    return wire.encode_header(kind, 1, len(message)) + message


def _read_frame(sock: socket.socket) -> tuple[int, bytes]:
    head = _exactly(sock, wire.HEADER_BYTES)
    header = wire.decode_header(head)
    return header.kind, _exactly(sock, header.message_bytes)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the server closed the connection"
        data += part
    return data


def test_progress_does_not_stretch_a_short_deadline(serve: Serve, me: Identity) -> None:
    def slow(_: ServerConnection, __: Frame) -> Reply:
        time.sleep(0.8)
        return Reply(Kind.OK)

    channel = Channel([serve({Kind.COMMIT: slow}).address], me)
    started = time.monotonic()
    with pytest.raises(Late):
        channel.call(Kind.COMMIT, b"", soon(0.15))
    assert time.monotonic() - started < 0.6 and channel.breaker.closed
    channel.close()


def test_a_refusal_near_the_deadline_leaves_the_silence_bound_as_it_was(serve: Serve, me: Identity) -> None:
    def refuse(_: ServerConnection, __: Frame) -> Reply:
        raise QuotaExceeded("full")

    def slow(_: ServerConnection, __: Frame) -> Reply:
        time.sleep(0.09)
        return Reply(Kind.OK)

    channel = Channel([serve({Kind.RESERVE: refuse, Kind.COMMIT: slow}).address], me)
    channel.call(Kind.PING, b"", soon())
    with pytest.raises(QuotaExceeded):
        channel.call(Kind.RESERVE, b"", soon(0.05))
    assert channel.call(Kind.COMMIT, b"", soon()).kind == Kind.OK
    channel.close()


def test_a_frame_that_trickles_ends_its_connection(serve: Serve, me: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the frame does not: a sender must not hold a thread for ever."""
    monkeypatch.setattr(server_module, "FRAME_S", 0.5)
    running = serve()
    sock = socket.create_connection(_where(running.address), timeout=10)
    sock.sendall(_frame(Kind.HELLO, me.hello().SerializeToString()))
    _read_frame(sock)
    ends = soon(10)
    with pytest.raises(ConnectionError):
        for byte in _frame(Kind.PING, b"x" * 5000):
            assert time.monotonic() < ends, "still served"
            sock.sendall(bytes([byte]))
            time.sleep(0.01)
    sock.close()


@pytest.mark.parametrize("left_s", [0.15, 5.0])
def test_work_is_done_between_the_request_and_its_answer(serve: Serve, me: Identity, left_s: float) -> None:
    """Also when the deadline is nearer than the silence that a connection bears."""
    asked, done = threading.Event(), threading.Event()

    def reserve(_: ServerConnection, __: Frame) -> Reply:
        asked.set()
        assert done.wait(5)
        return Reply(Kind.RESERVE_OK)

    def work() -> None:
        assert asked.wait(5)
        done.set()

    channel = Channel([serve({Kind.RESERVE: reserve}).address], me)
    channel.call(Kind.PING, b"", soon())
    assert channel.call(Kind.RESERVE, b"", soon(left_s), meanwhile=work).kind == Kind.RESERVE_OK
    channel.close()
