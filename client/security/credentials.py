"""What a caller was given to show: a token, and what TLS needs. By argument, or by the environment."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstrata.proto.errors import ConfigError, InvalidArgument, Unauthenticated
from kvstrata.transfer.identity import is_loopback
from kvstrata.transfer.security.tls import client_context

TOKEN_FILE: Final = "KVSTRATA_TOKEN_FILE"
TOKEN: Final = "KVSTRATA_TOKEN"
CA: Final = "KVSTRATA_CA"
CERT: Final = "KVSTRATA_CERT"
KEY: Final = "KVSTRATA_KEY"

TOKEN_BYTES_MAX: Final = 4096
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token, itself or in a file; the authority that servers are believed by; a certificate of one's own.

    ``insecure`` lets a token out without TLS to hosts other than this one. Nothing of it is ever shown: ``repr`` names
    files alone.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    ca: Path | None = None  #: with it everything is TLS, and nothing is without
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @classmethod
    def given(
        cls,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        *,
        insecure: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> Credentials:
        """What was said, else ``KVSTRATA_TOKEN_FILE`` or ``KVSTRATA_TOKEN``, ``KVSTRATA_CA``, ``_CERT``, ``_KEY``.

        Raises :class:`InvalidArgument` for half a certificate, and for two tokens."""
        if token and token_file:
            raise InvalidArgument("give token or token_file, not both")
        if not token and not token_file:
            token_file = environment.get(TOKEN_FILE)
            token = "" if token_file else environment.get(TOKEN, "")
        cert, key = _path(tls_cert or environment.get(CERT)), _path(tls_key or environment.get(KEY))
        if (cert is None) != (key is None):
            raise InvalidArgument("a certificate and its key go together: give both, tls_cert and tls_key, or neither")
        ca = _path(tls_ca or environment.get(CA))
        if cert is not None and ca is None:
            raise InvalidArgument("a certificate is shown over TLS only: give the masters' authority too, as tls_ca")
        return cls(token or "", _path(token_file), ca, cert, key, insecure)

    def checked(self) -> Credentials:
        """Return self, or raise :class:`ConfigError` for a file that cannot be used, :class:`Unauthenticated` for
        what is no token."""
        self.bearer()
        if self.ca is not None:
            self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Believes servers of ``ca`` alone. Raises :class:`ConfigError` naming the file."""
        if self.ca is None:
            raise InvalidArgument("there is no authority to believe servers by")
        return client_context(self.ca, self.cert, self.key)

    @property
    def identifies(self) -> bool:
        """Whether there is something to get a ticket with."""
        return bool(self.token or self.token_file or self.cert)

    def bearer(self) -> dict[str, str]:
        """The HTTP or gRPC header that shows the token; none without one. The file is read each time: it may have
        been replaced. Raises :class:`ConfigError` for a file that cannot be read, :class:`Unauthenticated` for one
        that holds no token."""
        token = self.token or self._from_file()
        if not token:
            return {}
        if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
            raise Unauthenticated(f"{self._source()} is no token: expected one line, as `kvstrata auth token add` says")
        return {"authorization": f"Bearer {token}"}

    def check_way(self, address: str) -> None:
        """Raises :class:`Unauthenticated` where a token would leave this host without TLS, on its way to ``address``,
        HOST:PORT."""
        if self.ca is None and (self.token or self.token_file) and not self.insecure and not is_loopback(address):
            raise Unauthenticated(
                f"a token is not sent to {address} without TLS: give the masters' authority (tls_ca, --ca, {CA}), or "
                "say insecure=True where nobody can listen"
            )

    def _from_file(self) -> str:
        if self.token_file is None:
            return ""
        try:
            with self.token_file.open("rb") as file:
                text = file.read(TOKEN_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the token file {self.token_file}: {error.strerror or error}") from error
        token = text.decode("latin-1").strip()
        if not token:
            raise Unauthenticated(f"the token file {self.token_file} is empty")
        return token

    def _source(self) -> str:
        return f"what is in {self.token_file}" if self.token_file else "the token that was given"


def _path(value: str | Path | None) -> Path | None:
    return Path(value) if value else None
