"""One small HTTP request to a daemon of the pool, over TLS where the caller has an authority: bounded, no proxy."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final

from kvstrata.client.security.credentials import Credentials
from kvstrata.proto.errors import InvalidArgument, Unauthenticated, Unavailable
from kvstrata.transfer.identity import parse_address
from kvstrata.transfer.security.tls import common_names

ANSWER_BYTES_MAX: Final = 1 << 20
#: Common names, as `kvstrata auth init` gives them, of those who get no token: masters alone do.
NO_MASTERS: Final = frozenset({"kvstrata-node", "kvstrata-client"})


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

    Ends by ``deadline`` (monotonic seconds), all of it but the look-up of a name, which takes the resolver's time.
    Raises :class:`Unavailable`, also for an endpoint that is none; :class:`Unauthenticated` where the server's
    certificate is not good or no token may go there.
    """
    host, port = _place(endpoint)
    headers = {"connection": "close"}
    if shows_token:
        credentials.check_way(endpoint)
        headers |= credentials.bearer()
    if time.monotonic() >= deadline:
        raise Unavailable(f"no time left to ask {endpoint}")
    context = None if credentials.ca is None else credentials.context()
    connection = _Connection(host, port, deadline, context, named or host, NO_MASTERS if shows_token else frozenset())
    try:
        connection.request(method, path, headers=headers)
        ends = connection.ends
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX + 1)
    except ssl.SSLCertVerificationError as error:
        raise Unauthenticated(
            f"{endpoint} shows a certificate that is not good here ({error.verify_message}): is {credentials.ca} the "
            f"authority of the pool, and is {named or host} one of the certificate's names?"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a name that is none, a bad status
        raise Unavailable(f"{endpoint}{path}: {_reason(error, credentials)}") from error
    finally:
        connection.close()
    if len(body) > ANSWER_BYTES_MAX:
        raise Unavailable(f"{endpoint}{path} answers with more than {ANSWER_BYTES_MAX} bytes")
    return Answer(answer.status, answer.headers, body, ends)


def _place(endpoint: str) -> tuple[str, int]:
    try:
        _, place = parse_address(endpoint)
        http.client.HTTPConnection(*place[:2])  # refuses what would break a request's head
    except (InvalidArgument, http.client.InvalidURL):
        place = ""
    if isinstance(place, str):
        raise Unavailable(f"{endpoint[:100]!r} is named as an HTTP endpoint, and is not HOST:PORT")
    return place


class _Connection(http.client.HTTPConnection):
    """HTTP, over TLS with ``context``, where the certificate has to name ``named``; every wait ends by ``deadline``.

    Nothing is sent to who has a certificate of a common name in ``refused``: :class:`Unauthenticated`. ``ends``: when
    the server's certificate does, in Unix seconds; None without TLS.
    """

    def __init__(
        self,
        host: str,
        port: int,
        deadline: float,
        context: ssl.SSLContext | None,
        named: str,
        refused: frozenset[str],
    ) -> None:
        super().__init__(host, port)
        self._deadline = deadline
        self._context = context
        self._named = named
        self._refused = refused
        self.ends: float | None = None

    def connect(self) -> None:
        sock = self._reached()
        try:
            sock.settimeout(_left(self._deadline))
            if self._context is not None:
                sock = secured = self._context.wrap_socket(sock, server_hostname=self._named)
                found = secured.getpeercert()
                if not self._refused.isdisjoint(common_names(found)):
                    raise Unauthenticated(
                        f"{self.host}:{self.port} shows the certificate of no master: no token goes there"
                    )
                self.ends = float(ssl.cert_time_to_seconds(str(found["notAfter"]))) if found else None
        except BaseException:
            sock.close()
            raise
        self.sock = _Timed(sock, self._deadline)

    def _reached(self) -> socket.socket:
        """A connection to the first of the host's addresses that takes one."""
        failed: OSError = OSError("the name has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(self._deadline))
                sock.connect(place)
            except OSError as error:
                sock.close()
                failed = error
            else:
                return sock
        raise failed


class _Timed:
    """What http.client uses of a socket; a peer that drips does not hold it past the deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        self._sock.close()


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _reason(error: Exception, credentials: Credentials) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError):
        hint = "does it serve TLS?" if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST") else "see its log"
        return f"TLS: {error.reason or error}: {hint}"
    hint = "" if credentials.ca else ". Does it want TLS? Give the masters' authority (--ca)"
    return f"{getattr(error, 'strerror', None) or error or type(error).__name__}{hint}"
