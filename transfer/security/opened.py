"""What a daemon's security files give, opened and watched: one object for its servers, its links and its health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstrata.proto.errors import ConfigError
from kvstrata.proto.logs import get_logger
from kvstrata.transfer.security.access import Gate
from kvstrata.transfer.security.checks import open_to_all
from kvstrata.transfer.security.files import SecurityFiles
from kvstrata.transfer.security.key_file import KeyFile
from kvstrata.transfer.security.tls import DAY_S, ServerTls
from kvstrata.transfer.security.tokens import OwnToken, TokenFile

log = get_logger(__name__)

_NO_FILES: Final = SecurityFiles()


@dataclass(frozen=True, slots=True)
class Security:
    """Each is None where that protection is off; by default all are."""

    files: SecurityFiles = _NO_FILES
    tokens: TokenFile | None = None
    gate: Gate | None = None
    tls: ServerTls | None = None
    own_token: OwnToken | None = None
    key_file: KeyFile | None = None
    notes: tuple[str, ...] = ()  #: what the operator is told at the start, and in health from then on

    @classmethod
    def opened(cls, files: SecurityFiles, channel: str = "", others: Sequence[str] = ()) -> Security:
        """Raises :class:`ConfigError` for files that are not good. ``channel`` and ``others``, gRPC and HTTP, are the
        addresses that are listened on."""
        tokens = TokenFile(files.tokens) if files.tokens is not None else None
        if tokens is not None and tokens.knows_certificates and not files.client_certs:
            raise ConfigError(
                f"a row of {files.tokens} names a certificate, and nobody is asked for one: add --client-certs"
            )
        tls = None
        if files.tls_cert is not None and files.tls_key is not None:
            tls = ServerTls(files.tls_cert, files.tls_key, files.tls_ca, client_certs=files.client_certs)
        own = OwnToken(files.token_file) if files.token_file is not None else None
        keys = KeyFile(files.ticket_keys) if files.ticket_keys is not None else None
        notes = tuple(open_to_all(files, channel, others))
        for note in notes:
            log.warning("security", problem=note)
        return cls(files, tokens, Gate(tokens) if tokens is not None else None, tls, own, keys, notes)

    def problems(self) -> list[str]:
        """What makes a daemon unhealthy: a file of ticket keys that is not good any more; the older ones are in use."""
        return [] if self.key_file is None else list(filter(None, [self.key_file.problem()]))

    def warnings(self, now: Callable[[], float] = time.time) -> list[str]:
        """What is served with all the same, and needs somebody: files that went bad, a certificate that ends."""
        bad = [each.problem() for each in (self.tokens, self.tls, self.own_token) if each is not None]
        ends = [self.tls.warning(now())] if self.tls is not None else []
        return [*self.notes, *filter(None, [*bad, *ends])]

    def facts(self) -> dict[str, Any]:
        """For health: what is on."""
        return {
            "tokens": self.tokens is not None,
            "tickets": self.key_file is not None,
            "tls": self.tls is not None,
            "client_certs": self.files.client_certs,
            "certificate_days_left": None if self.tls is None else round((self.tls.expires() - time.time()) / DAY_S, 1),
        }


#: Nothing is asked of anybody.
OPEN: Final = Security()
