"""Daemons with TLS, tokens and tickets, and callers of their gRPC and HTTP."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from pathlib import Path
from typing import Any

import grpc
import yaml

from kvstrata.proto import control_pb2_grpc
from kvstrata.transfer.security.grpc_security import open_channel
from kvstrata.transfer.security.tls import client_context
from kvstrata.transfer.security.tokens import digest, new_token
from tests.certificates import Authority, Pair
from tests.e2e.real_pool import ANY, Daemon

CALL_S = 10.0


class Secrets:
    """An authority, tokens by name and by role, and ticket keys, in files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        self.ca = self.authority.ca
        self.tokens = {name: new_token() for name in ("admin", "read", "node", "client")}
        self.tokens_file = folder / "tokens.yaml"
        self.write_tokens()
        self.key = os.urandom(32).hex()
        self.keys_file = self.private("ticket-keys", f"first:{self.key}\n")
        self.node_token = self.private("node.token", self.tokens["node"] + "\n")

    def private(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def write_tokens(self, *more: dict[str, Any], without: str = "") -> None:
        rows = [
            {"name": name, "sha256": digest(token), "role": name, "salts": ["*"]}
            for name, token in self.tokens.items()
            if name != without
        ]
        new = self.tokens_file.with_suffix(".new")
        new.write_text(yaml.safe_dump([*rows, *more]))
        new.replace(self.tokens_file)

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tokens", str(self.tokens_file), "--ticket-keys", str(self.keys_file))

    @staticmethod
    def tls(pair: Pair) -> tuple[str, ...]:
        return ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))


def master(folder: Path, *flags: str, name: str = "master") -> Daemon:
    return Daemon("master", "--listen", ANY, "--grpc", ANY, "--http", ANY, *flags, log=folder / f"{name}.log")


def storage(folder: Path, masters: str, *flags: str, name: str = "node") -> Daemon:
    return Daemon(
        "storage", "--master", masters, "--listen", ANY, "--http", ANY, "--data", str(folder / name),
        "--dram", "32MiB", "--name", name, *flags, log=folder / f"{name}.log",
    )  # fmt: skip


def ask(
    address: str,
    method: str,
    path: str,
    token: str = "",
    *,
    tls: ssl.SSLContext | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """One request to HOST:PORT on a connection of its own: (status, body)."""
    host, _, port = address.rpartition(":")
    connection = (
        http.client.HTTPConnection(host, int(port), timeout=CALL_S)
        if tls is None
        else http.client.HTTPSConnection(host, int(port), timeout=CALL_S, context=tls)
    )
    try:
        connection.request(method, path, body, {"authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def health(address: str, token: str = "", tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    return dict(json.loads(ask(address, "GET", "/healthz", token, tls=tls)[1]))


def call(daemon: Daemon, rpc: str, request: Any, token: str = "", **dialing: Any) -> Any:
    """One call of a master's gRPC on a channel of its own. Raises :class:`grpc.RpcError`."""
    channel = open_channel(str(daemon.ready["grpc"]), **dialing)
    shown = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        return getattr(control_pb2_grpc.MasterStub(channel), rpc)(request, timeout=CALL_S, metadata=shown)
    finally:
        channel.close()


def refusal(daemon: Daemon, rpc: str, request: Any, token: str = "", **dialing: Any) -> grpc.StatusCode:
    """How a call is refused; OK when it is not."""
    try:
        call(daemon, rpc, request, token, **dialing)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return error.code()
    return grpc.StatusCode.OK


__all__ = ["Secrets", "ask", "call", "client_context", "health", "master", "refusal", "storage"]
