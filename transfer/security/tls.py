"""TLS for whoever serves HTTP, and for whoever calls it: contexts of ``ssl``, made anew when the files change.

Certificates are rotated by replacing their files (as cert-manager does): the next handshake has the new ones, and
connections that stand are left alone.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.security.certificate_end import not_after
from kvstrata.transfer.security.watched_file import WatchedFile, read_private

#: A certificate that ends within this is something to tell the operator.
SOON_S: Final = 14 * 86_400.0
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Pems:
    """The files' bytes. ``ca`` None: nobody else's certificate is looked at."""

    cert: bytes
    key: bytes
    ca: bytes | None


class ServerTls:
    """A server's certificate and, with ``client_certs``, the CA that its clients must come from.

    Raises :class:`ConfigError` for files that are not there, not PEM, or do not belong together, and for a key that
    others can read.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        ca: Path | None = None,
        *,
        client_certs: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client_certs = client_certs
        self._cert, self._key, self._ca = cert, key, ca
        paths = (cert, key) if ca is None else (cert, key, ca)
        self._files = WatchedFile(paths, self._load, clock=clock)

    def pems(self) -> Pems:
        """As the files are now; the same object while they are."""
        return self._files.current()[0]

    def context(self) -> ssl.SSLContext:
        """For one more handshake."""
        return self._files.current()[1]

    def reloading_context(self) -> ssl.SSLContext:
        """For a server that takes one context for its life (asyncio's): each handshake is made with the newest."""
        return _Reloading(self)

    def expires(self) -> float:
        """When the certificate ends, in Unix seconds."""
        return self._files.current()[2]

    def problem(self) -> str:
        """Why the files as they are now are not in use, or an empty string."""
        return self._files.problem()

    def warning(self, now: float) -> str:
        """What to do about the certificate's end, at ``now`` in Unix seconds; empty while that is far."""
        left_s = self.expires() - now
        if left_s > SOON_S:
            return ""
        when = f"ends in {left_s / DAY_S:.1f} days" if left_s > 0 else f"ended {-left_s / DAY_S:.1f} days ago"
        return f"the certificate {self._cert} {when}: replace the file, no restart is needed"

    def _load(self) -> tuple[Pems, ssl.SSLContext, float]:
        pems = Pems(
            read_private(self._cert, "certificate", secret=False),
            read_private(self._key, "certificate's key", secret=True),
            None if self._ca is None else read_private(self._ca, "CA", secret=False),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _harden(context)
        _load_pair(context, self._cert, self._key)
        if pems.ca is not None:
            _load_ca(context, self._ca)
        if self.client_certs:
            context.verify_mode = ssl.CERT_REQUIRED
        return pems, context, _ends(self._cert, pems.cert)


class _Reloading(ssl.SSLContext):
    """Stands for a context; what it wraps is wrapped by the newest one."""

    _tls: ServerTls

    def __new__(cls, tls: ServerTls) -> _Reloading:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._tls = tls
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._tls.context().wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._tls.context().wrap_socket(*args, **kwargs)


def client_context(ca: Path, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For whoever calls: only servers of this CA whose certificate names the host that was called are believed.

    ``cert`` and ``key`` are shown to servers that ask for one. Raises :class:`ConfigError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    read_private(ca, "CA", secret=False)
    _load_ca(context, ca)
    if cert is not None and key is not None:
        read_private(key, "certificate's key", secret=True)
        _load_pair(context, cert, key)
    return context


def common_names(certificate: dict[str, Any] | None) -> tuple[str, ...]:
    """The common names of a verified certificate, as ``SSLSocket.getpeercert`` gives it."""
    if not certificate:
        return ()
    return tuple(value for part in certificate.get("subject", ()) for name, value in part if name == "commonName")


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the certificate {cert} and the key {key} are not a PEM chain and its key without a password: "
            f"{getattr(error, 'reason', None) or error}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def _load_ca(context: ssl.SSLContext, ca: Path | None) -> None:
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"the CA {ca} is not PEM: {getattr(error, 'reason', None) or error}") from error


def _ends(cert: Path, pem: bytes) -> float:
    try:
        return not_after(pem)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"the certificate {cert} has no end that can be read") from error
