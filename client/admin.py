"""The admin client: asks a master over gRPC what it knows. The only module here that imports gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import grpc

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.control_pb2_grpc import MasterStub
from kvstrata.proto.errors import InvalidArgument, KVError, Refused, Unavailable
from kvstrata.transfer.connection import Connection
from kvstrata.transfer.identity import Identity

CALL_S: Final = 5.0
MESSAGE_BYTES_MAX: Final = 64 << 20


class AdminClient:
    """One master, found by its channel address: the hello there names its gRPC endpoint.

    Every call ends within ``timeout_s`` and raises :class:`Unavailable` with what to do when the master
    cannot be reached.
    """

    def __init__(self, master: str, *, timeout_s: float = CALL_S) -> None:
        self.address = master
        self.timeout_s = timeout_s
        self.hello = self._greet(master)
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(self.hello.grpc, options)
        self._stub = MasterStub(self._channel)  # type: ignore[no-untyped-call]

    @staticmethod
    def _greet(master: str) -> pb.HelloOk:
        try:
            connection = Connection.open(master, Identity.new(role="admin"), connect_s=1.0, silence_s=1.0)
        except Unavailable as error:
            raise Unavailable(f"no master at {master}: {error}. Is it running, and is this its channel?") from error
        connection.close()
        hello = connection.hello
        if hello.role != "master":
            raise InvalidArgument(f"{master} is a {hello.role or 'stranger'}, not a master: give a master's channel")
        if not hello.grpc:
            raise Unavailable(f"the master at {master} names no gRPC endpoint: start it with --grpc HOST:PORT")
        return hello

    def health(self) -> control.HealthReport:
        report: control.HealthReport = self._call(self._stub.Health)
        return report

    def nodes(self) -> list[control.NodeRow]:
        return list(self._call(self._stub.ListNodes).nodes)

    def clients(self) -> list[control.ClientRow]:
        return list(self._call(self._stub.ListClients).clients)

    def namespaces(self) -> list[control.NamespaceRow]:
        return list(self._call(self._stub.ListNamespaces).namespaces)

    def _call(self, method: Callable[..., Any]) -> Any:
        started = time.monotonic()
        try:
            return method(pb.Empty(), timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise self._meaning(error, time.monotonic() - started) from error

    def _meaning(self, error: grpc.RpcError, took_s: float) -> KVError:
        code = error.code() if isinstance(error, grpc.Call) else None
        text = error.details() if isinstance(error, grpc.Call) else str(error)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(f"the master's gRPC at {self.hello.grpc} gave no answer in {took_s:.1f} s")
        if code == grpc.StatusCode.UNAVAILABLE:
            return Unavailable(f"cannot reach the master's gRPC at {self.hello.grpc}: {text}. Is the port open?")
        return Refused(f"the master refused: {text}")

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
