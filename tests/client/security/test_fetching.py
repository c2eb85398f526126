"""How a ticket is fetched, from masters of all kinds: what each answer means, and what is never sent or believed."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest

from kvstrata.client.security.credentials import Credentials
from kvstrata.client.security.fetched import FetchedTickets, fetch_ticket
from kvstrata.client.security.https import ANSWER_BYTES_MAX, request
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto.errors import Busy, Forbidden, InvalidArgument, KVError, Unauthenticated, Unavailable
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.security.rights import Rights, Role
from kvstrata.transfer.security.tickets import TicketKeys, issue
from kvstrata.transfer.server import ChannelServer

TOKEN = "kvs_" + "t" * 43
SHOWN = Credentials(token=TOKEN)
TICKET = issue(TicketKeys.parse("k:" + "5a" * 32), Rights("me", Role.CLIENT, ("*",), ("*",)), 1e9)


class FakeMaster:
    """A channel whose hello names an HTTP server that answers everybody with ``answer``, and notes what came."""

    def __init__(self) -> None:
        self.answer, self.role, self.asked = b"", "master", b""
        self.http = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.http = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._loops = Loops()
        self._channel = ChannelServer(
            {}, lambda _: pb.HelloOk(role=self.role, http=self.http), lambda _: None, self._loops
        )
        self.address = self._channel.listen_tcp("127.0.0.1:0")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.asked += connection.recv(65536)
                try:
                    connection.sendall(self.answer)
                except OSError:
                    pass  # it has heard enough

    def answers(self, status: int, body: bytes = b"") -> None:
        self.answer = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self._channel.stop(0.1)
        self._loops.stop()


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    master = FakeMaster()
    yield master
    master.stop()


def fetch(master: FakeMaster, shown: Credentials = SHOWN, seconds: float = 5.0) -> pb.Ticket:
    return fetch_ticket(master.address, shown, time.monotonic() + seconds)


def test_a_ticket_is_asked_for_with_the_token(master: FakeMaster) -> None:
    master.answers(200, TICKET.SerializeToString())
    assert fetch(master) == TICKET
    assert master.asked.startswith(b"POST /ticket ")
    assert f"authorization: Bearer {TOKEN}".encode() in master.asked


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, Unauthenticated, "does not know this token"),
        (403, Forbidden, "of this role"),
        (404, Unauthenticated, "without --tokens"),
        (429, Busy, "too many"),
        (503, Unavailable, "503"),
        (302, Unavailable, "302"),
    ],
)
def test_what_an_answer_means(master: FakeMaster, status: int, kind: type[KVError], said: str) -> None:
    master.answers(status)
    with pytest.raises(kind, match=said) as refused:
        fetch(master)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 x\r\ncontent-length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 x\r\ncontent-length: 3\r\n\r\n\xff\xff\xff",
    ],
)
def test_garbage_is_an_absent_master(master: FakeMaster, answer: bytes) -> None:
    master.answer = answer
    with pytest.raises(Unavailable):
        fetch(master)


def test_an_answer_is_bounded(master: FakeMaster) -> None:
    master.answers(200, bytes(ANSWER_BYTES_MAX + 1))
    with pytest.raises(Unavailable, match="more than"):
        fetch(master)


@pytest.mark.parametrize("named", ["127.0.0.1:http", "127.0.0.1:²", "127.0.0.1", ":80", "unix:/x", "127.0.0.1:99999"])
def test_an_endpoint_that_is_none_is_an_absent_master(master: FakeMaster, named: str) -> None:
    master.http = named
    with pytest.raises(Unavailable, match="not HOST:PORT"):
        fetch(master)


@pytest.mark.parametrize("host", ["x" * 64, "a\0b", "..", "é" * 70, "x y", "a\r\nb"])
def test_a_host_that_no_name_can_be_is_an_absent_master(master: FakeMaster, host: str) -> None:
    master.http = f"{host}:80"
    with pytest.raises(Unavailable):
        fetch(master, Credentials(token=TOKEN, insecure=True))


def test_other_masters_are_asked_when_one_names_nonsense(master: FakeMaster) -> None:
    master.http = "127.0.0.1:http"

    def ask(address: str, shown: Credentials, deadline: float) -> pb.Ticket:
        return TICKET if address == "good" else fetch_ticket(address, shown, deadline)

    with FetchedTickets([master.address, "good"], SHOWN, fetch=ask).start() as tickets:
        assert tickets.current() == TICKET


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 x\r\ncontent-length: 100\r\n\r\n", b"HTTP/1.1 200 x\r\nx-y: "])
def test_an_answer_that_drips_ends_by_the_deadline(begin: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(begin)
                while not over.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(Unavailable, match="in time"):
                request(SHOWN, "GET", f"127.0.0.1:{listener.getsockname()[1]}", "/", deadline=began + 0.3)
            assert time.monotonic() - began < 3.0
        finally:
            over.set()
            thread.join(5)


def test_a_token_is_not_sent_to_a_host_that_a_hello_names(master: FakeMaster) -> None:
    master.http = "192.0.2.1:80"
    with pytest.raises(Unauthenticated, match="without TLS"):
        fetch(master)
    assert not master.asked


def test_a_master_without_tls_gets_no_token_of_who_has_an_authority(master: FakeMaster, authority: Credentials) -> None:
    with pytest.raises(Unavailable):
        fetch(master, authority)
    assert TOKEN.encode() not in master.asked


def test_who_is_no_master_is_not_asked(master: FakeMaster) -> None:
    master.role = "storage"
    with pytest.raises(InvalidArgument, match="not a master"):
        fetch(master)
    assert not master.asked


@pytest.mark.parametrize(
    "holder, shows_token, served", [("node", True, False), ("node", False, True), ("master", True, True)]
)
def test_no_token_goes_to_a_host_with_a_nodes_certificate(
    authority: Credentials, holder: str, shows_token: bool, served: bool
) -> None:
    import datetime

    from kvstrata.cli.authority import Authority

    assert authority.ca is not None
    folder = authority.ca.parent
    Authority.read(folder).give(folder, holder, ["localhost"], datetime.datetime.now(datetime.UTC))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / f"{holder}.pem", folder / f"{holder}-key.pem")
    heard = b""

    def serve() -> None:
        nonlocal heard
        plain, _ = listener.accept()
        plain.settimeout(5)
        with context.wrap_socket(plain, server_side=True) as connection, suppress(OSError):
            heard = connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 x\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with nullcontext() if served else pytest.raises(Unauthenticated, match="of no master"):
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            request(authority, "GET", endpoint, "/", deadline=time.monotonic() + 5, shows_token=shows_token)
        thread.join(5)
    assert bool(heard) == served and (TOKEN.encode() in heard) == (served and shows_token)


@pytest.fixture
def authority(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    pytest.importorskip("cryptography")
    import datetime

    from kvstrata.cli.authority import Authority

    folder = tmp_path_factory.mktemp("ca")
    Authority.new(datetime.datetime.now(datetime.UTC)).write(folder)
    return Credentials(token=TOKEN, ca=folder / "ca.pem")
