"""One small HTTP request to a daemon of the pool, over TLS where the caller has an authority: bounded, no proxy."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from dataclasses import dataclass
from email.message import Message
from typing import Final

from kvstrata.client.security.credentials import Credentials, host_of
from kvstrata.proto.errors import Unauthenticated, Unavailable

ANSWER_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """``body`` is whole, and at most ``ANSWER_BYTES_MAX``. ``certificate_ends``: Unix seconds; None without TLS."""

    status: int
    headers: Message
    body: bytes
    certificate_ends: float | None = None


def request(
    credentials: Credentials,
    method: str,
    endpoint: str,
    path: str,
    *,
    named: str = "",
    deadline: float,
    shows_token: bool = True,
) -> Answer:
    """``endpoint``: HOST:PORT as the daemon names it. ``named``: the host by which the caller was told of the daemon,
    which its certificate has to name (by default the endpoint's): what a hello says is not proof of anything.

    Ends by ``deadline`` (monotonic seconds), give or take one wait of a peer that drips. Raises :class:`Unavailable`,
    :class:`Unauthenticated` where the server's certificate is not good or no token may go there.
    """
    host = host_of(endpoint)
    headers = {"connection": "close"}
    if shows_token:
        credentials.check_way(host)
        headers |= credentials.bearer()
    left = deadline - time.monotonic()
    if left <= 0:
        raise Unavailable(f"no time left to ask {endpoint}")
    connection = _connection(credentials, host, int(endpoint.rpartition(":")[2]), named or host, left)
    try:
        connection.request(method, path, headers=headers)
        ends = _ends(connection.sock)
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX + 1)
    except ssl.SSLCertVerificationError as error:
        raise Unauthenticated(
            f"{endpoint} shows a certificate that is not good here ({error.verify_message}): is {credentials.ca} the "
            f"authority of the pool, and is {named or host} one of the certificate's names?"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{endpoint}{path}: {_reason(error, credentials)}") from error
    finally:
        connection.close()
    if len(body) > ANSWER_BYTES_MAX:
        raise Unavailable(f"{endpoint}{path} answers with more than {ANSWER_BYTES_MAX} bytes")
    return Answer(answer.status, answer.headers, body, ends)


def _connection(
    credentials: Credentials, host: str, port: int, named: str, timeout_s: float
) -> http.client.HTTPConnection:
    if credentials.ca is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return _Tls(host, port, named, credentials.context(), timeout_s)


class _Tls(http.client.HTTPConnection):
    """HTTPS whose certificate has to name another host than the one that is connected to."""

    def __init__(self, host: str, port: int, named: str, context: ssl.SSLContext, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._context = context
        self._named = named

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), self.timeout)
        try:
            self.sock = self._context.wrap_socket(plain, server_hostname=self._named)
        except BaseException:
            plain.close()
            raise


def _ends(sock: object) -> float | None:
    found = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    return float(ssl.cert_time_to_seconds(str(found["notAfter"]))) if found else None


def _reason(error: Exception, credentials: Credentials) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        hint = "does it serve TLS?" if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST") else "see its log"
        return f"TLS: {error.reason or error}: {hint}"
    hint = "" if credentials.ca else ". Does it want TLS? Give the masters' authority (--ca)"
    return f"{getattr(error, 'strerror', None) or error or type(error).__name__}{hint}"
