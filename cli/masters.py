"""What every command that asks a master takes, and how it finds one that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.sizes import addresses_flag

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient

Master = Annotated[
    str, addresses_flag("--master", help="Channel address of a master; several with commas.", envvar="KVSTRATA_MASTER")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_MASTER = "127.0.0.1:7400"


def ask(masters: str) -> AdminClient:
    """An admin client of comma-separated masters; raises :class:`Unavailable` when none answers."""
    from kvstrata.client.admin import AdminClient

    return AdminClient(masters)
