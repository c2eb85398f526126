"""Where a daemon's secrets and certificates are: files, so that none is ever an argument or a variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SecurityFiles:
    """Each may be None: then that protection is off. All are read again when they change."""

    tokens: Path | None = None  #: who may call gRPC and HTTP here, by the hashes of their tokens
    ticket_keys: Path | None = None  #: with it the channel asks for tickets; the same file on masters and nodes
    token_file: Path | None = None  #: this process's own token, for what it calls
    tls_cert: Path | None = None  #: PEM chain of this process
    tls_key: Path | None = None
    tls_ca: Path | None = None  #: whom this process believes, as a client and, with ``client_certs``, as a server
    client_certs: bool = False  #: nobody is served without a certificate of ``tls_ca``
    plain_tokens: bool = False  #: tokens may leave this host without TLS: something else encrypts
