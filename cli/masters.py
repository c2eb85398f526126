"""What every command that asks a master takes, and how it finds one that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstrata.cli.sizes import addresses_flag
from kvstrata.proto.errors import Unavailable

if TYPE_CHECKING:
    from kvstrata.client.admin import AdminClient

Master = Annotated[str, addresses_flag("--master", help="Channel address of a master.", envvar="KVSTRATA_MASTER")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_MASTER = "127.0.0.1:7400"


def ask(masters: str) -> AdminClient:
    """The first of comma-separated masters that answers; raises :class:`Unavailable` when none does."""
    from kvstrata.client.admin import AdminClient

    reasons = []
    for address in masters.split(","):
        try:
            return AdminClient(address)
        except Unavailable as error:
            reasons.append(str(error))
    raise Unavailable("; ".join(reasons))
