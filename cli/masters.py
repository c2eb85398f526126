"""What every command that asks a master takes, and how it finds one that answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.sizes import addresses_flag

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient
    from kvstrata.transfer.security.tickets import TicketSource

Master = Annotated[
    str, addresses_flag("--master", help="Channel address of a master; several with commas.", envvar="KVSTRATA_MASTER")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_MASTER = "127.0.0.1:7400"


def ask(masters: str) -> AdminClient:
    """An admin client of comma-separated masters; raises :class:`Unavailable` when none answers."""
    from kvstrata.client.admin import AdminClient

    return AdminClient(masters)


@contextlib.contextmanager
def tickets(masters: str) -> Iterator[TicketSource | None]:
    """What to prove on channels that the block opens: from these masters, for the token that the caller shows; None
    for a caller that shows none. Raises :class:`ConfigError` for its files."""
    from kvstrata.client.security.credentials import Credentials
    from kvstrata.client.security.fetched import FetchedTickets

    source = FetchedTickets.shown_for(masters.split(","), Credentials.given())
    if source is None:
        yield None
    else:
        with source.start():
            yield source
