"""gRPC with TLS and tokens: servers' credentials and guard, and channels to them.

The one module of this folder that imports gRPC.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

from kvstrata.proto.errors import Forbidden, KVError, Unauthenticated
from kvstrata.transfer.security.access import Access, Gate
from kvstrata.transfer.security.rights import Rights
from kvstrata.transfer.security.tls import Pems, ServerTls
from kvstrata.transfer.security.watched_file import read_private

_HEADER: Final = "authorization"
#: Streams whose token is gone end at times of their own within this: all nodes may have had the same one.
SPREAD_S: Final = 10.0
_STANDING: ContextVar[Callable[[], None] | None] = ContextVar("kvstrata_standing", default=None)


def standing() -> Callable[[], None]:
    """For a handler that streams, taken at its begin and called now and then: whether the caller may still be
    answered. It raises :class:`Unauthenticated` once the caller's token is gone, or its row has changed; it does
    nothing where tokens are off."""
    return _STANDING.get() or _nothing


def _nothing() -> None:
    return


# ---------------------------------------------------------------------- servers


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Each handshake is made with the files as they are then."""
    used = [tls.pems()]
    lock = threading.Lock()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        with lock:
            pems = tls.pems()
            if pems is used[0]:
                return None
            used[0] = pems
            return _configuration(pems)

    first = _configuration(used[0])
    return grpc.dynamic_ssl_server_credentials(first, newest, tls.client_certs)  # type: ignore[arg-type]


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


class Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Lets a call through to its handler when its token, or its certificate, allows it.

    ``rules`` has each rpc's :class:`Access` by its name; an rpc without one is refused to everybody.
    """

    def __init__(self, gate: Gate, rules: Mapping[str, Access]) -> None:
        self._gate = gate
        self._rules = rules

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        access = self._rules.get(handler_call_details.method.rpartition("/")[2])
        metadata = handler_call_details.invocation_metadata or ()
        shown = _text(next((value for name, value in metadata if name == _HEADER), None))
        if shown is not None or not self._gate.knows_certificates:  # else the certificate is looked at, in the handler
            try:
                self._gate.admit(access, shown, (), None)
            except KVError as error:
                return _refusing(error)
        answer = self._answer_stream if handler.response_streaming else self._answer
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            return answer(access, behaviour, handler.request_streaming, request, context)

        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _answer(
        self, access: Access | None, behaviour: Any, streamed: bool, request: Any, context: grpc.ServicerContext
    ) -> Any:
        self._admit(access, None if streamed else request, context)
        return behaviour(request, context)

    def _answer_stream(
        self, access: Access | None, behaviour: Any, streamed: bool, request: Any, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        admitted = self._admit(access, None if streamed else request, context)
        _STANDING.set(_Standing(partial(self._gate.stand, *admitted)))
        yield from behaviour(request, context)

    def _admit(
        self, access: Access | None, request: Any, context: grpc.ServicerContext
    ) -> tuple[str | None, tuple[str, ...], Rights]:
        """What was shown, as :meth:`Gate.stand` wants it. gRPC gives each call a context of its own, so that
        :data:`~kvstrata.transfer.security.access.CALLER` holds within it alone."""
        shown = _text(next((value for name, value in context.invocation_metadata() if name == _HEADER), None))
        certified: Any = context.auth_context().get("x509_common_name", ())
        names = tuple(name.decode("utf-8", "replace") for name in certified)
        try:
            rights = self._gate.admit(access, shown, names, request)
        except KVError as error:
            _abort(error, context)
        return shown, names, rights


class _Standing:
    """``check`` of one stream, which raises :class:`Unauthenticated` a while after the reason for it."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._ends_at: float | None = None

    def __call__(self) -> None:
        try:
            self._check()
        except Unauthenticated:
            now = time.monotonic()
            if self._ends_at is None:
                self._ends_at = now + random.uniform(0.0, SPREAD_S)
            if now >= self._ends_at:
                raise
        else:
            self._ends_at = None


def _refusing(error: KVError) -> Any:
    """A handler that ends the call and reads nothing of it: a stranger's request takes no memory."""

    def refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        _abort(error, context)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _abort(error: KVError, context: grpc.ServicerContext) -> NoReturn:
    if isinstance(error, Unauthenticated):
        context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    if isinstance(error, Forbidden):
        context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort returned")


def _text(value: str | bytes | None) -> str | None:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


# ---------------------------------------------------------------------- callers


def open_channel(
    target: str,
    options: Sequence[tuple[str, Any]] = (),
    *,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    named: str = "",
) -> grpc.Channel:
    """A channel to ``HOST:PORT``; with ``ca`` by TLS and never without, and only to who has a certificate for HOST,
    or for ``named``: the host that the operator gave, where ``target`` is what an unproved peer told.

    The files are read now: open another channel when they have changed. Raises :class:`ConfigError`.
    """
    if ca is None:
        return grpc.insecure_channel(target, options)
    credentials = grpc.ssl_channel_credentials(
        read_private(ca, "CA", secret=False),
        None if key is None else read_private(key, "certificate's key", secret=True),
        None if cert is None else read_private(cert, "certificate", secret=False),
    )
    if named:
        options = (*options, ("grpc.ssl_target_name_override", named))
    return grpc.secure_channel(target, credentials, options)
