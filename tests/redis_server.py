"""Real Redis and Sentinel processes for tests: on free ports of this machine, in a directory, ended by pid."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

BINARY = "redis-server"
HINT = "no redis-server here; on Debian or Ubuntu: apt-get install redis-server"
READY_S = 15.0
END_S = 10.0
HOST = "127.0.0.1"


def needs_redis() -> None:
    """Skip the test where there is no Redis to start."""
    if shutil.which(BINARY) is None:
        pytest.skip(HINT)


def until(true: Callable[[], object], within_s: float = READY_S) -> None:
    """Poll until it is so; errors of a Redis that does not answer yet count as no."""
    import redis

    deadline = time.monotonic() + within_s
    while True:
        try:
            if true():
                return
        except (redis.exceptions.RedisError, OSError):
            pass
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.02)


class RedisServer:
    """One ``redis-server``, serving when constructed. ``more``: options as in its configuration file, without ``--``.

    ``certificates``: it serves TLS only, and wants a certificate of the client.
    """

    def __init__(
        self,
        base: Path,
        *more: str,
        password: str = "",
        certificates: Path | None = None,
        sentinel: bool = False,
        port: int = 0,
    ) -> None:
        self.base = base
        self.password = password
        self._certificates = certificates
        self._more = more
        self._sentinel = sentinel
        self._process: subprocess.Popen[bytes] | None = None
        base.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        try:
            while not self._start():
                assert not port, f"{port} is taken"
                self.port = free_port()
        except BaseException:
            self.kill()
            raise

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        """As ``--state`` takes it, with the password."""
        scheme = "rediss" if self._certificates else "redis"
        who = f":{self.password}@" if self.password else ""
        files = ""
        if self._certificates:
            at = self._certificates
            files = f"?ca={at / 'ca.crt'}&cert={at / 'client.crt'}&key={at / 'client.key'}"
        return f"{scheme}://{who}{self.address}/0{files}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Any:
        """A client of its own, for what a test does behind the store's back."""
        import redis

        tls = {}
        if self._certificates:
            at = self._certificates
            tls = {"ssl": True, "ssl_ca_certs": str(at / "ca.crt"), "ssl_certfile": str(at / "client.crt")}
            tls["ssl_keyfile"] = str(at / "client.key")
        return redis.Redis(HOST, self.port, password=self.password or None, socket_timeout=2, **tls)

    def configuration(self) -> str:
        """What its configuration file says."""
        lines = [f"bind {HOST}", f"dir {self.base}", "daemonize no", "loglevel warning"]
        if self._certificates:
            at = self._certificates
            lines += ["port 0", f"tls-port {self.port}", f"tls-ca-cert-file {at / 'ca.crt'}"]
            lines += [f"tls-cert-file {at / 'server.crt'}", f"tls-key-file {at / 'server.key'}"]
        else:
            lines += [f"port {self.port}"]
        if not self._sentinel:
            lines += ['save ""', *([f"masterauth {self.password}"] if self.password else [])]
        if self.password:
            lines += [f"requirepass {self.password}"]
        return "\n".join([*lines, *self._more]) + "\n"

    def _start(self) -> bool:
        """False when something else has taken the port meanwhile."""
        path = self.base / "redis.conf"
        if not self._sentinel or not path.exists():  # a Sentinel keeps what it knows in there
            path.write_text(self.configuration())
        command = [BINARY, str(path), *(["--sentinel"] if self._sentinel else [])]
        with (self.base / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_S
        with self.client() as client:
            while self._process.poll() is None:
                try:
                    if client.ping() and client.info("server")["process_id"] == self.pid:
                        return True
                except Exception as error:  # noqa: BLE001 - whatever it is, it is not serving yet
                    assert time.monotonic() < deadline, f"{self.address} does not serve: {error}"
                time.sleep(0.02)
        log_text = (self.base / "redis.log").read_text()
        if self._certificates and "Bad directive" in log_text:
            pytest.skip("this redis-server is built without TLS")
        assert "Address already in use" in log_text, log_text
        return False

    def start(self) -> None:
        """Again, on the port it had."""
        assert self._start(), f"{self.port} was taken meanwhile"

    def kill(self) -> None:
        """Ended, without a chance to write anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)
            self._process = None

    def pause(self) -> None:
        """Stopped where it stands: it takes connections and answers nothing. :meth:`resume` ends it."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def empty(self) -> None:
        with self.client() as client:
            client.flushall()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Watched:
    """A Redis, its replica, and Sentinels that put the replica in its place when it is gone."""

    SERVICE = "kv"

    def __init__(
        self,
        base: Path,
        password: str = "",
        sentinel_password: str = "",
        sentinels: int = 3,
        certificates: Path | None = None,
    ) -> None:
        self.parts: list[RedisServer] = []
        self._certificates = certificates
        try:
            self.first = self._add(base / "first", password=password)
            self.second = self._add(base / "second", f"replicaof {HOST} {self.first.port}", password=password)
            watch = [f"sentinel monitor {self.SERVICE} {HOST} {self.first.port} {sentinels // 2 + 1}"]
            watch += [f"sentinel auth-pass {self.SERVICE} {password}"] if password else []
            watch += [f"sentinel down-after-milliseconds {self.SERVICE} 500"]
            watch += [f"sentinel failover-timeout {self.SERVICE} 2000"]
            watch += [f"sentinel sentinel-pass {sentinel_password}"] if sentinel_password else []
            self.sentinels = [
                self._add(base / f"sentinel{number}", *watch, password=sentinel_password, sentinel=True)
                for number in range(sentinels)
            ]
            for sentinel in self.sentinels:
                with sentinel.client() as client:
                    until(lambda: self._complete(client, sentinels))
        except BaseException:
            self.close()
            raise

    def _add(self, base: Path, *more: str, **how: Any) -> RedisServer:
        more += ("tls-replication yes",) if self._certificates else ()
        server = RedisServer(base, *more, certificates=self._certificates, **how)
        self.parts.append(server)
        return server

    def _complete(self, sentinel: Any, sentinels: int) -> bool:
        """The replica is known and up to date, and so are the other Sentinels."""
        state = sentinel.sentinel_masters()[self.SERVICE]
        replicas = sentinel.sentinel_slaves(self.SERVICE)
        up = [one for one in replicas if one["master-link-status"] == "ok" and not one["is_sdown"]]
        return bool(up) and state["num-other-sentinels"] == sentinels - 1

    @property
    def hosts(self) -> str:
        return ",".join(sentinel.address for sentinel in self.sentinels)

    def close(self) -> None:
        for part in self.parts:
            part.kill()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def make_certificates(base: Path, names: Sequence[str] = ("server", "client", "stranger")) -> Path:
    """An authority (``ca``), and a certificate and key of it for each name; ``stranger`` signs its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    base.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    issuer: tuple[Any, Any] | None = None
    for name in ("ca", *names):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer, signing = issuer if issuer and name != "stranger" else (subject, key)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(signer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False)
        )
        if name == "ca":
            usage = {use: use in ("key_cert_sign", "crl_sign", "digital_signature") for use in _USES}
            certificate = certificate.add_extension(x509.KeyUsage(**usage), critical=True)
        certificate = certificate.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        ).add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        signed = certificate.sign(signing, hashes.SHA256())
        (base / f"{name}.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        (base / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        if name == "ca":
            issuer = (subject, key)
    return base


_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A plain one, without a password."""
    needs_redis()
    with RedisServer(tmp_path / "redis") as server:
        yield server
