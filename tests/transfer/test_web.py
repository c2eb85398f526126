"""HTTP connections end in time, whatever the other side draws out, and those of others are served meanwhile."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstrata.transfer import web_protocol
from kvstrata.transfer.security.tls import ServerTls
from kvstrata.transfer.web import WebServer
from tests.certificates import Authority

DEADLINE_S = 10.0
BOUND_S = 0.3
LARGE = 64 << 20


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Reads bodies to their end; /large sends more than sockets hold, /now answers before it has read anything."""
    if scope["path"] != "/now":
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
    body = bytes(LARGE if scope["path"] == "/large" else 2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    for begin in range(0, len(body), 1 << 20):
        more = begin + (1 << 20) < len(body)
        await send({"type": "http.response.body", "body": body[begin : begin + (1 << 20)], "more_body": more})


@pytest.fixture
def serve() -> Iterator[Callable[..., WebServer]]:
    servers: list[WebServer] = []

    def start(**more: Any) -> WebServer:
        servers.append(WebServer(application, "127.0.0.1:0", **more).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_S", "BODY_S", "STALL_S", "HANDSHAKE_S"):
        monkeypatch.setattr(web_protocol, name, BOUND_S)


def connected(server: WebServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def ended(sock: socket.socket, drip: bytes = b"") -> float:
    """Send a byte of ``drip`` now and then until the server ends the connection; returns how long that took."""
    began = time.monotonic()
    sock.settimeout(0.02)
    while time.monotonic() < began + DEADLINE_S:
        try:
            if drip:
                sock.sendall(drip)
            if not sock.recv(4096):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        pytest.fail("the connection lives on")
    sock.close()
    return time.monotonic() - began


def answered(server: WebServer) -> bool:
    with connected(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return sock.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "begin, drip",
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nx-", b"a"),
        (b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"a"),
        (b"PUT /now HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"a"),
        (b"PUT /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTT", b"a"),
    ],
    ids=["silence", "head", "body", "body after the answer", "chunks after the answer", "second head"],
)
def test_what_is_dripped_is_cut(serve: Any, begin: bytes, drip: bytes) -> None:
    server = serve()
    with connected(server) as sock:
        sock.sendall(begin)
        assert BOUND_S * 0.5 < ended(sock, drip) < BOUND_S + 5.0
    assert answered(server)


def test_an_answer_that_nobody_takes_is_cut(serve: Any) -> None:
    server = serve()
    with connected(server) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(1)
        assert server._server.server_state.connections
        deadline = time.monotonic() + DEADLINE_S
        while server._server.server_state.connections and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not server._server.server_state.connections
    assert answered(server)


def test_a_handshake_that_is_not_made_is_cut(serve: Any, tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("server")
    server = serve(tls=ServerTls(pair.cert, pair.key))
    with connected(server) as sock:
        assert ended(sock) < BOUND_S + 5.0


def test_connections_that_send_nothing_do_not_take_the_place_of_others(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_protocol, "HEAD_S", 60.0)
    server = serve(requests_max=8)
    idle = [connected(server) for _ in range(40)]
    try:
        assert all(answered(server) for _ in range(10))
    finally:
        for sock in idle:
            sock.close()


def test_connections_between_two_requests_do_not_take_the_place_of_others(serve: Any) -> None:
    server = serve(requests_max=8)
    used = []
    try:
        for _ in range(16):
            used.append(connected(server))
            used[-1].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert used[-1].recv(4096).startswith(b"HTTP/1.1 200")
        assert all(answered(server) for _ in range(10))
    finally:
        for sock in used:
            sock.close()


def test_who_begins_a_handshake_too_many_takes_the_place_of_the_oldest(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(web_protocol, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(web_protocol, "HANDSHAKE_S", 60.0)
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    server = serve(tls=ServerTls(pair.cert, pair.key))
    idle = [connected(server) for _ in range(12)]
    try:
        first = idle[0]
        first.settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):
            assert first.recv(1) == b""
        context = ssl.create_default_context(cafile=authority.ca)
        with context.wrap_socket(connected(server), server_hostname="localhost") as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        for sock in idle:
            sock.close()


def test_handshakes_that_failed_do_not_cut_one_that_goes_on(
    serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(web_protocol, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(web_protocol, "HANDSHAKE_S", 60.0)
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    server = serve(tls=ServerTls(pair.cert, pair.key))
    context = ssl.create_default_context(cafile=authority.ca)
    with connected(server) as slow:
        for _ in range(12):
            with connected(server) as failing:
                failing.shutdown(socket.SHUT_WR)
                ended(failing)
        with context.wrap_socket(slow, server_hostname="localhost") as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_slow_requests_within_the_bounds_and_many_on_one_connection_are_served(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_protocol, "HEAD_S", 60.0)
    server = serve()
    with connected(server) as sock:
        for _ in range(3):
            for byte in b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc":
                sock.sendall(bytes([byte]))
            said = b""
            while not said.endswith(b"\r\n\r\n" + bytes(2)):
                said += sock.recv(4096)
            assert said.startswith(b"HTTP/1.1 200")


def test_it_stops_in_time_with_a_dripper(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_protocol, "BODY_S", 60.0)
    server = serve()
    with connected(server) as sock:
        sock.sendall(b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5.0
    assert all(not thread.is_alive() for thread in threading.enumerate() if thread is server._thread)
