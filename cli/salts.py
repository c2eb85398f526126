"""Tenants by name: how a salt is given on a command line, and how it is shown."""

from __future__ import annotations

from typing import Annotated

import typer

#: ``--tenant ""`` is the empty salt, an ordinary tenant; without the option: every tenant.
Tenant = Annotated[
    str | None,
    typer.Option("--tenant", metavar="SALT", help='Of this tenant only; "" is the empty salt.', show_default=False),
]


def shown(salt: str) -> str:
    """A salt for a table: the empty one by name, and nothing that would move a terminal's cursor."""
    if not salt:
        return "(empty)"
    return salt if salt.isprintable() else repr(salt)
