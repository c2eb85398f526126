"""How a node calls its masters over gRPC: in clear, or by TLS and with its token."""

from __future__ import annotations

from typing import Any, Final

import grpc

from kvstrata.proto.errors import Unauthenticated
from kvstrata.transfer.identity import is_loopback, named_host
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.grpc_security import open_channel
from kvstrata.transfer.security.tokens import OwnToken

_NONE: Final = SecurityFiles()


class Dialing:
    """With a CA there is no way back to clear text. ``plain_tokens``: without one, the token may leave this host."""

    def __init__(self, files: SecurityFiles = _NONE, token: OwnToken | None = None) -> None:
        self._files = files
        self._token = token

    def dial(self, master: str, target: str, options: tuple[tuple[str, Any], ...]) -> grpc.Channel:
        """A channel to ``target``, which ``master``, an address that the operator gave, names as its gRPC.

        Raises :class:`Unauthenticated` rather than show the token in clear, and :class:`ConfigError` for files.
        """
        files = self._files
        if self._token is not None and files.tls_ca is None and not (files.plain_tokens or is_loopback(target)):
            raise Unauthenticated(f"the token is not shown in clear to {target}: give the masters' CA as --tls-ca")
        return open_channel(
            target,
            options,
            ca=files.tls_ca,
            cert=files.tls_cert if files.tls_ca is not None else None,
            key=files.tls_key if files.tls_ca is not None else None,
            named=named_host(master, target),
        )

    def shown(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call on a channel that :meth:`dial` gave: the token of now, if there is one."""
        return () if self._token is None else (("authorization", f"Bearer {self._token()}"),)
