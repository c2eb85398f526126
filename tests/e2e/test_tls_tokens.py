"""Real daemons with TLS and tokens: who is let in, who is not, and what changes while they run."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvstrata.client.admin import AdminClient
from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import Unavailable
from kvstrata.transfer.security.tokens import digest, new_token
from tests.certificates import Authority, Pair
from tests.e2e.real_pool import Daemon
from tests.e2e.secured_daemons import Secrets, ask, call, client_context, health, master, refusal, storage
from tests.waiting import until

CODE = grpc.StatusCode
ATTACH_S = 30.0


@dataclass
class Pool:
    secrets: Secrets
    pair: Pair
    master: Daemon
    node: Daemon
    folder: Path

    @property
    def tls(self) -> ssl.SSLContext:
        return client_context(self.secrets.ca)

    def nodes(self) -> list[str]:
        listed = call(self.master, "ListNodes", pb.Empty(), self.secrets.tokens["read"], ca=self.secrets.ca)
        return [row.state for row in listed.nodes]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("secured")
    secrets = Secrets(folder)
    pair = secrets.authority.pair("server", days=10)
    with contextlib.ExitStack() as stack:
        leader = master(folder, *secrets.flags, *secrets.tls(pair))
        stack.callback(leader.end)
        node = storage(
            folder, str(leader.ready["channel"]), *secrets.flags, *secrets.tls(pair), "--tls-ca", str(secrets.ca),
            "--token-file", str(secrets.node_token),
        )  # fmt: skip
        stack.callback(node.end)
        found = Pool(secrets, pair, leader, node, folder)
        assert node.ready
        until(lambda: found.nodes() == ["active"], ATTACH_S)
        yield found


def test_a_secured_pool_comes_together_and_tells_what_is_on(pool: Pool) -> None:
    reader = pool.secrets.tokens["read"]
    for daemon in (pool.master, pool.node):
        told = health(daemon.ready["http"], reader, pool.tls)
        assert told["healthy"], told["problems"]
        days = told["security"].pop("certificate_days_left")
        assert told["security"] == {"tokens": True, "tickets": True, "tls": True, "client_certs": False}
        assert 9 < days <= 10
        (warning,) = told["warnings"]
        assert "server.crt ends in" in warning and "no restart is needed" in warning
        assert health(daemon.ready["http"], tls=pool.tls) == {"healthy": True}
        assert ask(daemon.ready["http"], "GET", "/metrics", tls=pool.tls)[0] == 401
        metrics = ask(daemon.ready["http"], "GET", "/metrics", reader, tls=pool.tls)[1].decode()
        assert "certificate_expires_seconds 1." in metrics and 'auth_refused_total{reason="no_token"} ' in metrics
    report = call(pool.master, "Health", pb.Empty(), reader, ca=pool.secrets.ca)
    assert report.security.tls and report.security.tokens and 9 < report.security.certificate_days_left <= 10


def test_no_token_a_wrong_one_and_a_wrong_role_are_refused(pool: Pool) -> None:
    ca, tokens = pool.secrets.ca, pool.secrets.tokens
    assert refusal(pool.master, "Health", pb.Empty(), ca=ca) is CODE.UNAUTHENTICATED
    assert refusal(pool.master, "Health", pb.Empty(), new_token(), ca=ca) is CODE.UNAUTHENTICATED
    assert refusal(pool.master, "Health", pb.Empty(), tokens["client"], ca=ca) is CODE.PERMISSION_DENIED
    drop = control.Scope(any_salt=True, dry_run=True)
    assert refusal(pool.master, "DropBlocks", drop, tokens["read"], ca=ca) is CODE.PERMISSION_DENIED
    assert refusal(pool.master, "DropBlocks", drop, tokens["admin"], ca=ca) is CODE.OK
    for daemon, path in ((pool.master, "/quota"), (pool.node, "/tenants")):
        address = daemon.ready["http"]
        assert ask(address, "GET", path, tls=pool.tls)[0] == 401
        assert ask(address, "GET", path, new_token(), tls=pool.tls)[0] == 401
        assert ask(address, "GET", path, tokens["client"], tls=pool.tls)[0] == 403
        assert ask(address, "GET", path, tokens["read"], tls=pool.tls)[0] == 200


def test_nobody_gets_through_without_tls_or_with_another_authority(pool: Pool, tmp_path: Path) -> None:
    token = pool.secrets.tokens["admin"]
    other = Authority(tmp_path / "other", "other-ca").ca
    assert refusal(pool.master, "Health", pb.Empty(), token) is CODE.UNAVAILABLE
    assert refusal(pool.master, "Health", pb.Empty(), token, ca=other) is CODE.UNAVAILABLE
    assert refusal(pool.master, "Health", pb.Empty(), token, ca=pool.secrets.ca, named="elsewhere") is CODE.UNAVAILABLE
    for daemon in (pool.master, pool.node):
        with pytest.raises(OSError):
            ask(daemon.ready["http"], "GET", "/healthz", token)
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(daemon.ready["http"], "GET", "/healthz", token, tls=client_context(other))


def test_who_has_no_authority_is_told_so_once(pool: Pool) -> None:
    admin = AdminClient(str(pool.master.ready["channel"]), token=pool.secrets.tokens["read"])
    with admin, pytest.raises(Unavailable, match="give its authority") as refused:
        admin.health()
    assert str(refused.value).count("give its authority") == 1


def test_garbage_and_bodies_that_are_too_large_are_refused_and_it_serves_on(pool: Pool) -> None:
    for address in (pool.master.ready["grpc"], pool.master.ready["http"], pool.node.ready["http"]):
        host, _, port = str(address).rpartition(":")
        for garbage in (bytes(4096), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" + b"\xff" * 600):
            with socket.create_connection((host, int(port)), 5) as sock, contextlib.suppress(OSError):
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    large = b'{"limit_gb": "' + b"1" * (1 << 20) + b'"}'
    address = pool.master.ready["http"]
    status, said = ask(address, "PUT", "/quota/x", pool.secrets.tokens["admin"], tls=pool.tls, body=large)
    assert status == 400 and b"more than 65536 bytes" in said
    assert ask(address, "PUT", "/quota/x", pool.secrets.tokens["read"], tls=pool.tls, body=b"{}")[0] == 403
    assert pool.nodes() == ["active"]


def test_a_certificate_is_replaced_under_load_and_no_call_fails(pool: Pool) -> None:
    reader, tls = pool.secrets.tokens["read"], pool.tls
    failed: list[Exception] = []
    done = threading.Event()
    calls = [0, 0]

    def by_grpc() -> None:
        call(pool.master, "Health", pb.Empty(), reader, ca=pool.secrets.ca)
        calls[0] += 1

    def by_http() -> None:
        assert ask(pool.master.ready["http"], "GET", "/readyz", reader, tls=tls)[0] == 200
        calls[1] += 1

    def go_on(turn: object) -> None:
        while not done.is_set() and not failed:
            try:
                turn()  # type: ignore[operator]
            except (grpc.RpcError, OSError, AssertionError) as error:
                failed.append(error)

    threads = [threading.Thread(target=go_on, args=(turn,)) for turn in (by_grpc, by_http)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            before = shown(pool.master.ready["http"], pool.tls), shown(pool.master.ready["grpc"], pool.tls)
            pool.pair = pool.secrets.authority.pair("server", days=10)
            until(lambda before=before: shown(pool.master.ready["http"], pool.tls) != before[0])  # type: ignore[misc]
            until(lambda before=before: shown(pool.master.ready["grpc"], pool.tls) != before[1])  # type: ignore[misc]
    finally:
        done.set()
        for thread in threads:
            thread.join(20)
    assert not failed and min(calls) > 0, (failed, calls)
    assert pool.nodes() == ["active"]


def test_a_token_that_is_taken_out_of_the_file_is_refused_from_then_on(pool: Pool) -> None:
    token = new_token()
    address = pool.master.ready["http"]
    assert ask(address, "POST", "/ticket", token, tls=pool.tls)[0] == 401
    pool.secrets.write_tokens({"name": "late", "sha256": digest(token), "role": "client", "salts": ["a"]})
    until(lambda: ask(address, "POST", "/ticket", token, tls=pool.tls)[0] == 200)
    pool.secrets.write_tokens()
    until(lambda: ask(address, "POST", "/ticket", token, tls=pool.tls)[0] == 401)
    assert refusal(pool.master, "LookupBlocks", control.NamedLookup(), token, ca=pool.secrets.ca) is (
        CODE.UNAUTHENTICATED
    )
    pool.secrets.tokens_file.write_text("- nonsense")
    reader = pool.secrets.tokens["read"]
    until(lambda: any("last good one" in each for each in health(address, reader, pool.tls)["warnings"]))
    pool.secrets.write_tokens()
    until(lambda: not any("last good one" in each for each in health(address, reader, pool.tls)["warnings"]))


def test_no_secret_is_in_a_log_a_command_line_or_an_answer(pool: Pool) -> None:
    secrets = pool.secrets
    hidden = [*secrets.tokens.values(), *map(digest, secrets.tokens.values()), secrets.key]
    hidden += [line for line in pool.pair.key.read_text().splitlines() if not line.startswith("-----")]
    told = [path.read_text() for path in pool.folder.glob("*.log")]
    for daemon in (pool.master, pool.node):
        process = Path(f"/proc/{daemon.process.pid}")
        told += [(process / name).read_bytes().decode("utf-8", "replace") for name in ("cmdline", "environ")]
        for path in ("/metrics", "/healthz", "/status.json", "/tenants"):
            told.append(ask(daemon.ready["http"], "GET", path, secrets.tokens["admin"], tls=pool.tls)[1].decode())
        told.append(str(daemon.ready))
    assert len(told) >= 12 and all(secret not in text for secret in hidden for text in told)


def test_with_client_certificates_a_certificate_lets_in_and_stands_for_a_token(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    own, prom = secrets.authority.pair("server"), secrets.authority.pair("prom.example.org")
    stranger = Authority(tmp_path / "other", "other-ca").pair("prom.example.org")
    secrets.write_tokens(
        {"name": "prom", "certificate": "prom.example.org", "role": "read"},
        {"name": "storage", "certificate": "storage", "role": "node"},
    )
    with contextlib.ExitStack() as stack:
        strict = ("--tls-ca", str(secrets.ca), "--client-certs")
        leader = master(tmp_path, *secrets.flags, *secrets.tls(own), *strict)
        stack.callback(leader.end)
        node = storage(
            tmp_path, str(leader.ready["channel"]), *secrets.flags, *secrets.tls(secrets.authority.pair("storage")),
            *strict,
        )  # fmt: skip
        stack.callback(node.end)
        mine = {"ca": secrets.ca, "cert": prom.cert, "key": prom.key}
        until(
            lambda: [row.state for row in call(leader, "ListNodes", pb.Empty(), **mine).nodes] == ["active"], ATTACH_S
        )
        token = secrets.tokens["admin"]
        assert refusal(leader, "Health", pb.Empty(), token, ca=secrets.ca) is CODE.UNAVAILABLE
        theirs = {"ca": secrets.ca, "cert": stranger.cert, "key": stranger.key}
        assert refusal(leader, "Health", pb.Empty(), token, **theirs) is CODE.UNAVAILABLE
        assert refusal(leader, "DropBlocks", control.Scope(), **mine) is CODE.PERMISSION_DENIED
        assert refusal(leader, "Health", pb.Empty(), token, **mine) is CODE.OK
        with_it, without = client_context(secrets.ca, prom.cert, prom.key), client_context(secrets.ca)
        for daemon in (leader, node):
            assert ask(daemon.ready["http"], "GET", "/metrics", tls=with_it)[0] == 200
            with pytest.raises(OSError):
                ask(daemon.ready["http"], "GET", "/metrics", token, tls=without)


def test_a_node_with_an_authority_attaches_to_no_master_without_tls_or_of_another_name(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    elsewhere = secrets.authority.pair("elsewhere", ("other.example.org",))
    with contextlib.ExitStack() as stack:
        plain = master(tmp_path, *secrets.flags, name="plain")
        stack.callback(plain.end)
        other = master(tmp_path, *secrets.flags, *secrets.tls(elsewhere), name="other")
        stack.callback(other.end)
        masters = f"{plain.ready['channel']},{other.ready['channel']}"
        node = storage(
            tmp_path, masters, *secrets.flags, "--tls-ca", str(secrets.ca), "--token-file", str(secrets.node_token),
        )  # fmt: skip
        stack.callback(node.end)
        tokens = secrets.tokens

        def problems() -> list[str]:
            return [each["problem"] for each in health(node.ready["http"], tokens["read"])["masters"]]

        until(lambda: all("UNAVAILABLE" in each for each in problems()), ATTACH_S)
        assert not any(each["attached"] for each in health(node.ready["http"], tokens["read"])["masters"])
        assert call(plain, "ListNodes", pb.Empty(), tokens["read"]).nodes == []
        log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
        assert tokens["node"] not in log


def shown(address: str, context: ssl.SSLContext) -> bytes:
    """The certificate that HOST:PORT shows, as DER."""
    host, _, port = str(address).rpartition(":")
    with (
        socket.create_connection((host, int(port)), 5) as sock,
        context.wrap_socket(sock, server_hostname=host) as wrapped,
    ):
        certificate = wrapped.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate
