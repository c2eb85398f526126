"""Whether a daemon's security settings go together: nothing is half on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstrata.proto.errors import ConfigError
from kvstrata.transfer.identity import is_loopback
from kvstrata.transfer.security.files import SecurityFiles


def checked(files: SecurityFiles, addresses: Sequence[str], *, masters: Sequence[str] = ()) -> SecurityFiles:
    """Return ``files``, or raise :class:`ConfigError` that says what to do.

    ``addresses`` are those of HTTP and gRPC, where tokens are shown to this process; ``masters`` those that it shows
    its own to.
    """
    if (files.tokens is None) != (files.ticket_keys is None):
        there, missing = ("--tokens", "--ticket-keys") if files.ticket_keys is None else ("--ticket-keys", "--tokens")
        leaves = "the channel" if files.ticket_keys is None else "HTTP and gRPC"
        raise ConfigError(
            f"{there} without {missing} leaves {leaves} open: give both (`kvstrata auth init` makes them)"
        )
    check_pair(files.tls_cert, files.tls_key)
    if files.client_certs and (files.tls_ca is None or files.tls_cert is None):
        raise ConfigError("--client-certs needs --tls-cert and --tls-key, and the clients' CA as --tls-ca")
    if masters and files.ticket_keys is not None and files.token_file is None and files.tls_cert is None:
        raise ConfigError("masters with tokens ask this node for its own: give it as --token-file")
    if files.plain_tokens:
        return files
    if files.tokens is not None and files.tls_cert is None and not all(map(is_loopback, addresses)):
        shown = next(each for each in addresses if not is_loopback(each))
        raise ConfigError(
            f"tokens would travel in clear to {shown}: give --tls-cert and --tls-key, or --plain-tokens where "
            "something else encrypts"
        )
    if files.token_file is not None and files.tls_ca is None and not all(map(is_loopback, masters)):
        shown = next(each for each in masters if not is_loopback(each))
        raise ConfigError(
            f"the token would travel in clear to {shown}: give the masters' CA as --tls-ca, or --plain-tokens where "
            "something else encrypts"
        )
    return files


def check_pair(tls_cert: Path | None, tls_key: Path | None) -> None:
    """Raises :class:`ConfigError` when a certificate is without its key, or a key without its certificate."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both, or neither")


def open_to_all(files: SecurityFiles, channel: str, others: Sequence[str]) -> list[str]:
    """A warning for addresses that other hosts reach, where nobody is asked who he is: ``channel`` without tickets, and
    ``others``, gRPC and HTTP, without tokens and without certificates of clients."""
    asked = files.tokens is not None or files.client_certs
    addresses = [*([] if files.ticket_keys is not None or not channel else [channel]), *([] if asked else others)]
    reached = [each for each in addresses if not is_loopback(each)]
    if not reached:
        return []
    return [f"{', '.join(reached)}: open to whoever reaches it: see `kvstrata auth init` for tokens and TLS"]
