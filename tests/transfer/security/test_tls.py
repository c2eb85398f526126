"""TLS over real sockets: who is believed, who is served, and certificates that change under a server."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.certificate_end import not_after
from kvstrata.transfer.security.tls import SOON_S, ServerTls, client_context, common_names
from kvstrata.transfer.web import WebServer
from tests.certificates import Authority, Pair

DEADLINE_S = 10.0


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the common names of the caller's certificate."""
    names = ",".join(scope["state"].get("certificate", ()))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(names))]})
    await send({"type": "http.response.body", "body": names.encode()})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def serve() -> Iterator[Callable[..., WebServer]]:
    servers: list[WebServer] = []

    def start(tls: ServerTls | None) -> WebServer:
        servers.append(WebServer(hello, "127.0.0.1:0", tls=tls).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def get(server: WebServer, context: ssl.SSLContext, host: str = "127.0.0.1") -> tuple[str, bytes]:
    """The answer, and the server's certificate as DER."""
    connection = http.client.HTTPSConnection(
        host, int(server.address.rpartition(":")[2]), context=context, timeout=DEADLINE_S
    )
    try:
        connection.request("GET", "/")
        shown = connection.sock.getpeercert(binary_form=True)
        assert shown is not None
        return connection.getresponse().read().decode(), shown
    finally:
        connection.close()


def tls_of(pair: Pair, **more: Any) -> ServerTls:
    return ServerTls(pair.cert, pair.key, **more)


def test_only_servers_of_the_authority_that_are_named_so_and_have_not_ended_are_believed(
    authority: Authority, serve: Any, tmp_path: Path
) -> None:
    context = client_context(authority.ca)
    good = serve(tls_of(authority.pair("good")))
    assert get(good, context)[0] == ""
    assert get(good, context, "localhost")[0] == ""
    refusals = {
        "IP address mismatch": authority.pair("elsewhere", ("other.example.org",)),
        "certificate has expired": authority.pair("ended", days=-1),
        "self-signed|unable to get local issuer": Authority(tmp_path / "other", "other-ca").pair("stranger"),
    }
    for says, pair in refusals.items():
        with pytest.raises(ssl.SSLCertVerificationError, match=says):
            get(serve(tls_of(pair)), context)


def test_old_versions_of_tls_and_plain_http_get_nothing(authority: Authority, serve: Any) -> None:
    server = serve(tls_of(authority.pair("good")))
    old = client_context(authority.ca)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        get(server, old)
    plain = http.client.HTTPConnection(*_where(server), timeout=DEADLINE_S)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.request("GET", "/")
        plain.getresponse()
    plain.close()
    with socket.create_connection(_where(server), DEADLINE_S) as garbage:
        garbage.sendall(b"\x16\x03\x01\xff\xff" + bytes(100))
        garbage.shutdown(socket.SHUT_WR)
        while garbage.recv(4096):
            pass
    assert get(server, client_context(authority.ca))[0] == "", "and serves on"


def test_a_client_that_wants_tls_does_not_speak_with_a_server_without(authority: Authority, serve: Any) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        get(serve(None), client_context(authority.ca))


def test_with_client_certificates_nobody_else_is_served(authority: Authority, serve: Any, tmp_path: Path) -> None:
    server = serve(tls_of(authority.pair("server"), ca=authority.ca, client_certs=True))
    mine = authority.pair("prom.example.org")
    assert get(server, client_context(authority.ca, mine.cert, mine.key))[0] == "prom.example.org"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        get(server, client_context(authority.ca))
    for bad in (Authority(tmp_path / "other", "other-ca").pair("stranger"), authority.pair("ended", days=-1)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(server, client_context(authority.ca, bad.cert, bad.key))


def test_a_replaced_certificate_is_shown_to_the_next_caller_and_a_bad_one_is_not(
    authority: Authority, serve: Any
) -> None:
    now = [0.0]
    pair = authority.pair("server")
    tls = tls_of(pair, clock=lambda: now[0])
    server, context = serve(tls), client_context(authority.ca)
    first = get(server, context)[1]
    standing = http.client.HTTPSConnection(*_where(server), context=context, timeout=DEADLINE_S)
    standing.request("GET", "/")
    standing.getresponse().read()
    authority.pair("server")
    now[0] += 10
    second = get(server, context)[1]
    assert second != first
    standing.request("GET", "/")
    assert standing.getresponse().status == 200, "what stands is left alone"
    standing.close()
    authority.pair("another", file="spare")
    pair.key.write_bytes((pair.key.parent / "spare.key").read_bytes())
    now[0] += 10
    assert get(server, context)[1] == second, "a key of another certificate"
    assert "last good one is in use" in tls.problem()


def test_the_end_of_a_certificate_is_known_and_told_in_time(authority: Authority) -> None:
    pair = authority.pair("server", days=20)
    tls = tls_of(pair)
    theirs = x509.load_pem_x509_certificate(pair.cert.read_bytes()).not_valid_after_utc.timestamp()
    assert tls.expires() == theirs == not_after(pair.cert.read_bytes() + authority.ca.read_bytes())
    assert tls.warning(theirs - SOON_S - 1) == ""
    assert "ends in 13.0 days: replace the file" in tls.warning(theirs - 13 * 86_400)
    assert "ended 1.0 days ago" in tls.warning(theirs + 86_400)
    authority_end = x509.load_pem_x509_certificate(authority.ca.read_bytes()).not_valid_after_utc.timestamp()
    assert not_after(authority.ca.read_bytes()) == authority_end
    far = authority.pair("far", days=365 * 40)  # after 2049 ends are written in another way
    assert not_after(far.cert.read_bytes()) - time.time() == pytest.approx(365 * 40 * 86_400, abs=3600)
    begin, end = b"-----BEGIN CERTIFICATE-----\n", b"\n-----END CERTIFICATE-----\n"
    for nonsense in (b"", begin + end, begin + b"AAAA" + end, begin + b"MIIB" + end, begin + b"MAA=" + end):
        with pytest.raises((ValueError, IndexError)):
            not_after(nonsense)


@pytest.mark.parametrize("broken", ["cert", "key", "ca", "mode", "absent", "other"])
def test_files_that_are_not_good_are_refused_with_their_path(authority: Authority, broken: str) -> None:
    pair, spare, ca = authority.pair("server"), authority.pair("spare"), authority.ca
    says = {
        "cert": "the certificate .*server.crt",
        "key": "the key .*server.key are not",
        "ca": "the CA .*ca.pem is not PEM",
        "mode": "key .*server.key can be read or changed by others",
        "absent": "cannot read the certificate .*No such file",
        "other": "are not a PEM chain and its key",
    }[broken]
    if broken == "cert":
        pair.cert.write_text("garbage")
    elif broken == "key":
        pair.key.write_text("garbage")
    elif broken == "ca":
        ca.write_text("garbage")
    elif broken == "mode":
        pair.key.chmod(0o604)
    elif broken == "absent":
        pair.cert.unlink()
    else:
        pair = Pair(pair.cert, spare.key)
    with pytest.raises(ConfigError, match=says):
        ServerTls(pair.cert, pair.key, ca)
    if broken in ("key", "mode", "other"):
        with pytest.raises(ConfigError, match=says):
            client_context(ca, pair.cert, pair.key)


def test_names_of_a_certificate() -> None:
    assert common_names(None) == common_names({}) == ()
    assert common_names({"subject": ((("countryName", "DE"),), (("commonName", "a"), ("commonName", "b")))}) == (
        "a",
        "b",
    )


def _where(server: WebServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)
