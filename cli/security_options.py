"""Flags of the daemons for tokens, tickets and TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Security"


def _file(flag: str, text: str) -> object:
    return typer.Option(flag, help=text, show_default=False, metavar="FILE", rich_help_panel=_PANEL)


Tokens = Annotated[
    Path | None,
    _file("--tokens", "YAML file of who may call HTTP and gRPC here, by their tokens' hashes; none: everybody."),
]
TicketKeys = Annotated[
    Path | None,
    _file("--ticket-keys", "Keys of tickets, the same file on masters and nodes: the channel asks for tickets."),
]
TokenOfNode = Annotated[Path | None, _file("--token-file", "File with the token that this node shows to masters.")]
TlsCert = Annotated[Path | None, _file("--tls-cert", "PEM chain: serve by TLS, HTTP and gRPC. Read again on change.")]
TlsKey = Annotated[Path | None, _file("--tls-key", "PEM key of --tls-cert, without a password.")]
TlsCa = Annotated[Path | None, _file("--tls-ca", "PEM of the CA whose certificates are believed.")]
ClientCerts = Annotated[
    bool,
    typer.Option(
        "--client-certs", help="Serve HTTP and gRPC to certificates of --tls-ca only.", rich_help_panel=_PANEL
    ),
]
PlainTokens = Annotated[
    bool,
    typer.Option(
        "--plain-tokens",
        help="Tokens may travel without TLS: something else encrypts, such as a service mesh.",
        rich_help_panel=_PANEL,
    ),
]
ClientRequests = Annotated[
    int,
    typer.Option(
        help="Requests a second of one client process on the channel (of one token: 64 times as many); 0: no bound.",
        min=0,
        rich_help_panel=_PANEL,
    ),
]
ClientConnections = Annotated[
    int,
    typer.Option(help="Connections of one client process; 0: no bound.", min=0, rich_help_panel=_PANEL),
]
